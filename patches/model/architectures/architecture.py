"""What an entry of the table says about an architecture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from patches.encoding.recipe import AttentionTemperature
from patches.model.absolute import AbsoluteEmbedding


class Seams(Protocol):
    """What a replaced forward may ask of the patch it runs under."""

    def attention(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float,
    ) -> tuple[torch.Tensor, None]:
        """Seam B: output [rows, tokens, heads, value dim] of states [rows, heads, tokens, dim]."""
        ...

    def rotary(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Seam A: cos and sin [rows, tokens, rotary_dim] of the tokens of this forward."""
        ...


def nothing_to_add(config: Any) -> dict[str, Any]:
    return {}


def always(config: Any) -> bool:
    return True


def never(config: Any) -> bool:
    return False


def split_heads(states: torch.Tensor, head_dim: int) -> torch.Tensor:
    """[rows, tokens, heads x head_dim] -> [rows, heads, tokens, head_dim]."""
    return states.view(*states.shape[:2], -1, head_dim).transpose(1, 2)


def no_temperature(module: nn.Module) -> None:
    return None


@dataclass(frozen=True)
class Architecture:
    """``forward(seams, module, ...)`` replaces that of every module of the classes ``attention``, which do
    not dispatch their attention by name. ``facts`` are fields of the geometry that the configuration does
    not hold under standard names; ``rotates`` whether a checkpoint has rotary embeddings at all.
    ``positions(model)`` is what it adds to its tokens, where it adds absolute positions. ``in_weights(model)``
    are facts that only the weights know. ``temperature(module)`` names the attribute that switches a layer's own
    temperature, which would count tokens instead of positions, and gives the one to use while it is off.
    """

    attention: tuple[str, ...] = ()
    forward: Callable[..., Any] | None = None
    facts: Callable[[Any], dict[str, Any]] = nothing_to_add
    rotates: Callable[[Any], bool] = always
    positions: Callable[[nn.Module], AbsoluteEmbedding | None] | None = None
    in_weights: Callable[[Any], dict[str, Any]] = nothing_to_add
    temperature: Callable[[nn.Module], tuple[str, AttentionTemperature] | None] = no_temperature
