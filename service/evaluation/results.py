"""Fields and methods of every evaluation's result, and progress events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from service.evaluation.formatting import percent
from service.evaluation.scores import Overview, Scores
from service.evaluation.setup import Setup

if TYPE_CHECKING:
    from datetime import datetime

    import pandas
    import pyarrow

    from service.policy.policy import Policy

Row = dict[str, str | int | float | bool | None]
"""One line of a table: the same keys in every row of a result."""

Columns = Mapping[str, type[str | int | float | bool]]
"""Types of columns by name."""

MOST_NAMED = 3
"""Documents, or pairs of them, that a sentence names."""


class Overlap(BaseModel):
    """Index of an earlier document, and the share of the shorter one's text that both have."""

    document: int
    share: float


class DocumentInfo(BaseModel):
    """A document as it was used; ``cut_from`` is its number of tokens before ``max_tokens`` cut it."""

    name: str
    tokens: int
    bytes: int
    tokens_sha256: str = Field(
        "",
        description="SHA-256 in hex of the token ids that were used, as 64-bit integers, least significant byte first.",
    )
    cut_from: int | None = None
    overlap: Overlap | None = Field(None, description="With the earlier document that shares most, from a tenth on.")


Prompt = Annotated[
    str | None,
    Field(
        exclude_if=lambda prompt: prompt is None,
        description="The prompt without its BOS, where `include_text` asks for it: neither jobs nor results keep it.",
    ),
]


class Output(BaseModel, ABC):
    """A model's answer to a prompt that the evaluation wrote."""

    prompt: Prompt = None

    @abstractmethod
    def heading(self) -> str:
        """The prompt in a few words."""


class MethodInResult(BaseModel):
    """A method as it took effect. Each evaluation adds its numbers."""

    label: str
    pe: dict[str, Any] = Field(description="The request's encoding, resolved at the longest length.")
    model: str = Field(description="The served model that answered: a method may name a variant of the requested one.")
    reach: int | None = Field(
        None,
        description="Longest length in tokens by the parameters. Null where they name none or reach any length, and "
        "for the model's own encoding.",
    )


Part = Literal["methods", "lengths", "evaluations", "rounds", "generations"]
"""Parts of an evaluation that a partial result may lack."""

_SCOPES: dict[Part, str] = {
    "methods": "of the methods",
    "lengths": "at the lengths",
    "evaluations": "by the evaluations",
    "rounds": "by the rounds",
    "generations": "by the generations",
}


class Partial(BaseModel):
    """Progress of a job that ended early, and the units that its result lacks."""

    units_done: int
    units_total: int
    missing: dict[str, int] = Field(description="Units that are not finished, by the label of their method.")
    lacks: list[Part] = Field(default=["methods"], description="The result compares without some of these.")

    @property
    def scope(self) -> str:
        """The bounds of the comparison: "of the methods that finished". Empty where all are compared."""
        return f"{' and '.join(_SCOPES[part] for part in self.lacks)} that finished" if self.lacks else ""

    def words(self) -> str:
        """The same in one line."""
        missing = ", ".join(f"{label} ({units})" for label, units in self.missing.items())
        return f"{self.units_done} of {self.units_total} units are finished; missing: {missing}"


