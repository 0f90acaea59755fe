"""A method is a frozen set of hyper-parameters that makes a recipe for a geometry.

Its fields are the request fields; ``GET /methods`` shows its class attributes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, TypeAlias

from pydantic import (
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from patches.encoding.bands import Band
from patches.encoding.echo import renamed, set_apart
from patches.encoding.fields import MOST_FACTOR, Length
from patches.encoding.geometry import Family, RopeGeometry
from patches.encoding.masks import CAUSAL, merged
from patches.encoding.recipe import NOTHING_ADDED, ROTATES_NOTHING, Recipe
from patches.encoding.schedule import UnscaledSchedule
from patches.encoding.temperature import Temperature
from patches.problems import KnownFields

if TYPE_CHECKING:
    FrequencyEncoding: TypeAlias = "FrequencyMethod"  # at run time the registry's union of them


class Method(KnownFields):
    """Base of every method. Unknown keys, NaN and infinity are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=False)

    summary: ClassVar[str]
    """Summary in one line."""
    use: ClassVar[str]
    """Recommended uses."""
    avoid: ClassVar[str]
    """Uses to avoid."""
    reach: ClassVar[str]
    """Longest length that it can serve, in terms of its parameters and the trained length L0."""
    evidence: ClassVar[str]
    """Published results, with numbers."""
    training_free: ClassVar[str]
    """Expected results without tuned weights."""
    paper: ClassVar[str]
    """Source of the formula."""
    formula: ClassVar[str]
    """The formula, in one line of plain text."""
    cost: ClassVar[str] = "none"
    """Cost beyond that of ordinary attention."""
    rotates_at: ClassVar[str] = "cache_write"
    """Place where keys rotate, ``never`` in other families; each resolved recipe derives it again (a test compares)."""
    family: ClassVar[Family] = "rotary"
    """Family of a checkpoint trained with this method."""
    variant: ClassVar[str | None] = None
    """Name of the kind of weights trained for this method that a served model may declare."""
    multiples: ClassVar[tuple[float, ...]] = ()
    """Values of ``factor`` to try on weights not tuned for it, divided by length / trained length."""
    also: ClassVar[tuple[str, ...]] = ()
    """Names in papers and other systems, which errors translate."""
    unlabelled: ClassVar[frozenset[str]] = frozenset()
    """Fields that labels leave out."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.family != "rotary":
            cls.rotates_at = "never"

    method: str
    attention_temperature: Temperature | None = Field(
        None,
        description="Multiplier of q . k / sqrt(d) in every score; a bias is added to it unchanged. A number from 0.01 "
        "to 10, a kind by name, or a kind with parameters.",
    )

    _follows: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _set_apart_what_follows(cls, fields: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        chosen, follows = set_apart(fields, cls.model_fields)
        method = handler(chosen)
        method._follows.update(follows)
        return method

    @model_serializer(mode="wrap")
    def _with_what_follows(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """The request as sent, so that a stored request is compared again when its job resumes."""
        chosen: dict[str, Any] = handler(self)
        return renamed(chosen) | self._follows if self._follows else chosen

    @property
    def follows(self) -> Mapping[str, Any]:
        """Numbers that must follow from the parameters, according to a request that repeats the ``pe`` of an answer."""
        return self._follows

    def as_request(self) -> dict[str, Any]:
        """The fields as a request has them, in JSON: ``method``, and those that were given."""
        return {"method": self.method} | self.model_dump(mode="json", exclude_unset=True)

    def without_follows(self) -> Self:
        """The same parameters without ``follows``."""
        plain = self.model_copy()
        plain._follows = {}
        return plain

    @abstractmethod
    def encoding(self, geometry: RopeGeometry) -> Recipe:
        """The recipe for one model, without the temperature that the request adds.

        Raises:
            ValueError: when a parameter does not fit the geometry; the message names it.
        """

    def recipe(self, geometry: RopeGeometry) -> Recipe:
        """The recipe for one model. On one that adds positions to its tokens, a bias or nothing takes their place.

        Raises:
            ValueError: when a parameter does not fit the geometry; the message names it.
        """
        if self.family in ("learned", "sinusoidal") and self.family != geometry.family:
            raise ValueError(
                f"method: {self.method} is for models trained with {self.family} positions; "
                f"the positions of this one are of the family {geometry.family}"
            )
        masks = geometry.family == "none" and isinstance(self, BasedMethod)  # the only part that has a meaning there
        if self.family == "rotary" and not geometry.rotates and not self.is_native(geometry) and not masks:
            raise ValueError(ROTATES_NOTHING)
        if self.is_declared(geometry):
            return geometry.native.recipe(geometry)  # type: ignore[no-any-return, union-attr]
        recipe, temperature = self.encoding(geometry), self.attention_temperature
        if geometry.adds_positions and self.family in ("bias", "none"):
            recipe = replace(recipe, absolute=NOTHING_ADDED)
        return recipe if temperature is None else temperature.applied(recipe, self.trained_length(geometry))

    @classmethod
    def candidates(cls, geometry: RopeGeometry, length: int) -> list[Self]:
        """Parameters to compare at ``length`` tokens on a model of this family whose weights were not tuned for it."""
        needed = max(1.0, length / geometry.original_max_position_embeddings)
        return [cls.model_validate({"factor": min(needed * multiple, MOST_FACTOR)}) for multiple in cls.multiples]

    @classmethod
    def example(cls, geometry: RopeGeometry, times: float) -> dict[str, Any]:
        """Parameters for ``times`` the trained length, by a rule that fits any model; pictures and benchmarks use them.

        ``factor`` is given where it has no default. A class with other such parameters overrides this.

        Raises:
            TypeError: naming a class that does not.
        """
        fields = {key: field for key, field in cls.model_fields.items() if field.is_required()}
        missing = [f"`{key}`" for key in fields if key != "factor"]
        if missing:
            raise TypeError(f"{cls.__name__}: needs an `example` with {', '.join(missing)}, as Method has one")
        given = "factor" in fields or ("factor" in cls.model_fields and cls.model_fields["factor"].default is None)
        return {"factor": float(times)} if given else {}

    def at(self, length: int) -> Method:
        """The method in effect for a reserved length in tokens: itself, unless it chooses others by length."""
        return self

    def depends_on_length(self, geometry: RopeGeometry) -> bool:
        """True if the encoding depends on the reserved length.

        Raises:
            ValueError: as ``recipe``.
        """
        return self.recipe(geometry).depends_on_length

    def is_native(self, geometry: RopeGeometry) -> bool:
        """True if it means the checkpoint's own encoding, of any family."""
        return False

    def is_declared(self, geometry: RopeGeometry) -> bool:
        """True for the checkpoint's own ``rope_parameters``, with or without its base: its model decides on them."""
        theta = {"rope_theta": geometry.rope_theta} if getattr(self, "rope_theta", 0.0) is None else {}
        is_another = geometry.declared is not None and self != geometry.native
        return is_another and self.model_copy(update=theta) == geometry.declared

    def trained_length(self, geometry: RopeGeometry) -> int:
        """The trained length in effect, in tokens."""
        return geometry.original_max_position_embeddings

    def attended(self, geometry: RopeGeometry) -> int:
        """The trained length, or the window of the layers that requests rotate where that is smaller."""
        trained = self.trained_length(geometry)
        return trained if geometry.window is None else min(trained, geometry.window)

    def extension(self, geometry: RopeGeometry) -> float | None:
        """The factor in effect on the trained length; None where no parameter names one."""
        factor: float | None = self.parameters(geometry).get("factor")
        return factor

    def reached(self, geometry: RopeGeometry) -> int | None:
        """Longest length in tokens by the parameters; None where they name none, or reach any length."""
        times = self.extension(geometry)
        return None if times is None else round(times * self.trained_length(geometry))

    def parameters(self, geometry: RopeGeometry) -> dict[str, Any]:
        """Every field except the name, with the value in effect for this model, defaults included."""
        in_effect = self.model_dump(exclude={"method"})
        if self.attention_temperature is not None:
            in_effect["attention_temperature"] = self.attention_temperature.parameters(self.trained_length(geometry))
        return in_effect


