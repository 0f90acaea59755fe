"""Attention of a packed row: its sequences one after another, each through its cache, under the recipe of its slot.

While a few sequences decode, the Python between two products of the model takes as long as the mathematics. So a step
decides once, for all layers alike, how each sequence reads its keys.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from patches.attention.decode.plan import STEPS, Decoding, Plan
from patches.attention.decode.reading import ORDINARY, Reading, reading_at, reading_of
from patches.attention.decode.shared import NONE, Course, shared_calls, turns_once
from patches.attention.decode.single_query import read
from patches.attention.decode.sums.rings import Rings
from patches.attention.layer import Layer
from patches.attention.log_sum_exp import widened
from patches.attention.observation import Observer
from patches.attention.paged.batch import PagedBatch, Role
from patches.attention.positions import SegmentPositions
from patches.batch.segments import Batch, packed_lengths, part_of
from patches.model.attention.segment_attention import SegmentAttention, num_sinks_of
from patches.model.forward import Forwards
from patches.model.measuring.measurement import Measurement


@dataclass
class Row:
    """States of one layer: ``query`` [1, heads, tokens, dim] of the ``new`` tokens of sequences with ``num_kv`` keys.

    ``cached`` are keys and values of all sequences [1, kv_heads, keys, dim]. In a ``batch`` with places, they are those
    of the whole cache [kv_heads, places, dim]. No sequence has those in ``spare``. By kind of layer, ``decoding`` has
    its rings and plans.
    """

    query: torch.Tensor
    cached: tuple[torch.Tensor, torch.Tensor]
    new: list[int]
    num_kv: list[int]
    batch: Batch
    spare: range = range(0)
    decoding: dict[Hashable, Decoding] = field(default_factory=dict)

    def sequences(self, members: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Query, keys and values of some sequences, each [1, heads, tokens, dim]."""
        if not members:
            return []
        queries, (keys, values) = _divided(self.query, self.new), self._divided_cached
        return [(queries[number], keys(number), values(number)) for number in members]

    @property
    def places(self) -> list[list[range]]:
        """The runs of each sequence's keys in the whole cache, and of those that it will have in place."""
        assert self.batch.places is not None
        return self.batch.places

    @property
    def room(self) -> int:
        """Keys that each sequence may get in place."""
        return min(sum(map(len, runs)) - length for runs, length in zip(self.places, self.num_kv, strict=True))

    @cached_property
    def _divided_cached(self) -> list[Callable[[int], torch.Tensor]]:
        """Keys and values by sequence: copied once, although a step's first layer asks twice."""
        return [self._divided(states) for states in self.cached]

    def _divided(self, states: torch.Tensor) -> Callable[[int], torch.Tensor]:
        if self.batch.places is None:
            return _divided(states, self.num_kv).__getitem__
        whole, places, num_kv = states[None], self.places, self.num_kv  # the row itself would be in a circle

        def of(number: int) -> torch.Tensor:
            runs, length = places[number], num_kv[number]
            if len(runs) == 1:
                return whole.narrow(2, runs[0].start, length)
            return torch.cat([whole[:, :, run.start : run.stop] for run in part_of(runs, range(length))], 2)

        return of


