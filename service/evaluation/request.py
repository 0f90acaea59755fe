"""Fields of every evaluation's body."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, PrivateAttr, Tag, model_validator

from patches import LONGEST, KnownFields, Method, problem
from service.inputs import MOST_ENCODINGS, MOST_TEXTS, TextOrTokens, as_list, matching
from service.policy.auto import Encoding
from service.settings import Seconds

Tokens = Annotated[int, Field(ge=2, le=LONGEST - 1)]

Bos = Literal["auto", "always", "never"]

Documents = Annotated[
    TextOrTokens,
    Field(description="A text, token ids, a list of either (documents), or the name of a built-in document."),
]

Seed = Annotated[int, Field(ge=0, lt=1 << 63)]

NO_NUL = "^[^\\x00]*$"
"""No file name has one, and PostgreSQL takes none."""

Name = Annotated[
    str,
    matching(NO_NUL, "must have no NUL character"),
    Field(min_length=1, max_length=255, json_schema_extra={"pattern": NO_NUL}),
]

MOST_IN_RANGE = 65_536
"""Most lengths of a range: a short body must not fill the memory."""


class LengthRange(KnownFields):
    """start, start + step, ... up to and including stop."""

    start: Tokens
    stop: Tokens
    step: Annotated[int, Field(ge=1)]

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.stop < self.start:
            raise ValueError("stop must be at least start")
        count = (self.stop - self.start) // self.step + 1
        if count > MOST_IN_RANGE:
            raise ValueError(f"has {count} lengths and at most {MOST_IN_RANGE} can be asked for")
        return self

    def values(self) -> list[int]:
        return list(range(self.start, self.stop + 1, self.step))


def _list_or_range(value: object) -> str | None:
    if isinstance(value, list):
        return "list"
    return "range" if isinstance(value, Mapping | LengthRange) else None


Lengths = Annotated[
    Annotated[list[Tokens], Field(min_length=1, max_length=MOST_IN_RANGE, fail_fast=True), Tag("list")]
    | Annotated[LengthRange, Tag("range")],
    Discriminator(
        _list_or_range,
        custom_error_type="list_or_range",
        custom_error_message="Input should be a list of whole numbers, or an object with start, stop and step",
    ),
]


def _several(value: Any) -> Any:
    if not isinstance(value, str | Mapping | Method | list):
        raise problem("encodings", "must be an encoding or a list of them")
    return value if isinstance(value, list) else [value]


Methods = Annotated[
    list[Encoding],
    Field(min_length=1, max_length=MOST_ENCODINGS),
    BeforeValidator(_several, json_schema_input_type=Encoding | list[Encoding]),
]
"""Encodings to compare; one alone needs no list."""


class EvaluationRequest(KnownFields, ABC):
    """The measurement, and the form of its answer. The ``Evaluation`` in the catalogue turns it into a plan."""

    model_config = ConfigDict(allow_inf_nan=False)

    writes_prompts: ClassVar[bool] = False
    """True if it may write prompts, which its plan can write again."""

    evaluation: str
    model: str | None = Field(None, description="A served model; the first one when absent.")
    methods: Methods = Field(
        default_factory=lambda: [{"method": "default"}],
        validate_default=True,
        description="Encodings to compare, one or a list: short forms such as `yarn:4`, `auto`, or objects with "
        "`method`. `auto` has the encoding of each length.",
    )
    lengths: Lengths | None = Field(
        None, description="Context lengths in tokens; doubling from the trained length when absent."
    )
    stream: bool = Field(False, description="Server-sent events: progress, then the result.")
    background: bool = Field(False, description="Answer 202 with a job at once; its routes have the result.")
    reuse: bool = Field(
        True,
        description="A job reuses stored outcomes of the same inputs, model and code. If false, it computes all units, "
        "and no other job reuses them.",
    )
    timeout_s: Seconds | None = Field(
        None, description="Seconds until it is given up with 504; the server's maximum when absent. Not for jobs."
    )

    @model_validator(mode="after")
    def _one_way_to_answer(self) -> Self:
        if self.background and (self.stream or self.timeout_s is not None):
            why = "background excludes stream and timeout_s: follow the job's events instead"
            raise problem("excluded", why, "background")
        return self

    @property
    def names_methods(self) -> bool:
        """True if ``methods`` are from the client."""
        return "methods" in self.model_fields_set

    def length_values(self) -> list[int] | None:
        """Sorted lengths without repeats, or None for the default."""
        if self.lengths is None:
            return None
        values = self.lengths.values() if isinstance(self.lengths, LengthRange) else self.lengths
        return sorted(set(values))

    def reduced(self, kept: Mapping[str, Any]) -> Self:
        """The request with fewer methods or lengths, those of ``kept``."""
        return self.model_copy(update=kept)

    @classmethod
    @abstractmethod
    def example(cls) -> dict[str, Any]:
        """A body that works on the embedded demo models, without its ``evaluation``."""

    @classmethod
    def reads_documents(cls, fields: Mapping[str, Any]) -> bool:
        """True if documents in a body of ``fields`` have an effect."""
        return "input" in cls.model_fields

    @classmethod
    def placed(cls, documents: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
        """A body of ``fields`` that has ``documents``: their ``input`` and ``max_tokens``."""
        return {**fields, **documents}

    @classmethod
    def in_sweep(cls, fields: Mapping[str, Any]) -> dict[str, Any]:
        """``fields`` of a part of a sweep, with those that a sweep sets where they are absent."""
        return dict(fields)

    def texts(self) -> list[str | list[int]]:
        """The documents of the request."""
        given = getattr(self, "input", None)
        return [] if given is None else as_list(given)


class DocumentsRequest(EvaluationRequest):
    """An evaluation of documents, its ``input``."""

    names: Annotated[list[Name], Field(max_length=MOST_TEXTS)] | None = Field(
        None, description="A name for each document of `input`, such as that of its file; results and errors have them."
    )
    max_tokens: Tokens | None = Field(
        None, description="Most tokens of each document; longer documents are cut, and the result has their length."
    )

    @model_validator(mode="after")
    def _a_name_for_each(self) -> Self:
        count = len(self.texts())
        if self.names is not None and len(self.names) != count:
            raise problem("count", f"needs as many entries as input, {count}, and has {len(self.names)}", "names")
        twice = [name for name, times in Counter(self.names or ()).items() if times > 1]
        if twice:
            raise problem("repeated", f"{twice[0]!r} names two documents: give each its own name", "names")
        return self


class ByLengthRequest(DocumentsRequest):
    """An evaluation that reads every document at each of its lengths."""

    short_documents: Literal["refuse", "skip"] = Field(
        "refuse",
        description="Documents shorter than the longest length: `refuse` is an error, `skip` leaves them out, and the "
        "result lists them as `skipped`.",
    )
    _least: int | None = PrivateAttr(None)

    @property
    def longest_field(self) -> str:
        """The field that sets the longest length."""
        return "lengths"

    def least(self) -> int | None:
        """Tokens of the longest length, by which a document is short; None without lengths."""
        wanted = self.length_values()
        return self._least or (wanted[-1] if wanted else None)

    def read_from(self, least: int | None) -> Self:
        """The request whose short documents are those below ``least`` tokens, whatever its lengths are."""
        copy = self.model_copy()
        copy._least = least
        return copy

    def reduced(self, kept: Mapping[str, Any]) -> Self:
        """With fewer lengths it reads the same documents."""
        return super().reduced(kept).read_from(self.least())


class ByPositionRequest(ByLengthRequest):
    """An evaluation that also has the loss by tokens of context."""

    position_bin: Annotated[int, Field(ge=1, le=LONGEST)] | None = Field(
        None,
        description="Tokens of each bin of `nll_by_position`, such as 256; bins that double when absent. Stored "
        "outcomes serve any bins.",
    )

    @model_validator(mode="after")
    def _bins_within_the_lengths(self) -> Self:
        wanted = self.length_values()
        if self.position_bin is not None and wanted is not None and self.position_bin >= wanted[-1]:
            why = f"must be below the longest length ({wanted[-1]}), for two bins"
            raise problem("one_bin", why, "position_bin")
        return self