class FrequencyMethod(Method):
    """A method that is a frequency schedule. The two fields let a transformers ``rope_parameters`` object paste in."""

    rope_theta: Annotated[float, Field(gt=1.0, le=1e15, strict=True)] | None = Field(
        None, description="Base of the frequencies; the model's own when absent."
    )
    partial_rotary_factor: Annotated[float, Field(gt=0.0, le=1.0, strict=True)] | None = Field(
        None, description="Share of head_dim that rotates; must equal the model's when given."
    )

    def theta(self, geometry: RopeGeometry) -> float:
        """The base in effect, after checking ``partial_rotary_factor`` against the model."""
        share, whole = self.partial_rotary_factor, geometry.head_dim
        # The product may be rounded below the model's own width, as 104 x (30 / 104) is.
        if share not in (None, geometry.rotary_share) and int(whole * share) != geometry.rotary_dim:
            raise ValueError(
                f"partial_rotary_factor: this model rotates {geometry.rotary_share * whole:g} of {whole} "
                f"dimensions, so it must be {geometry.rotary_share:g}"
            )
        return self.rope_theta or geometry.rope_theta

    def parameters(self, geometry: RopeGeometry) -> dict[str, Any]:
        in_effect = {
            "rope_theta": self.theta(geometry),
            "partial_rotary_factor": geometry.rotary_share,
        }
        return super().parameters(geometry) | in_effect