class PackedAttention:
    """The attention of every layer of one model, in batches of one packed row."""

    def __init__(self, layers: int, measurement: Measurement, segments: SegmentAttention, forwards: Forwards) -> None:
        self._layers, self._segments, self._forwards = layers, segments, forwards
        self._width, self._calls = measurement.cached.width, measurement.cached.calls
        self.rows = segments.rows

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: Layer,
        index: int,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Output [1, tokens, heads, value dim] of the new states [1, heads, tokens, dim], with those in the cache.

        ``sinks`` are those of the ``layer``, which stays the same from step to step.
        """
        forward = self._forwards.current
        batch, paged = forward.packed, dict(forward.paged)  # the cache writes what belongs to this layer into it
        assert batch is not None, "the forward is of a padded batch"
        if sinks is not None:
            layer = replace(layer, sinks=sinks)
        if isinstance(batch, PagedBatch):
            return self._attend_pages(query, key, value, batch, paged, layer, index)
        row = self._row(query, key, value, batch, paged, index)
        if forward.observer is None and layer.is_ordinary:
            role, shapes = self._segments.role(index), (states.shape for states in row.cached)
            kind = role, layer.mask, query.shape[1], *shapes
            lengths = paged["cu_seq_lens_k"].data_ptr()
            plan = batch.shared((kind, lengths), lambda: self._plan(row, layer, role, kind))
        else:
            plan = Plan(NONE, [(number, None) for number in range(len(batch.segments))], None)
        attended = plan.shared.attend(query, row.cached, layer.scaling)
        if plan.alone:
            attended.append(self._alone(plan.alone, row, layer, index, forward.observer))
        joined = attended[0] if len(attended) == 1 else torch.cat(attended, 1)
        return (joined if plan.order is None else joined.index_select(1, plan.order)).contiguous()

    def _alone(
        self,
        alone: Sequence[tuple[int, Reading | None]],
        row: Row,
        layer: Layer,
        index: int,
        observer: Observer | None,
    ) -> torch.Tensor:
        """Output [1, tokens, heads, value dim] of sequences with a call each or more."""
        attended = []
        for (number, reading), own in zip(alone, row.sequences([number for number, _ in alone]), strict=True):
            if reading is not None:
                attended.append(read(*own, layer.scaling, reading))
                continue
            segment = row.batch.segments[number]
            recipe = self._segments.recipe(self._segments.role(index), segment.slot)
            num_sinks = num_sinks_of(recipe, layer, own[1].shape[2], segment.q_stop) or 0
            attended.append(self._segments.attend(own, segment, row.batch, layer, index, observer, num_sinks))
        return (attended[0] if len(attended) == 1 else torch.cat(attended, 2)).transpose(1, 2)

    def _plan(self, row: Row, layer: Layer, role: Role, kind: Hashable) -> Plan:
        """The calls that read the sequences, the same in layers of one ``kind``: one role and window."""
        batch = row.batch
        if batch.places is None or not batch.names or not row.spare:
            row.decoding.pop(kind, None)  # these calls turn keys in the places of rings
            return self._planned(row, layer, role, None)
        decoding = row.decoding.get(kind)
        plan = None if decoding is None else decoding.goes_on(batch, row.room)
        if plan is None:
            decoding = row.decoding[kind] = self._decoding(row, decoding)
            plan = self._planned(row, layer, role, decoding.rings)
            decoding.keep(plan, batch)
        return plan

    @staticmethod
    def _decoding(row: Row, before: Decoding | None) -> Decoding:
        """Rings for a new plan by sums, those from ``before`` if it has them. Other calls turn keys in their places."""
        if not turns_once(row.query, row.cached, row.num_kv):
            return Decoding(None)
        if before is None or before.rings is None:
            return Decoding(Rings(row.spare))
        before.rings.keep(row.batch.names)
        return before

    def _planned(self, row: Row, layer: Layer, role: Role, rings: Rings | None) -> Plan:
        each = self._readings(row, layer, role, rings is not None)
        readings, shared = [None if own is None else own[0] for own in each], NONE
        steps = min(0 if own is None else len(own) for own in each)
        if row.batch.places is not None:
            course = None
            if rings is not None:
                course = Course(row.batch.names, rings, [[] if own is None else own[1:steps] for own in each])
            own = row.query, row.cached, row.spare, course
            shared = shared_calls(readings, row.places, row.num_kv, *own)
        rest = sorted(set(range(len(readings))).difference(shared.members))
        order = [*shared.members, *rest]
        is_in_order = order == list(range(len(order)))
        alone = [(number, readings[number]) for number in rest]
        ahead = shared.ahead
        if steps > 1 and not shared.members and all(reading is ORDINARY for reading in readings):
            last = turns_once(row.query, row.cached, [length + steps - 1 for length in row.num_kv])
            ahead = steps - 1 if last == (rings is not None) else 0
        return Plan(shared, alone, None if is_in_order else torch.tensor(order).argsort(), ahead)

    def _readings(self, row: Row, layer: Layer, role: Role, has_rings: bool) -> list[list[Reading] | None]:
        """The reading of each segment with a single query, None for others.

        With rings, keys turn once, and readings come with those of the steps behind it that are alike. So do ordinary
        readings of keys in place.
        """
        readings: list[list[Reading] | None] = []
        dtype, device = row.query.dtype, row.query.device
        steps = 1 if row.batch.places is None else 1 + min(row.room, STEPS - 1)
        for segment, new, length in zip(row.batch.segments, row.new, row.num_kv, strict=True):
            recipe = self._segments.recipe(role, segment.slot)
            if new > 1 or recipe.recipe.relative is not None:
                readings.append(None)
                continue
            if recipe.is_plain and not recipe.recipe.attention_temperature:
                ends = range(segment.q_start + steps, segment.q_start, -1)
                stop = next(filter(layer.mask.is_causal_below, ends), segment.q_start)
                if stop > segment.q_start:
                    readings.append([ORDINARY] * (stop - segment.q_start))
                    continue
            num_sinks = num_sinks_of(recipe, layer, length, segment.q_stop) or 0
            if not has_rings:
                query = range(segment.q_start, segment.q_stop)
                readings.append([reading_of(SegmentPositions(recipe, layer, query, length, num_sinks, dtype, device))])
                continue
            own: list[Reading] = []
            for step in range(steps):
                place = segment.q_start + step, length + step
                reading = reading_at(recipe, layer.mask, *place, num_sinks, dtype)
                if own and not reading.follows(own[-1], length + step):
                    break
                own.append(reading)
            readings.append(own)
        return readings

    def _attend_pages(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch: PagedBatch,
        paged: dict[str, Any],
        layer: Layer,
        index: int,
    ) -> torch.Tensor:
        """As ``attend``, from the pages themselves once they have the new keys and values."""
        new_key, new_value = self._through_cache(key, value, batch, paged, index)
        pages = _narrowed(paged["k_cache"], key.shape[-1]), _narrowed(paged["v_cache"], value.shape[-1])
        batch.write(new_key[0].transpose(0, 1), new_value[0].transpose(0, 1), *pages)
        return batch.attend(query[0].transpose(0, 1), *pages, layer, self._segments.role(index), self.rows)[None]

    def _row(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch: Batch,
        paged: dict[str, Any],
        index: int,
    ) -> Row:
        """The states of every sequence, with those in its cache, if it has one."""
        if batch.places is None:
            if "cache" in paged:
                key, value = self._through_cache(key, value, batch, paged, index)
            return Row(query, (key, value), *_lengths(batch, paged), batch)
        cached = paged["cache"].write(*self._cached_states(key, value, batch, index), paged)
        pages = _narrowed(cached[0], key.shape[-1]), _narrowed(cached[1], value.shape[-1])
        cache = paged["cache"]
        return Row(query, pages, *_lengths(batch, paged), batch, cache.spare_places, cache.decoding)

    def _through_cache(
        self, key: torch.Tensor, value: torch.Tensor, batch: Batch, paged: dict[str, Any], index: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of whole sequences, in their two widths: the paged cache has rows of one width.

        With block tables, the cache only puts its pages into ``paged``, and the new states come back.
        """
        keys, values = paged["cache"].update(*self._cached_states(key, value, batch, index), paged)
        return _narrowed(keys, key.shape[-1]), _narrowed(values, value.shape[-1])

    def _cached_states(
        self, key: torch.Tensor, value: torch.Tensor, batch: Batch, index: int
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """The new states in the width of the cache, and their layer. A layer that attends again is another layer."""
        layer = index + (self._layers * batch.calls_before(index) if self._calls > 1 else 0)
        return widened(key, self._width), widened(value, self._width), layer


def _narrowed(states: torch.Tensor, width: int) -> torch.Tensor:
    """``states`` [..., dim] without what ``widened`` added."""
    return states if states.shape[-1] == width else states[..., :width]


def _divided(states: torch.Tensor, lengths: Sequence[int]) -> Sequence[torch.Tensor]:
    """``states`` [1, heads, tokens, dim] by the ``lengths`` of their sequences."""
    return (states,) if len(lengths) == 1 else torch.split_with_sizes(states, lengths, 2)


def _lengths(batch: Batch, paged: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """(number of new tokens, number of keys) of every sequence; the layer's cache says where each one's keys end."""
    edges: torch.Tensor = paged["cu_seq_lens_k"]
    return batch.shared(edges.data_ptr(), lambda: packed_lengths(batch, edges))