class EvaluationResult(BaseModel, ABC):
    """An evaluation's numbers: equal to the bit for equal inputs and an equal ``setup``.

    ``trained_length`` is where plain RoPE ends. Every evaluation adds its ``methods``.
    """

    model_config = ConfigDict(protected_namespaces=())

    if TYPE_CHECKING:
        methods: Sequence[MethodInResult]

    optional: ClassVar[Columns] = {}
    """The columns of ``rows`` that may be empty. A column of empty cells has its type all the same."""

    evaluation: str
    id: str = ""
    model: str
    trained_length: int
    partial: Partial | None = Field(
        None, description="Of a job that ended early: the result has the methods or lengths that are complete."
    )
    setup: Setup | None = Field(
        None, description="All that numbers depend on beside the request and the choices of `auto`."
    )
    seconds: float | None = Field(None, description="Wall time; absent in a job's result, see the job.")
    links: dict[str, str] = Field(default_factory=dict, description="The same result in other forms.")

    @abstractmethod
    def rows(self) -> list[Row]:
        """Every number as a long table: one row per method and length, document, depth or other unit."""

    @abstractmethod
    def scores(self) -> Scores:
        """One number per method and length: tables show them first and a sweep compares them.

        Raises:
            TypeError: for a result without scores, which has an ``overview``.
        """

    @abstractmethod
    def sentences(self) -> list[str]:
        """The answer in a few sentences, made from the numbers alone."""

    def words(self) -> list[str]:
        """``sentences``; those of a partial result begin with its scope. The caller escapes them."""
        first, *others = self.sentences()
        return [self._scoped(first), *others]

    def cautions(self) -> list[str]:
        """Sentences on numbers that mean little; tables and pictures have them too."""
        return []

    def overview(self) -> Overview | None:
        """The table of a result without scores; None for all others."""
        return None

    def policy(self, created: datetime) -> Policy | None:
        """The policy of ``auto`` that it names, made at ``created``; None if it names no encodings by length."""
        return None

    def models(self) -> set[str]:
        """The served models that answered."""
        return {method.model for method in self.methods}

    def scores_the_same(self) -> bool:
        """False if lengths differ in the tokens that they score, and so in more than context."""
        return True

    def parts(self) -> Sequence[EvaluationResult]:
        """The results that have scores: this one, or those of a sweep."""
        return [self]

    def outputs(self) -> Sequence[Output]:
        """Answers to prompts that the evaluation wrote, in the order of the plan's units."""
        return []

    def title(self) -> str:
        """The subject of the result in one line."""
        scores = self.scores()
        return f"{scores.title} of {self.model} by {scores.by}"

    def heading(self) -> str:
        """``title``; that of a partial result begins with its scope."""
        return self._scoped(self.title())

    def end_early(self, partial: Partial) -> None:
        """Make it a partial result. The words of an answer, where it has one, begin with the scope too."""
        self.partial = partial

    def scope(self) -> str:
        """The bounds of a partial comparison; empty for a whole one."""
        return "" if self.partial is None else self.partial.scope

    def _scoped(self, text: str) -> str:
        scope = self.scope()
        lead = f"{scope[0].upper()}{scope[1:]}: " if scope else ""
        return text if text.startswith(lead) else lead + text

    def names(self) -> list[str]:
        """The methods as tables name them."""
        return [name_of(method, self) for method in self.methods]

    def to_arrow(self) -> pyarrow.Table:
        """``rows`` as an Arrow table. All tables of one evaluation have the same schema."""
        import pyarrow

        arrow = {bool: pyarrow.bool_(), int: pyarrow.int64(), float: pyarrow.float64(), str: pyarrow.string()}
        table = pyarrow.Table.from_pylist(self.rows())
        types = {name: arrow[kind] for name, kind in self.optional.items()}
        return table.cast(pyarrow.schema([(at.name, types.get(at.name, at.type)) for at in table.schema]))

    def to_pandas(self) -> pandas.DataFrame:
        """``rows`` as a data frame; needs the extra ``pandas``."""
        return self.to_arrow().to_pandas()

    def numbers(self) -> dict[str, Any]:
        """JSON of what depends on the inputs alone."""
        return self.model_dump(mode="json", exclude={"id", "setup", "seconds", "links"})


class Progress(BaseModel):
    """Tokens read so far out of all, and the current method."""

    tokens_done: int
    tokens_total: int
    label: str
    seconds: Annotated[float, Field(ge=0)]


def name_of(method: MethodInResult, result: EvaluationResult) -> str:
    """The label, and the model where it differs from the result's."""
    return method.label if method.model == result.model else f"{method.label} on {method.model}"


def documents_text(documents: Sequence[DocumentInfo]) -> str:
    """The tokens of the documents and the names of the first; of several, the names are last. They may be long,
    and pictures cut a line at its end."""
    names = [document.name for document in documents]
    shown = ", ".join(names[:MOST_NAMED]) + (f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else "")
    cut = [document for document in documents if document.cut_from is not None]
    more = f", {len(cut)} cut to {cut[0].tokens:,}" if cut else ""
    tokens = f"{sum(document.tokens for document in documents):,} tokens{more}"
    return f"{shown} ({tokens})" if len(names) == 1 else f"{len(names)} documents, {tokens}: {shown}"


def overlaps_text(documents: Sequence[DocumentInfo]) -> list[str]:
    """The caution about documents that are not independent, as intervals take them."""
    found = [
        f"{document.name} and {documents[document.overlap.document].name} share {percent(document.overlap.share)}"
        for document in documents
        if document.overlap is not None
    ]
    more = f", and {len(found) - MOST_NAMED} more do" if len(found) > MOST_NAMED else ""
    shown = "; ".join(found[:MOST_NAMED])
    return [f"Intervals take documents as independent, but {shown} of the shorter text{more}."] if found else []
