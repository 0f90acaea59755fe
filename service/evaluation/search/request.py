"""The body of ``POST /search``."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from patches import problem
from service.evaluation.documents import DEFAULT_DOCUMENT
from service.evaluation.request import Bos, ByLengthRequest, Documents, Seed, Tokens


class SearchRequest(ByLengthRequest):
    """A factor for each rotary pair at ``length`` tokens, compared with ``methods`` on text that no candidate reads.

    Without ``methods``, these are the ones whose factors begin the search.
    """

    evaluation: Literal["search"] = "search"
    length: Tokens | None = Field(
        None,
        description="Tokens that the model is to read; 4 times the trained length when absent, or as the text allows.",
    )
    input: Documents = DEFAULT_DOCUMENT
    windows: Annotated[int, Field(ge=1, le=256)] = Field(4, description="Windows that every candidate reads.")
    held_out: Annotated[int, Field(ge=3, le=1024)] = Field(
        8, description="Windows of later text, on which the best candidate is compared with `methods`."
    )
    population: Annotated[int, Field(ge=4, le=64)] = Field(
        24, description="Candidates of the first generation; each later one has at most half as many new ones."
    )
    generations: Annotated[int, Field(ge=1, le=40)] = Field(8, description="Generations, the first one included.")
    stop_after: Annotated[int, Field(ge=1, le=40)] | None = Field(
        None, description="Generations after which it ends, without the held-out windows; null: it does not."
    )
    seed: Seed = Field(0, description="Of the places of the windows, and of the mutations and crossovers.")
    bos: Bos = Field("auto", description="BOS at the start of every window; `auto` does what the tokenizer does.")

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if self.lengths is not None:
            raise problem("excluded", "a search is for one length: name it in length", "lengths")
        return self

    def length_values(self) -> list[int] | None:
        """The target alone."""
        return None if self.length is None else [self.length]

    @property
    def longest_field(self) -> str:
        """The field that sets the target, also by its default."""
        return "length"

    @classmethod
    def example(cls) -> dict[str, Any]:
        return {"input": DEFAULT_DOCUMENT, "length": 1024, "population": 8, "generations": 3}
