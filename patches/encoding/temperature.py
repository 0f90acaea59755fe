"""Attention temperature: a multiplier on the scaled products of a query with keys. Any method may take one.

It multiplies q . k / sqrt(d), and terms by distance of a layer's own weights. A score bias is added to that unchanged.

Sources: YaRN (arXiv:2309.00071, section 3.4); LongRoPE (arXiv:2402.13753); log-n scaling (Su, kexue.fm 8823);
ChunkLlama (released code of arXiv:2402.17463); Llama 4 and Ministral 3 (transformers); uniform scale of NoPE
(arXiv:2404.12224); Qwen2.5-1M (arXiv:2501.15383). A multiplier that depends on positions goes on the query,
never on cached keys.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, ConfigDict, Field

from patches.encoding.fields import Factor, Length, Multiplier
from patches.encoding.schedule import TemperedSchedule
from patches.problems import KnownFields, problem

if TYPE_CHECKING:
    import torch

    from patches.encoding.recipe import AttentionTemperature, Recipe


@dataclass(frozen=True)
class ConstantTemperature:
    """The same multiplier for every query."""

    multiplier: float

    def __call__(self, q_idx: torch.Tensor) -> torch.Tensor:
        import torch

        return torch.full(q_idx.shape, self.multiplier, dtype=torch.float32, device=q_idx.device)


@dataclass(frozen=True)
class LogLengthTemperature:
    """max(1, ln(p + 1) / ln(trained_length)) for the query at position p."""

    trained_length: int

    def __call__(self, q_idx: torch.Tensor) -> torch.Tensor:
        return ((q_idx.float() + 1.0).log() / math.log(self.trained_length)).clamp_min(1.0)


@dataclass(frozen=True)
class FloorLogTemperature:
    """1 + beta ln(1 + floor((p + offset) / length)) for the query at position p."""

    beta: float
    length: int
    offset: int

    def __call__(self, q_idx: torch.Tensor) -> torch.Tensor:
        return 1.0 + self.beta * ((q_idx + self.offset) // self.length).float().log1p()


@dataclass(frozen=True)
class LogRatioTemperature:
    """1 + beta max(0, ln((p + 1) / length)) for the query at position p."""

    beta: float
    length: int

    def __call__(self, q_idx: torch.Tensor) -> torch.Tensor:
        return 1.0 + self.beta * ((q_idx + 1).float() / self.length).clamp_min(1.0).log()


@dataclass(frozen=True)
class ReservedLengthTemperature:
    """max(1, 0.1 ln(n / trained_length) + 1)^2 for a reserved length of n tokens."""

    trained_length: int
    depends_on_length: bool = True

    def at(self, length: int) -> ConstantTemperature:
        return ConstantTemperature(max(1.0, 0.1 * math.log(length / self.trained_length) + 1.0) ** 2)

    def __call__(self, q_idx: torch.Tensor) -> torch.Tensor:
        raise TypeError("known only once a length is reserved")


class _Temperature(KnownFields):
    """Base of the kinds: frozen, without unknown keys. ``trained_length`` is in tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    kind: str

    @abstractmethod
    def temperature(self, trained_length: int) -> AttentionTemperature:
        """The multiplier for a model of this trained length."""

    def applied(self, recipe: Recipe, trained_length: int) -> Recipe:
        """``recipe`` under this temperature, in place of any it has.

        Raises:
            ValueError: when only rotated dimensions are to be scaled and the recipe rotates none.
        """
        return replace(recipe, attention_temperature=self.temperature(trained_length))

    def parameters(self, trained_length: int) -> dict[str, Any]:
        """Every field with the value in effect."""
        in_effect = self.model_dump()
        if "length" in in_effect:
            in_effect["length"] = in_effect["length"] or trained_length
        return in_effect


class _ConstantKind(_Temperature):
    """A kind that is one number, on all dimensions of q . k or on the rotated ones.

    On the rotated part, it is a factor on cos and sin. The two differ for a model that rotates only part of each head.
    """

    rotated_only: bool = Field(
        False, strict=True, description="Scale only the rotated dimensions, as YaRN's factor on cos and sin does."
    )

    @abstractmethod
    def value(self, trained_length: int) -> float:
        """The number."""

    def temperature(self, trained_length: int) -> AttentionTemperature:
        return ConstantTemperature(self.value(trained_length))

    def applied(self, recipe: Recipe, trained_length: int) -> Recipe:
        if not self.rotated_only:
            return super().applied(recipe, trained_length)
        if recipe.schedule is None:
            raise ValueError("attention_temperature: rotated_only needs an encoding that rotates")
        # cos and sin scale the query and the key, so each carries the square root.
        tempered = TemperedSchedule(recipe.schedule, math.sqrt(self.value(trained_length)))
        return replace(recipe, schedule=tempered, attention_temperature=None)


