"""Measurement of a model's rotation on its own forward pass: the layers, the offset in a head, the pair layout.

A few tokens run through the model under tables of our choice. The states that reach each layer's attention are
compared. Nothing is looked up by name, so unknown models are measured too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any, Literal, Protocol

import torch
from torch import nn

from patches.encoding.geometry import RopeGeometry
from patches.encoding.method import Method
from patches.encoding.rotary import rotary_table, rotate
from patches.model.architectures import MaskKind
from patches.model.measuring.geometry import NOTHING_ATTENDS, UnsupportedModel, chunked_layers, number
from patches.model.measuring.trial import TOKENS, CachedStates, Trial
from patches.model.rotary_tables import RotaryTable, RotaryTables, TableFormat

Role = Literal["slots", "own", "never"]
"""Rotation of a layer's queries: by the table of slots, by another rotary type (``own``), or never."""

MOST_TOKENS = 512
"""Tokens of a trial at most, where a rotary module is only called once per so many of them (DeepSeek-V4: 128)."""

MOST_COMPARED = 144
"""Tokens of the check at the start at most. The window of gpt-oss has 128, and thousands would cost seconds."""

CHANGES_LATER = "its layers change them after they rotate them"
KEYS_ARE_ZERO = (
    "all keys of its layer {layer} are zero, so that no measurement shows their rotation. Untrained "
    "weights may be the reason: Zaya multiplies its keys by parameters that begin at zero"
)
CHOOSES_KEYS = "its layers choose among keys by states that no other encoding reaches"
COMPRESSES_KEYS = "its layers attend to keys that cover several tokens, and rotate values too"

FOLLOWS_EACH_CALL = (
    "its frequencies follow the length, and keys that cover several tokens have another last position than queries. So "
    "transformers rotates both by different frequencies"
)


@dataclass(frozen=True)
class Measurement:
    """Rotation of one model.

    ``geometry`` has the measured pair layout and offset. ``roles`` has the layers that attend. ``rotary_tables`` says
    which tables requests choose, and ``table`` is their format. ``windowed`` has the tokens of each layer's window. A
    model that ``chooses_keys`` does so in some layer, or adds numbers to scores there. It may need a whole ``mask``.
    ``shared`` has the layers that attend to the keys and values of an earlier one, and that layer.
    ``compressed`` are the layers that also attend to keys of several tokens. ``elsewhere`` are the rotary modules that
    rotate such keys, by the positions of each call. The measurement took ``tokens``.
    """

    geometry: RopeGeometry
    roles: Mapping[int, Role]
    cached: CachedStates
    rotary_tables: RotaryTables
    table: TableFormat
    windowed: Mapping[int, int]
    mask: MaskKind | None
    chooses_keys: bool
    shared: Mapping[int, int] = field(default_factory=dict)
    compressed: frozenset[int] = frozenset()
    elsewhere: frozenset[nn.Module] = frozenset()
    tokens: int = TOKENS


class Run(Protocol):
    def __call__(
        self,
        frequencies: Mapping[RotaryTable | None, torch.Tensor],
        tokens: int = TOKENS,
        mask: MaskKind | None = None,
    ) -> Trial:
        """Frequencies by table -> the trial, after its forward."""
        ...


Geometry = Callable[[RotaryTable | None], RopeGeometry]
"""The table that requests choose -> the geometry that goes with it, before any measurement."""


