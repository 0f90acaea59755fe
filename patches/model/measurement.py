"""Measurement of a model's rotation on its own forward pass: the layers, the offset in a head, the pair layout.

A few tokens run through the model under tables of our choice, and the states that reach each layer's attention are
compared. Nothing is looked up by name, so unknown models are measured too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from patches.attention.layer import bias_of, index_of
from patches.encoding.geometry import RopeGeometry
from patches.encoding.rotary import rotary_table, rotate
from patches.model.geometry import NOTHING_ATTENDS, UnsupportedModel
from patches.model.rotary_tables import RotaryTable, RotaryTables, TableFormat, planes_of

Role = Literal["slots", "own", "never"]
"""Rotation of a layer's queries: by the table of slots, by another rotary type (``own``), or never."""

TOKENS = 16

UNUSED = frozenset({"position_ids", "s_aux"})
"""Tensors that attention gets and needs no more, or that it has an argument for."""

CHANGES_LATER = "its layers change them after they rotate them"
CHOOSES_KEYS = "its layers choose among keys by states that no other encoding reaches"


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

    ``geometry`` has the measured pair layout and offset. ``roles`` has the layers that attend. ``rotary_tables`` says
    which tables requests choose, and ``table`` is their format. ``windowed`` has the tokens of each layer's window. A
    model that ``insists_on_masks`` to choose keys gets whole ones. One that ``chooses_keys`` does so in some layer, or
    adds numbers to scores there.
    """

    geometry: RopeGeometry
    roles: Mapping[int, Role]
    cached: CachedStates
    rotary_tables: RotaryTables
    table: TableFormat
    windowed: Mapping[int, int]
    insists_on_masks: bool
    chooses_keys: bool


class Trial:
    """One forward of ``TOKENS`` tokens under chosen frequencies. It computes no attention.

    It records each layer's states [rows, heads, tokens, dim]: queries, keys and values. ``windowed`` are the layers
    with a sliding window, ``biased`` those that choose keys or add numbers to scores.
    """

    def __init__(
        self,
        frequencies: Mapping[RotaryTable | None, torch.Tensor],
        tables: RotaryTables,
        formats: Mapping[RotaryTable | None, TableFormat],
    ) -> None:
        """``frequencies`` by table; None is the table of a model without rotary modules."""
        self.states: dict[int, tuple[torch.Tensor, ...]] = {}
        self.windowed: dict[int, int] = {}
        self.biased: set[int] = set()
        self.cached = CachedStates()
        self._insists_on_masks = False
        self._built: list[torch.Tensor] = []
        self._frequencies, self._tables, self._formats = frequencies, tables, formats
        self._calls: Counter[int] = Counter()

    def rotary(
        self,
        x: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        layer_type: str | None = None,
        *,
        module: nn.Module | None = None,
    ) -> Any:
        """Seam A: the frequencies of this trial.

        Raises:
            UnsupportedModel: when it is asked for other positions than those of the tokens.
        """
        if position_ids is not None and position_ids.shape[-1] != TOKENS:
            raise UnsupportedModel("its layers rotate states that are not one per token")
        table = self._tables.table(module, layer_type)
        position = torch.arange(TOKENS, device=x.device)[None]
        inv_freq = self._frequencies[table].to(x.device)
        return self._formats[table].table(position, inv_freq, 1.0, x.dtype, planes_of(position_ids))

    def attention(  # noqa: PLR0913 - as many inputs as attention has
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *_: Any,
        sliding_window: int | None = None,
        indices: torch.Tensor | None = None,
        block_indices: torch.Tensor | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """Seam B: zeros [rows, tokens, heads, value dim].

        Raises:
            UnsupportedModel: for an argument that the attention of the patch does not have.
        """
        unknown = [name for name, value in others.items() if isinstance(value, torch.Tensor) and name not in UNUSED]
        if unknown:
            raise UnsupportedModel(f"its layers hand {', '.join(unknown)} to their attention, which ours does not have")
        if key.shape[2] != query.shape[2]:
            raise UnsupportedModel("its layers attend to more keys than tokens")
        layer = index_of(module)
        adds = bias_of(attention_mask, indices, query, key.shape[2]) is not None
        if block_indices is not None or (adds and not self._is_plain(attention_mask, indices, sliding_window)):
            self.biased.add(layer)
        self.states[layer] = query.detach(), key.detach(), value.detach()
        if sliding_window is not None:
            self.windowed[layer] = int(sliding_window)
        self._calls[layer] += 1
        found = CachedStates(key.shape[1], key.shape[-1], value.shape[-1], self._calls[layer])
        self.cached = CachedStates(*map(max, self.cached, found))
        return value.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None

    def builds_mask(self, *, insists: bool) -> bool:
        """True for a model that asks for a whole mask: it may choose keys by it."""
        self._insists_on_masks |= insists
        return insists

    def built(self, mask: torch.Tensor) -> torch.Tensor:
        """``mask``, whose way to the layers is followed."""
        self._built.append(mask)
        return mask

    def _is_plain(self, mask: torch.Tensor | None, indices: torch.Tensor | None, window: int | None) -> bool:
        """True for a causal mask that reached the attention as it was built: the layer chooses no keys by it.

        A type that also takes images asks for one without them (Gemma 4 unified).
        """
        if indices is not None or mask is None or all(mask is not built for built in self._built):
            return False
        distance = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
        causal = (distance >= 0) & (distance < (TOKENS if window is None else window))
        return mask.shape[-2:] == causal.shape and bool((mask.cpu() == causal).all())

    @property
    def masks(self) -> tuple[dict[int, int], bool, bool]:
        """(window of layers that have one, insists on masks to choose keys by them, chooses keys)."""
        return self.windowed, self._insists_on_masks and bool(self.biased), bool(self.biased)

    def moved(self, still: Trial) -> set[int]:
        """Layers with other queries than in ``still``."""
        return {layer for layer, (query, *_) in self.states.items() if not torch.equal(query, still.states[layer][0])}


Run = Callable[[Mapping[RotaryTable | None, torch.Tensor]], Trial]
"""Frequencies by table -> the trial, after its forward."""

Geometry = Callable[[RotaryTable | None], RopeGeometry]
"""The table that requests choose -> the geometry that goes with it, before any measurement."""


def measured(
    run: Run, tables: RotaryTables, formats: Mapping[RotaryTable | None, TableFormat], geometry: Geometry
) -> Measurement:
    """Measure the chosen table, roles, offset and pair layout, with a forward per table and one under still ones.

    ``geometry`` makes the geometry of a model for the table that requests choose.

    Raises:
        UnsupportedModel: when no layer attends, when no layer rotates by its tables, or when layers rotate by so
            different ones that requests could choose none.
    """
    still: dict[RotaryTable | None, torch.Tensor] = {table: torch.zeros_like(table.inv_freq) for table in tables}
    if not still and (pairs := geometry(None).rotary_dim // 2):
        still[None] = torch.zeros(pairs)  # attention of an entry asks for its table itself
    raw = run(still)
    if not raw.states:
        raise UnsupportedModel(NOTHING_ATTENDS)
    if not still:
        roles: dict[int, Role] = dict.fromkeys(raw.states, "slots")
        return Measurement(geometry(None), roles, raw.cached, tables, TableFormat(), *raw.masks)
    trials = {table: run({**still, table: _turning(frequencies)}) for table, frequencies in still.items()}
    moved = {table: trial.moved(raw) for table, trial in trials.items()}
    chosen = _chosen(moved, frozenset(raw.windowed), len(raw.states))
    roles = {layer: _role(layer, moved, chosen) for layer in raw.states}
    first = chosen[0]
    found = _found(geometry(first), raw, trials[first], min(moved[first]), _turning(still[first]))
    by_requests = RotaryTables(tables, [table for table in chosen if table is not None])
    return Measurement(found, roles, raw.cached, by_requests, formats[first], *raw.masks)


def _turning(still: torch.Tensor) -> torch.Tensor:
    """Frequencies under which every pair turns visibly, and no two alike."""
    return torch.linspace(1.0, 0.3, len(still), device=still.device)


Moved = Mapping[RotaryTable | None, set[int]]
"""Table -> the layers that rotate by it."""


def _chosen(moved: Moved, windowed: frozenset[int], layers: int) -> list[RotaryTable | None]:
    """The tables of the layers without a window. If those rotate nothing, the tables of the layers with one.

    Several have the same numbers. A table of layers with a window is not chosen beside others, even with their numbers:
    a checkpoint that declares a scaling declares it for the layers without.
    """
    for without in (windowed, frozenset[int]()):
        found = [table for table, reached in moved.items() if reached - without]
        first = found[0] if found else None
        others = [table for table in found[1:] if table is not None and first is not None and not table.is_like(first)]
        if others:
            raise UnsupportedModel(
                f"its layers rotate by {len(others) + 1} different tables, and requests choose only one"
            )
        if found:
            return found
    raise UnsupportedModel(f"none of its {layers} layers rotates by the rotary module")


def _role(layer: int, moved: Moved, chosen: Sequence[RotaryTable | None]) -> Role:
    if any(layer in moved[table] for table in chosen):
        return "slots"
    return "own" if any(layer in layers for layers in moved.values()) else "never"


def _found(geometry: RopeGeometry, raw: Trial, turned: Trial, layer: int, inv_freq: torch.Tensor) -> RopeGeometry:
    """``geometry`` with the heads and the rotation of ``layer``."""
    (query, key, value), (turned_query, turned_key, turned_value) = raw.states[layer], turned.states[layer]
    geometry = replace(geometry, head_dim=query.shape[-1], num_attention_heads=query.shape[1])
    rotation = _rotation(query, turned_query, inv_freq)
    if rotation is None or rotation != _rotation(key, turned_key, inv_freq) or not torch.equal(value, turned_value):
        return replace(geometry, keeps_positions=CHANGES_LATER)
    if raw.biased:
        geometry = replace(geometry, keeps_positions=CHOOSES_KEYS)
    interleaved, reversed_, offset = rotation
    return replace(geometry, interleaved=interleaved, reverses=reversed_, rotary_offset=offset)


def _rotation(raw: torch.Tensor, turned: torch.Tensor, inv_freq: torch.Tensor) -> tuple[bool, bool, int] | None:
    """(interleaved, opposite sense, offset) that make ``turned`` out of ``raw`` [rows, heads, tokens, dim], if any."""
    offset = int((raw != turned).flatten(0, 2).any(0).nonzero()[0])
    tolerance = float(raw.abs().max()) * max(1e-4, 8 * torch.finfo(raw.dtype).eps)
    raw, turned = raw.float(), turned.float()
    position = torch.arange(raw.shape[2], device=raw.device)[:, None]
    for interleaved, reversed_ in product((False, True), (False, True)):
        angles = -position if reversed_ else position
        table = rotary_table(angles, inv_freq.to(raw.device), 1.0, interleaved=interleaved)
        if offset + table[0].shape[-1] > raw.shape[-1]:
            continue
        expected = rotate(raw, *table, interleaved=interleaved, offset=offset)
        if torch.allclose(expected, turned, atol=tolerance, rtol=1e-3):
            return interleaved, reversed_, offset
    return None