class Constant(_ConstantKind):
    kind: Literal["constant"] = "constant"
    multiplier: Multiplier = Field(description="The multiplier (NoPE's uniform scale: 1.2 to 1.8 for longer inputs).")

    def value(self, trained_length: int) -> float:
        return self.multiplier


class YarnTemperature(_ConstantKind):
    kind: Literal["yarn"] = "yarn"
    factor: Factor = Field(description="Extension factor s: the multiplier is (0.1 ln s + 1)^2.")

    def value(self, trained_length: int) -> float:
        return (0.1 * math.log(self.factor) + 1.0) ** 2


class ChunkLlama(_ConstantKind):
    kind: Literal["chunk_llama"] = "chunk_llama"
    factor: Factor = Field(description="Extension factor s: the multiplier is (0.05 ln s + 1)^2.")

    def value(self, trained_length: int) -> float:
        return (0.05 * math.log(self.factor) + 1.0) ** 2


class LongRopeTemperature(_ConstantKind):
    kind: Literal["longrope"] = "longrope"
    factor: Factor = Field(description="Extension factor s: the multiplier is 1 + ln s / ln(length).")
    length: Length | None = Field(
        None, description="Length that s is relative to; that of the encoding it belongs to when absent."
    )

    def value(self, trained_length: int) -> float:
        return 1.0 + math.log(self.factor) / math.log(self.length or trained_length)


class LogN(_Temperature):
    """max(1, ln(p + 1) / ln(length))."""

    kind: Literal["log_n"] = "log_n"
    length: Length | None = Field(
        None, description="Length where it begins; that of the encoding it belongs to when absent."
    )

    def temperature(self, trained_length: int) -> AttentionTemperature:
        return LogLengthTemperature(self.length or trained_length)


class FloorLog(_Temperature):
    """1 + beta ln(1 + floor((p + offset) / length))."""

    kind: Literal["floor_log"] = "floor_log"
    beta: Annotated[float, Field(ge=0.0, le=10.0, strict=True)] = Field(0.1, description="Weight of the logarithm.")
    length: Length | None = Field(
        None, description="Length of a step (Llama 4: 8192); that of its encoding when absent."
    )
    offset: Annotated[int, Field(ge=0, le=1, strict=True)] = Field(0, description="1 in Llama 4, 0 in Ministral 3.")

    def temperature(self, trained_length: int) -> AttentionTemperature:
        return FloorLogTemperature(self.beta, self.length or trained_length, self.offset)


class ReservedLength(_Temperature):
    """max(1, 0.1 ln(n / length) + 1)^2 for the request's reserved length n (Qwen2.5-1M)."""

    kind: Literal["reserved_length"] = "reserved_length"
    length: Length | None = Field(
        None, description="Length where it begins; that of the encoding it belongs to when absent."
    )

    def temperature(self, trained_length: int) -> AttentionTemperature:
        return ReservedLengthTemperature(self.length or trained_length)


def _from_short_form(value: Any) -> Any:
    """A number is a constant, a word is a kind without parameters."""
    if isinstance(value, str):
        return {"kind": value}
    if isinstance(value, int | float) and not isinstance(value, bool):
        return {"kind": "constant", "multiplier": value}
    if not isinstance(value, Mapping | _Temperature):
        raise problem("temperature_type", "a number, the name of a kind, or an object with kind")
    return value


def to_short_form(fields: Mapping[str, Any]) -> Any:
    """``fields`` of a temperature as a number or a word, where the request field takes one for them."""
    if fields.keys() == {"kind"}:
        return fields["kind"]
    return fields["multiplier"] if fields.keys() == {"kind", "multiplier"} else fields


_AnyKind = Constant | YarnTemperature | ChunkLlama | LongRopeTemperature | LogN | FloorLog | ReservedLength
_Kind = Annotated[_AnyKind, Field(discriminator="kind")]
_ShortForm = Multiplier | Literal["log_n", "floor_log", "reserved_length"]

Temperature = Annotated[_Kind, BeforeValidator(_from_short_form, json_schema_input_type=_ShortForm | _Kind)]
"""Request field: a number, the name of a kind, or an object with ``kind`` and its parameters."""

KINDS: tuple[str, ...] = tuple(kind.model_fields["kind"].default for kind in get_args(_AnyKind))
"""Names of the kinds."""
