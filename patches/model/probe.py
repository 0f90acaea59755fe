"""How a model rotates, measured on its own forward pass: which layers, where in a head, in which pair layout.

Two tokens run through the model under tables of our choice, and what reaches each layer's attention is
compared. Nothing is looked up by name, so a model nobody here has seen is measured like any other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch

from patches.encoding.rotary import rotary_table, rotate
from patches.model.geometry import RotaryModule, UnsupportedModel

TableFormat = Literal["half", "interleaved", "pairs", "complex"]
"""What a rotary module returns: cos and sin as wide as the rotation, in either layout; one number per
pair (gpt-oss); or one complex number per pair (Llama 4, DeepSeek-V2)."""

FORMATS: tuple[TableFormat, ...] = get_args(TableFormat)

Role = Literal["slots", "own", "never"]
"""What turns a layer's queries: the table of slots, a rotary type of its own, or nothing."""

TOKENS = 3
Queries = Mapping[int, torch.Tensor]
Run = Callable[[torch.Tensor, torch.Tensor], Queries]
"""(frequencies of the slots' table, those of other tables) -> queries [rows, heads, tokens, dim] by layer."""


@dataclass(frozen=True)
class Layout:
    """Role of every layer, and how the layers under slots rotate."""

    roles: dict[int, Role]
    interleaved: bool
    offset: int


class CachedStates(NamedTuple):
    """What a paged cache holds of one token in one layer: keys and values of ``heads`` heads, in numbers per head.

    A layer that attends ``calls`` times in a forward, over values of its own each time (DiffLlama), holds as many.
    """

    heads: int = 0
    key_width: int = 0
    value_width: int = 0
    calls: int = 1

    @property
    def width(self) -> int:
        """Numbers per head and row of a page: keys and values have rows alike."""
        return max(self.key_width, self.value_width)


class Probe:
    """One forward under chosen frequencies that computes no attention and notes each layer's queries, and what reaches
    its cache."""

    def __init__(self, chosen: torch.Tensor, others: torch.Tensor) -> None:
        self.chosen, self.others = chosen, others
        self.queries: dict[int, torch.Tensor] = {}
        self.cached = CachedStates()
        self._calls: Counter[int] = Counter()

    def inv_freq(self, layer_type: str | None, rotary: RotaryModule | None) -> torch.Tensor:
        return self.chosen if rotary is None or layer_type in (None, *rotary.types[:1]) else self.others

    def note(self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        self.queries[module.layer_idx] = query.detach()
        self._calls[module.layer_idx] += 1
        found = CachedStates(key.shape[1], key.shape[-1], value.shape[-1], self._calls[module.layer_idx])
        self.cached = CachedStates(*map(max, self.cached, found))
        return value.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])


def formatted(
    position: torch.Tensor, inv_freq: torch.Tensor, factor: torch.Tensor | float, form: TableFormat
) -> tuple[torch.Tensor, ...] | torch.Tensor:
    """The table of ``rotary_table`` as the model's own rotary module returns it, bit for bit."""
    if form in ("half", "interleaved"):
        return rotary_table(position, inv_freq, factor, interleaved=form == "interleaved")
    angles = position.float() * inv_freq
    if form == "complex":
        return torch.polar(torch.ones_like(angles), angles) * factor
    return angles.cos() * factor, angles.sin() * factor


def format_of(output: object, inv_freq: torch.Tensor, factor: float) -> TableFormat:
    """Format of what the rotary module returned for positions 0, 1, 2.

    Raises:
        UnsupportedModel: when it is none that we know.
    """
    position = torch.arange(TOKENS, device=inv_freq.device)[None, :, None]
    for form in FORMATS:
        expected = formatted(position, inv_freq.float(), factor, form)
        if type(output) is type(expected) and _alike(output, expected):
            return form
    raise UnsupportedModel("its rotary module returns a table in no layout that we know")


def _alike(left: object, right: object) -> bool:
    if isinstance(left, tuple) and isinstance(right, tuple):
        return len(left) == len(right) and all(_alike(*pair) for pair in zip(left, right, strict=True))
    assert isinstance(left, torch.Tensor)
    assert isinstance(right, torch.Tensor)
    return left.shape == right.shape and left.dtype == right.dtype and torch.allclose(left, right, atol=1e-5)


def layout_of(run: Run, pairs: int) -> Layout:
    """Measure roles, offset and pair layout with four forward passes of three tokens.

    Raises:
        UnsupportedModel: when no layer rotates by slots, or one rotates in a way that we do not know.
    """
    still = torch.zeros(pairs)
    unknown = still + float("nan")
    by_slots, by_own = run(unknown, still), run(still, unknown)
    roles: dict[int, Role] = {}
    for layer, query in by_slots.items():
        turned, own = bool(query.isnan().any()), bool(by_own[layer].isnan().any())
        roles[layer] = "slots" if turned else "own" if own else "never"
    first = next((layer for layer, role in roles.items() if role == "slots"), None)
    if first is None:
        raise UnsupportedModel(f"none of its {len(roles)} layers rotates by the rotary module")
    inv_freq = torch.linspace(1.0, 0.3, pairs)  # every pair turns visibly, and no two alike
    return Layout(roles, *_rotation(run(still, still)[first], run(inv_freq, still)[first], inv_freq))


def _rotation(raw: torch.Tensor, turned: torch.Tensor, inv_freq: torch.Tensor) -> tuple[bool, int]:
    """(interleaved, offset) that make ``turned`` out of ``raw`` [rows, heads, tokens, dim]."""
    changed = (raw != turned).flatten(0, 2).any(0).nonzero()
    if not len(changed):
        raise UnsupportedModel("its layers do not turn their queries by the table they are given")
    offset = int(changed[0])
    tolerance = float(raw.abs().max()) * max(1e-4, 8 * torch.finfo(raw.dtype).eps)
    raw, turned = raw.float(), turned.float()
    position = torch.arange(raw.shape[2], device=raw.device)[:, None]
    for interleaved in (False, True):
        table = rotary_table(position, inv_freq.to(raw.device), 1.0, interleaved=interleaved)
        if offset + table[0].shape[-1] > raw.shape[-1]:
            continue
        expected = rotate(raw, *table, interleaved=interleaved, offset=offset)
        if torch.allclose(expected, turned, atol=tolerance, rtol=1e-3):
            return interleaved, offset
    raise UnsupportedModel("its layers rotate neither half-split nor interleaved pairs")
