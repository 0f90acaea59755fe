"""An entry of the table of architectures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import nn

from patches.encoding.recipe import AttentionTemperature
from patches.model.absolute import AbsoluteEmbedding

MaskKind = Literal["booleans", "numbers"]
"""A whole mask [rows, 1, tokens, keys]: true for keys that a query sees, or 0 for those and the least number."""


class Seams(Protocol):
    """The part of a patch that a replaced forward may use."""

    def attention(  # noqa: PLR0913 - as many inputs as attention has
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float,
        dropout: float = 0.0,
        *,
        sliding_window: int | None = None,
    ) -> tuple[torch.Tensor, None]:
        """Seam B: output [rows, tokens, heads, value dim] of states [rows, heads, tokens, dim].

        A query of a layer with a ``sliding_window`` attends to as many keys, its own included.

        Raises:
            ValueError: for a dropout of attention weights in training.
        """
        ...

    def rotary(
        self,
        x: torch.Tensor,
        position_ids: torch.Tensor,
        layer_type: str | None = None,
        *,
        module: nn.Module | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Seam A: cos and sin [rows, tokens, rotary_dim] of the tokens of this forward, in the format of ``module``."""
        ...

    @property
    def packs(self) -> bool:
        """True where rows are packed, so that they have no padding."""
        ...

    def mask_kind(self, *, insists: bool, local: bool) -> MaskKind | None:
        """Numbers of the whole mask of a layer, None without one; a model ``insists`` where no kernel may do
        without. A ``local`` mask is that of a window or a chunk."""
        ...

    def built(self, mask: torch.Tensor, local_size: int | None) -> torch.Tensor:
        """``mask`` as the model gets it. A local one has a window or chunks of ``local_size`` tokens."""
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


class Replaced(NamedTuple):
    """The temperature of a layer, which would count tokens: ``attribute`` of its module is ``value`` meanwhile."""

    attribute: str
    value: bool
    temperature: AttentionTemperature


def no_temperature(module: nn.Module) -> None:
    return None


@dataclass(frozen=True)
class Architecture:
    """``forward(seams, module, ...)`` replaces that of every module of the classes ``attention``, which do not dispatch
    their attention by name. ``table(seams, x, position_ids)`` replaces that of the classes ``rotary``, which have no
    frequencies.

    ``facts`` are fields of the geometry that the configuration lacks under standard names, ``in_weights`` those that
    only the weights have. ``rotates`` is true for checkpoints with rotary embeddings. ``positions(model)`` are the
    absolute positions that it adds to its tokens. ``temperature(module)`` replaces a layer's own temperature.
    ``agrees`` is false for checkpoints that transformers computes differently, which are then not compared with its
    forward.
    """

    attention: tuple[str, ...] = ()
    forward: Callable[..., Any] | None = None
    rotary: tuple[str, ...] = ()
    table: Callable[..., Any] | None = None
    facts: Callable[[Any], dict[str, Any]] = nothing_to_add
    rotates: Callable[[Any], bool] = always
    positions: Callable[[nn.Module], AbsoluteEmbedding | None] | None = None
    in_weights: Callable[[Any], dict[str, Any]] = nothing_to_add
    temperature: Callable[[nn.Module], Replaced | None] = no_temperature
    agrees: Callable[[Any], bool] = always
