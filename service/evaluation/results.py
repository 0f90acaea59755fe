"""What every evaluation returns, and how far it has got."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    import pandas
    import pyarrow

Row = dict[str, str | int | float | bool | None]
"""One line of a table: the same keys in every row of a result."""


class Interval(BaseModel):
    """95 % interval of a number. ``kind`` says over what and how: documents (bootstrap), blocks of 64 consecutive
    tokens of the one document (standard error), or samples (Wilson's interval of a proportion)."""

    low: float
    high: float
    kind: Literal["documents", "blocks", "samples"]


class DocumentInfo(BaseModel):
    """A document as it was used; ``cut_from`` are the tokens that it had before ``max_tokens`` cut it."""

    name: str
    tokens: int
    bytes: int
    cut_from: int | None = None


class MethodInResult(BaseModel):
    """A method as it took effect. Evaluations add what they measured of it."""

    label: str
    pe: dict[str, Any] = Field(description="The request's encoding, resolved at the longest length.")
    model: str = Field(description="The served model that answered: a method may name a variant of the requested one.")


class Partial(BaseModel):
    """That a job ended before it was done, and what its result lacks."""

    units_done: int
    units_total: int
    missing: dict[str, int] = Field(description="Units that are not finished, by the label of their method.")

    def words(self) -> str:
        """The same in one line."""
        missing = ", ".join(f"{label} ({units})" for label, units in self.missing.items())
        return f"{self.units_done} of {self.units_total} units are finished; missing: {missing}"


class EvaluationResult(BaseModel, ABC):
    """An evaluation's numbers: equal to the bit for equal inputs, but for ``id``, ``seconds`` and ``links``.

    ``trained_length`` is where plain RoPE ends.
    """

    model_config = ConfigDict(protected_namespaces=())

    evaluation: str
    id: str = ""
    model: str
    trained_length: int
    partial: Partial | None = Field(
        None, description="Of a job that ended early: the result has the methods that are complete, and lacks others."
    )
    seconds: float | None = Field(None, description="Wall time; absent in a job's result, see the job.")
    links: dict[str, str] = Field(default_factory=dict, description="The same result in other forms.")

    @abstractmethod
    def rows(self) -> list[Row]:
        """Every number as a long table: one row per method and length, document, depth or whatever there is."""

    def to_arrow(self) -> pyarrow.Table:
        """``rows`` as an Arrow table."""
        import pyarrow

        return pyarrow.Table.from_pylist(self.rows())

    def to_pandas(self) -> pandas.DataFrame:
        """``rows`` as a data frame; needs the extra ``pandas``."""
        return self.to_arrow().to_pandas()

    def numbers(self) -> dict[str, Any]:
        """JSON of what depends on the inputs alone."""
        return self.model_dump(mode="json", exclude={"id", "seconds", "links"})


class Progress(BaseModel):
    """Tokens read so far out of all, and the method at work."""

    tokens_done: int
    tokens_total: int
    label: str
    seconds: Annotated[float, Field(ge=0)]


def name_of(method: MethodInResult, result: EvaluationResult) -> str:
    """The label, and the model where another one than the result's answered."""
    return method.label if method.model == result.model else f"{method.label} on {method.model}"


def documents_text(documents: Sequence[DocumentInfo], most: int = 3) -> str:
    """The names of the documents, the first few of many, and how long they are."""
    names = [document.name for document in documents]
    shown = ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
    cut = [document for document in documents if document.cut_from is not None]
    more = f", {len(cut)} cut to {cut[0].tokens:,}" if cut else ""
    return f"{shown} ({sum(document.tokens for document in documents):,} tokens{more})"