def measured(
    run: Run, tables: RotaryTables, formats: Mapping[RotaryTable | None, TableFormat], geometry: Geometry
) -> Measurement:
    """Measure the chosen table, roles, offset and pair layout, with a forward per table and one under still ones.

    ``geometry`` makes the geometry of a model for the table that requests choose.

    Raises:
        UnsupportedModel: when no layer attends, or when no layer rotates by its tables. Also when the tables of layers
            differ so much that requests could choose none. Also when a layer needs more than ``MOST_TOKENS`` to rotate.
    """
    still: dict[RotaryTable | None, torch.Tensor] = {table: torch.zeros_like(table.inv_freq) for table in tables}
    if not still and (pairs := geometry(None).rotary_dim // 2):
        still[None] = torch.zeros(pairs)  # attention of an entry asks for its table itself
    raw = _long_enough(run, still)
    run = partial(run, tokens=raw.tokens, mask="numbers" if raw.compressed else None)
    if raw.compressed:
        raw = run(still)
    if not raw.states:
        raise UnsupportedModel(NOTHING_ATTENDS)
    if raw.has_local_masks and not raw.compressed:  # some layers know their window by the mask alone (Phi-MoE)
        raw.windowed = run(still, mask="booleans").windowed | raw.windowed
    if not still:
        roles: dict[int, Role] = dict.fromkeys(raw.states, "slots")
        return Measurement(geometry(None), roles, raw.cached, tables, TableFormat(), *raw.masks, raw.shared)
    trials = {table: run({**still, table: _turning(frequencies)}) for table, frequencies in still.items()}
    moved = {table: trial.moved(raw) for table, trial in trials.items()}
    chosen = _chosen(moved, raw.windowed.keys() - raw.compressed, len(raw.states))
    roles = {layer: _role(layer, moved, chosen) for layer in raw.states}
    first = chosen[0]
    found = _found(geometry(first), raw, trials[first], min(moved[first]), _turning(still[first]))
    by_requests = tables.choosing([table for table in chosen if table is not None])
    beyond = frozenset(raw.compressed), raw.elsewhere, raw.tokens
    return Measurement(found, roles, raw.cached, by_requests, formats[first], *raw.masks, raw.shared, *beyond)


def compared_tokens(config: Any, measurement: Measurement) -> int:
    """Tokens of the check at the start. It goes past small windows and chunks, and past a small choice of keys."""
    sizes = [*measurement.windowed.values(), *chunked_layers(config).values(), number(config, "index_topk") or 0]
    return max([measurement.tokens, *(size + TOKENS for size in sizes if size + TOKENS <= MOST_COMPARED)])


def _long_enough(run: Run, still: Mapping[RotaryTable | None, torch.Tensor]) -> Trial:
    """A trial of so many tokens that it calls every rotary module. Without such a number, it has as few as possible."""
    first = longer = run(still)
    while longer.has_uncalled and 2 * longer.tokens <= MOST_TOKENS:
        longer = run(still, 2 * longer.tokens)
    if not longer.has_uncalled:
        return longer
    if longer.compressed:
        raise UnsupportedModel(f"its layers rotate states that cover more than {MOST_TOKENS} tokens")
    return first


def _turning(still: torch.Tensor) -> torch.Tensor:
    """Frequencies under which every pair turns visibly, and no two alike."""
    return torch.linspace(1.0, 0.3, len(still), device=still.device)


Moved = Mapping[RotaryTable | None, set[int]]
"""Table -> the layers that rotate by it."""


def _chosen(moved: Moved, windowed: Set[int], layers: int) -> list[RotaryTable | None]:
    """The tables of the layers without a window. If those rotate nothing, the tables of the layers with one.

    Several have the same numbers. A table of layers with a window is not chosen beside others, even with their numbers.
    A checkpoint that declares a scaling declares it for the layers without.
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
    if raw.compressed:
        if isinstance(geometry.native, Method) and geometry.native.depends_on_length(geometry):
            raise UnsupportedModel(FOLLOWS_EACH_CALL)
        return replace(geometry, keeps_positions=COMPRESSES_KEYS, compresses_keys=True)
    if not key.any():
        raise UnsupportedModel(KEYS_ARE_ZERO.format(layer=layer))
    rotation = _rotation(query, turned_query, inv_freq)
    geometry = replace(geometry, chooses_by_rotation=bool(raw.indexed))
    if rotation is None or rotation != _rotation(key, turned_key, inv_freq) or not torch.equal(value, turned_value):
        return replace(geometry, keeps_positions=CHANGES_LATER)
    if raw.biased:
        geometry = replace(geometry, keeps_positions=CHOOSES_KEYS)
    interleaved, reversed_, offset = rotation
    return replace(geometry, interleaved=interleaved, reverses=reversed_, rotary_offset=offset)


def _rotation(raw: torch.Tensor, turned: torch.Tensor, inv_freq: torch.Tensor) -> tuple[bool, bool, int] | None:
    """(interleaved, opposite sense, offset) that make ``turned`` out of ``raw`` [rows, heads, tokens, dim], if any."""
    changed = (raw != turned).flatten(0, 2).any(0).nonzero()
    if not len(changed):
        return None
    offset = int(changed[0])
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
