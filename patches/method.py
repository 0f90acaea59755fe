"""What a method is: a frozen set of hyper-parameters that makes a recipe for a geometry.

The fields are the request fields; the class attributes are what ``GET /methods`` tells about it.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from patches.recipe import Recipe, RopeGeometry

Factor = Annotated[float, Field(ge=1.0, le=4096.0, strict=True)]
Length = Annotated[int, Field(ge=2, le=1 << 24, strict=True)]
Turns = Annotated[float, Field(ge=1e-6, le=1e6, strict=True)]
AttentionFactor = Annotated[float, Field(gt=0.0, le=100.0, strict=True)]


class Method(BaseModel):
    """Base of every method. Unknown keys, NaN and infinity are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=False)

    summary: ClassVar[str]
    """One line: what it does."""
    paper: ClassVar[str]
    """Where the formula is from."""
    training_free: ClassVar[str]
    """What to expect without tuned weights."""
    cost: ClassVar[str]
    """What it costs beyond ordinary attention."""
    rotates_at: ClassVar[str] = "cache_write"
    """Where keys rotate; derived again from the recipe whenever one is resolved (a test compares)."""
    variant: ClassVar[str | None] = None
    """Name of the kind of weights trained for this method that a served model may declare."""

    method: str

    @abstractmethod
    def recipe(self, geometry: RopeGeometry) -> Recipe:
        """The recipe for one model.

        Raises:
            ValueError: when a parameter does not fit the geometry; the message names it.
        """

    def parameters(self, geometry: RopeGeometry) -> dict[str, Any]:
        """Every field except the name, with the value in effect for this model, defaults included."""
        return self.model_dump(exclude={"method"})


class FrequencyMethod(Method):
    """A method that rotates. The two fields let a transformers ``rope_parameters`` object paste in."""

    rope_theta: Annotated[float, Field(gt=1.0, le=1e15, strict=True)] | None = Field(
        None, description="Base of the frequencies; the model's own when absent."
    )
    partial_rotary_factor: Annotated[float, Field(gt=0.0, le=1.0, strict=True)] | None = Field(
        None, description="Share of head_dim that rotates; must equal the model's when given."
    )

    def theta(self, geometry: RopeGeometry) -> float:
        """The base in effect, after checking ``partial_rotary_factor`` against the model."""
        share = self.partial_rotary_factor
        if share is not None and int(geometry.head_dim * share) != geometry.rotary_dim:
            raise ValueError(
                f"partial_rotary_factor: this model rotates {geometry.rotary_dim} of {geometry.head_dim} "
                f"dimensions, so it must be {geometry.rotary_dim / geometry.head_dim:g}"
            )
        return self.rope_theta or geometry.rope_theta

    def parameters(self, geometry: RopeGeometry) -> dict[str, Any]:
        in_effect = {
            "rope_theta": self.theta(geometry),
            "partial_rotary_factor": geometry.rotary_dim / geometry.head_dim,
        }
        return super().parameters(geometry) | in_effect


class TrainedLengthMethod(FrequencyMethod):
    """A method that needs to know the length the model was trained at."""

    original_max_position_embeddings: Length | None = Field(
        None, description="Trained length in tokens; the model's own when absent."
    )

    def trained_length(self, geometry: RopeGeometry) -> int:
        return self.original_max_position_embeddings or geometry.original_max_position_embeddings

    def parameters(self, geometry: RopeGeometry) -> dict[str, Any]:
        return super().parameters(geometry) | {"original_max_position_embeddings": self.trained_length(geometry)}
