"""The calls by which ordinary layers read the sequences of a packed row.

A step decides once, for all layers alike, how each sequence reads its keys.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from patches.attention.decode.plan import STEPS, Decoding, Plan, Row
from patches.attention.decode.reading import ORDINARY, Reading, biased_reading, reading_of, readings_at
from patches.attention.decode.shared import NONE, Cached, Course, shared_calls, turns_once
from patches.attention.decode.sums.rings import Rings
from patches.attention.layer import Layer
from patches.attention.paged.batch import Role
from patches.attention.positions import SegmentPositions
from patches.batch.segments import Segment
from patches.encoding.recipe import ResolvedRecipe
from patches.model.attention.segment_attention import SegmentAttention, num_sinks_of


@dataclass
class Planning:
    """A step of the sequences of ``row`` in layers such as ``layer``, by their encodings in ``segments``.

    ``query`` [1, heads, tokens, dim] and ``cached`` are as in ``Row.sequence``; shapes count.
    """

    segments: SegmentAttention
    row: Row
    layer: Layer
    role: Role
    query: torch.Tensor
    cached: Cached

    @cached_property
    def kind(self) -> Hashable:
        """Layers of one role, window and shape have the same plans."""
        return self.role, self.layer.mask, self.query.shape[1], self.cached[0].shape, self.cached[1].shape

    def plan(self, kept: dict[Hashable, Decoding] | None) -> Plan:
        """The calls of the step. With ``kept``, those of the step before may serve it. By kind, it then has these."""
        plan = self.row.plans.get(self.kind)
        if plan is None:
            plan = self._planned(None) if kept is None else self._next(kept.setdefault(self.kind, Decoding()))
            self.row.plans[self.kind] = plan
        return plan

    def _next(self, decoding: Decoding) -> Plan:
        if not decoding.goes_on(self.row):
            decoding.rings = self._rings(decoding.rings)
            decoding.keep(self._planned(decoding.rings), self.row)
        assert decoding.plan is not None
        return decoding.plan

    def _rings(self, before: Rings | None) -> Rings | None:
        """Rings for a new plan by sums, those from ``before`` if there are any. Other calls turn keys in their
        places."""
        if not self._turns_once(0):
            return None
        if before is None:
            return Rings(self.row.spare)
        before.keep(self.row.batch.names)
        return before

    def _turns_once(self, ahead: int) -> bool:
        """``turns_once`` in the step that is so many ``ahead``."""
        return turns_once(self.query, self.cached, [length + ahead for length in self.row.num_kv])

    def _planned(self, rings: Rings | None) -> Plan:
        row, each = self.row, self._readings(rings is not None)
        readings, shared = [None if own is None else own[0] for own in each], NONE
        steps = min(0 if own is None else len(own) for own in each)
        if row.batch.places is not None:
            course = None
            if rings is not None:
                course = Course(row.batch.names, rings, [[] if own is None else own[1:steps] for own in each])
            own = self.query, self.cached, row.spare, course
            shared = shared_calls(readings, row.runs, row.num_kv, *own)
        rest = sorted(set(range(len(readings))).difference(shared.members))
        order = [*shared.members, *rest]
        is_in_order = order == list(range(len(order)))
        alone = [(number, readings[number]) for number in rest]
        ahead = shared.ahead
        if steps > 1 and not shared.members and all(reading is ORDINARY for reading in readings):
            ahead = steps - 1 if self._turns_once(steps - 1) == (rings is not None) else 0
        return Plan(shared, alone, None if is_in_order else torch.tensor(order).argsort(), ahead)

    def _readings(self, has_rings: bool) -> list[Sequence[Reading] | None]:
        """The reading of each segment with a single query, None for others.

        With rings, keys turn once, and readings come with those of the steps behind it that are alike. So do ordinary
        readings of keys in place.
        """
        readings: list[Sequence[Reading] | None] = []
        row, layer, kind = self.row, self.layer, (self.query.dtype, self.query.device)
        steps = 1 if row.batch.places is None else 1 + min(row.room, STEPS - 1)
        for segment, new, length in zip(row.batch.segments, row.new, row.num_kv, strict=True):
            recipe = self.segments.recipe(self.role, segment.slot)
            if new > 1 or recipe.recipe.relative is not None:
                readings.append(None)
                continue
            whole = self._whole(segment, recipe, length, steps, has_rings)
            if whole:
                readings.append(whole)
                continue
            num_sinks = num_sinks_of(recipe, layer, length, segment.q_stop) or 0
            if not has_rings:
                query = range(segment.q_start, segment.q_stop)
                readings.append([reading_of(SegmentPositions(recipe, layer, query, length, num_sinks, *kind))])
                continue
            places = range(segment.q_start, segment.q_start + steps)
            readings.append(readings_at(recipe, layer.mask, places, length, num_sinks, kind[0]))
        return readings

    def _whole(
        self, segment: Segment, recipe: ResolvedRecipe, length: int, steps: int, has_rings: bool
    ) -> Sequence[Reading]:
        """The readings of all keys at their own positions, in as many of the steps as the layer has them."""
        if not recipe.is_causal or recipe.recipe.attention_temperature:
            return ()
        ends = range(segment.q_start + steps, segment.q_start, -1)
        places = range(segment.q_start, next(filter(self.layer.mask.is_causal_below, ends), segment.q_start))
        bias = recipe.recipe.score_bias
        if bias is None:
            return [ORDINARY] * len(places)
        if not bias.by_distance or length != segment.q_stop:
            return ()
        needed = places if has_rings else places[:1]
        return [biased_reading(bias, place, self.query.dtype, self.query.device) for place in needed]