def trained_length_of(given: int | None, geometry: RopeGeometry) -> int:
    """The trained length in effect: that of the request, else the model's own."""
    return given or geometry.original_max_position_embeddings


class _TrainedLength(Method):
    """The field of a method that depends on the trained length."""

    original_max_position_embeddings: Length | None = Field(
        None, description="Trained length in tokens; the model's own when absent."
    )

    def trained_length(self, geometry: RopeGeometry) -> int:
        return trained_length_of(self.original_max_position_embeddings, geometry)

    def parameters(self, geometry: RopeGeometry) -> dict[str, Any]:
        return super().parameters(geometry) | {"original_max_position_embeddings": self.trained_length(geometry)}


class TrainedLengthMethod(_TrainedLength, FrequencyMethod):
    """A schedule that depends on the trained length."""


class WrappingMethod(Method):
    """A method over any frequency schedule, its ``base``."""

    base: FrequencyEncoding | None = Field(
        None, description="Frequency schedule underneath, with its own parameters; the checkpoint's own when absent."
    )

    @model_validator(mode="after")
    def _temperature_once(self) -> Self:
        if self.base is not None and self.base.attention_temperature is not None and self.attention_temperature:
            raise ValueError("attention_temperature: given here and in base; give it once")
        return self

    def on_base(self, geometry: RopeGeometry, *bands: Band) -> Recipe:
        """The recipe underneath with ``bands`` in place of its one plain band.

        A model without positions keeps the masks of ``bands``.

        Raises:
            ValueError: when nothing rotates and ``bands`` mask nothing, or what is underneath moves positions itself.
        """
        base = self._underneath(geometry)
        recipe = _plain_rope(geometry) if base is None else base.recipe(geometry)
        if recipe.schedule is None:
            masks = merged([band.predicate for band in bands])
            if masks == [CAUSAL]:
                raise ValueError(ROTATES_NOTHING)
            return replace(recipe, bands=tuple(Band(predicate=mask) for mask in masks))
        if recipe.bands != (Band(),):
            raise ValueError("base: this model's own encoding moves positions already; name a frequency schedule")
        return replace(recipe, bands=bands or recipe.bands)

    def _underneath(self, geometry: RopeGeometry) -> Method | None:
        """The base schedule, None for plain RoPE: a checkpoint's own encoding is not its own base.

        A checkpoint's own map or mask gives way to this one, which keeps its schedule.
        """
        native = geometry.native
        if self.base is not None or not isinstance(native, Method) or native == self:
            return self.base
        return native.base if isinstance(native, BasedMethod) else native

    def extension(self, geometry: RopeGeometry) -> float | None:
        base = self._underneath(geometry)
        return 1.0 if base is None else base.extension(geometry)

    def reached(self, geometry: RopeGeometry) -> int | None:
        base = self._underneath(geometry)
        return None if base is not None and base.reached(geometry) is None else super().reached(geometry)

    def parameters(self, geometry: RopeGeometry) -> dict[str, Any]:
        base = self._underneath(geometry)
        # "default" means a checkpoint's own encoding, also one that a request cannot name here.
        underneath: dict[str, Any] = {"method": "default", "attention_temperature": None}
        if isinstance(base, FrequencyMethod):
            underneath = {"method": base.method, **base.parameters(geometry)}
        elif base is None:
            underneath |= {"rope_theta": geometry.rope_theta, "partial_rotary_factor": geometry.rotary_share}
        else:
            underneath |= {"rope_theta": None, "partial_rotary_factor": None}
        return super().parameters(geometry) | {"base": underneath}


class BasedMethod(_TrainedLength, WrappingMethod):
    """A method that moves positions or masks pairs, measured by the trained length, over a frequency schedule."""

    def reached(self, geometry: RopeGeometry) -> int | None:
        trained = super().reached(geometry)
        return None if trained is None else self.stretched(trained, geometry)

    def stretched(self, trained: int, geometry: RopeGeometry) -> int | None:
        """Longest length whose distances all stay below ``trained``, in tokens; None where every length has this."""
        return None


def _plain_rope(geometry: RopeGeometry) -> Recipe:
    return Recipe(UnscaledSchedule(geometry.rope_theta) if geometry.rotates else None)
