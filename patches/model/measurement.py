"""Measurement of a model's rotation on its own forward pass: the layers, the offset in a head, the pair layout.

Three tokens run through the model under tables of our choice, and the queries that reach each layer's attention are
compared. Nothing is looked up by name, so unknown models are measured too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

import torch

from patches.encoding.geometry import RopeGeometry
from patches.encoding.rotary import rotary_table, rotate
from patches.model.geometry import RotaryModule, UnsupportedModel

TableLayout = Literal["half", "interleaved", "pairs", "complex"]
"""Tables of rotary modules: cos and sin as wide as the rotation, in either layout; one number per pair (gpt-oss); or
one complex number per pair (Llama 4, DeepSeek-V2)."""

Role = Literal["slots", "own", "never"]
"""Rotation of a layer's queries: by the table of slots, by another rotary type (``own``), or never."""

TOKENS = 3


@dataclass(frozen=True)
class TableFormat:
    """``float32``: tables keep that dtype for half-precision inputs."""

    layout: TableLayout = "half"
    float32: bool = False

    def table(
        self, position: torch.Tensor, inv_freq: torch.Tensor, factor: torch.Tensor | float, dtype: torch.dtype
    ) -> tuple[torch.Tensor, ...] | torch.Tensor:
        """The rotary table of ``position`` [...], as the model's own module returns it for inputs of ``dtype``."""
        table = formatted(position[..., None], inv_freq, factor, self.layout)
        if isinstance(table, torch.Tensor) or self.float32:
            return table
        return tuple(part.to(dtype) for part in table)


class CachedStates(NamedTuple):
    """States of one token in one layer of a paged cache: keys and values of ``heads`` heads, in numbers per head.

    A layer that attends ``calls`` times in a forward, over other values each time (DiffLlama), has as many.
    """

    heads: int = 0
    key_width: int = 0
    value_width: int = 0
    calls: int = 1

    @property
    def width(self) -> int:
        """Numbers per head and row of a page: keys and values have rows alike."""
        return max(self.key_width, self.value_width)


@dataclass(frozen=True)
class Measurement:
    """Rotation of one model.

    ``geometry`` has the measured pair layout and offset. ``roles`` is by layer, and empty for a model that rotates
    nothing. ``table`` is the format of its rotary module.
    """

    geometry: RopeGeometry
    roles: Mapping[int, Role]
    cached: CachedStates
    table: TableFormat


class Trial:
    """One forward of ``TOKENS`` tokens under chosen frequencies. It computes no attention, and records each layer's
    queries [rows, heads, tokens, dim] and what reaches its cache."""

    def __init__(
        self, chosen: torch.Tensor, others: torch.Tensor, rotary_module: RotaryModule | None, table: TableFormat
    ) -> None:
        self.queries: dict[int, torch.Tensor] = {}
        self.cached = CachedStates()
        self._chosen, self._others, self._rotary_module, self._table = chosen, others, rotary_module, table
        self._calls: Counter[int] = Counter()

    def rotary(self, x: torch.Tensor, position_ids: torch.Tensor | None = None, layer_type: str | None = None) -> Any:
        """Seam A: the chosen frequencies, or the other ones for layer types that requests do not choose."""
        chosen = self._rotary_module is None or self._rotary_module.is_chosen(layer_type)
        inv_freq = (self._chosen if chosen else self._others).to(x.device)
        return self._table.table(torch.arange(TOKENS, device=x.device)[None], inv_freq, 1.0, x.dtype)

    def attention(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, None]:
        """Seam B: zeros [rows, tokens, heads, value dim]."""
        self.queries[module.layer_idx] = query.detach()
        self._calls[module.layer_idx] += 1
        found = CachedStates(key.shape[1], key.shape[-1], value.shape[-1], self._calls[module.layer_idx])
        self.cached = CachedStates(*map(max, self.cached, found))
        return value.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None


Run = Callable[[torch.Tensor, torch.Tensor], Trial]
"""(frequencies of the slots' table, those of other tables) -> the trial, after its forward."""


def formatted(
    position: torch.Tensor, inv_freq: torch.Tensor, factor: torch.Tensor | float, layout: TableLayout
) -> tuple[torch.Tensor, ...] | torch.Tensor:
    """The table of ``rotary_table`` as the model's own rotary module returns it, bit for bit."""
    if layout in ("half", "interleaved"):
        return rotary_table(position, inv_freq, factor, interleaved=layout == "interleaved")
    angles = position.float() * inv_freq
    if layout == "complex":
        return torch.polar(torch.ones_like(angles), angles) * factor
    return angles.cos() * factor, angles.sin() * factor


def layout_of(output: object, inv_freq: torch.Tensor, factor: float) -> TableLayout:
    """Layout of the table that the rotary module returned for positions 0, 1, 2.

    Raises:
        UnsupportedModel: when it is unknown.
    """
    position = torch.arange(TOKENS, device=inv_freq.device)[None, :, None]
    for layout in get_args(TableLayout):
        expected = formatted(position, inv_freq.float(), factor, layout)
        if type(output) is type(expected) and _alike(output, expected):
            return layout  # type: ignore[no-any-return]
    raise UnsupportedModel("its rotary module returns a table in no layout that we know")


def _alike(left: object, right: object) -> bool:
    if isinstance(left, tuple) and isinstance(right, tuple):
        return len(left) == len(right) and all(_alike(*pair) for pair in zip(left, right, strict=True))
    assert isinstance(left, torch.Tensor)
    assert isinstance(right, torch.Tensor)
    return left.shape == right.shape and left.dtype == right.dtype and torch.allclose(left, right, atol=1e-5)


def measured(run: Run, geometry: RopeGeometry, table: TableFormat) -> Measurement:
    """Measure roles, offset and pair layout with four forwards, or with one where nothing rotates.

    Raises:
        UnsupportedModel: when no layer rotates by slots, or one rotates in an unknown way.
    """
    pairs = geometry.rotary_dim // 2
    still = torch.zeros(pairs)
    if not pairs:
        return Measurement(geometry, {}, run(still, still).cached, table)
    unknown = still + float("nan")
    by_slots, by_own = run(unknown, still).queries, run(still, unknown).queries
    roles: dict[int, Role] = {}
    for layer, query in by_slots.items():
        turned, own = bool(query.isnan().any()), bool(by_own[layer].isnan().any())
        roles[layer] = "slots" if turned else "own" if own else "never"
    first = next((layer for layer, role in roles.items() if role == "slots"), None)
    if first is None:
        raise UnsupportedModel(f"none of its {len(roles)} layers rotates by the rotary module")
    inv_freq = torch.linspace(1.0, 0.3, pairs)  # every pair turns visibly, and no two alike
    raw, trial = run(still, still), run(inv_freq, still)
    interleaved, offset = _rotation(raw.queries[first], trial.queries[first], inv_freq)
    geometry = replace(geometry, interleaved=interleaved, rotary_offset=offset)
    return Measurement(geometry, roles, trial.cached, table)


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
