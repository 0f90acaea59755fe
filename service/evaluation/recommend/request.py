"""The body of ``POST /recommend``."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from patches import problem
from service.evaluation.catalogue import OPTION
from service.evaluation.documents import DEFAULT_DOCUMENT
from service.evaluation.request import Bos, ByLengthRequest, Documents, Seed, Tokens
from service.export.targets import TargetName
from service.policy.auto import AUTO, is_auto


class RecommendRequest(ByLengthRequest):
    """The encoding to use at ``length`` tokens, and a cheaper one for shorter lengths where it is good enough.

    ``methods`` are the candidates; without them, every method proposes its own for the model and the length.
    """

    evaluation: Literal["recommend"] = "recommend"
    length: Tokens | None = Field(
        None, description="Tokens that the model is to read; the longest of `lengths`, or 4 times the trained length."
    )
    input: Documents = DEFAULT_DOCUMENT
    windows: Annotated[int, Field(ge=2, le=1024)] = Field(
        32, description="Windows of the target length that the last round reads; earlier rounds read fewer."
    )
    budget: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Most tokens to read, all passes together: `windows` becomes smaller until they suffice."
    )
    tolerance: Annotated[float, Field(ge=0, le=10)] = Field(
        0.1,
        description="Loss above the best at a length at which a cheaper encoding is good enough: 0.1 is 10 % of "
        "perplexity, or 10 points of recall.",
    )
    target: TargetName | None = Field(
        None,
        description="A system of `POST /export`: candidates that it cannot express at `length` are left out.",
        json_schema_extra={OPTION: "to"},
    )
    rounds: Annotated[int, Field(ge=1, le=64)] | None = Field(
        None, description="Rounds after which it ends, without the later ones; all when absent."
    )
    seed: Seed = Field(0, description="Of the order of the windows.")
    bos: Bos = Field("auto", description="BOS at the start of every window; `auto` does what the tokenizer does.")

    @model_validator(mode="after")
    def _candidates_are_encodings(self) -> Self:
        if any(map(is_auto, self.methods)):
            why = f"{AUTO} chooses among encodings and cannot be a candidate: name those to compare"
            raise problem("no_candidate", why, "methods")
        return self

    def length_values(self) -> list[int] | None:
        """The lengths with the target."""
        lengths = super().length_values()
        if self.length is None:
            return lengths
        return sorted({*(lengths or ()), self.length})

    @property
    def longest_field(self) -> str:
        """The field that sets the target, also by its default."""
        return "lengths" if self.length is None and self.lengths is not None else "length"

    @classmethod
    def example(cls) -> dict[str, Any]:
        return {"input": DEFAULT_DOCUMENT, "length": 1024, "windows": 16}
