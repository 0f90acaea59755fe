"""Plans of the probe: units and their tokens, repeated segments, defaults by the model, and refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from service.evaluation.checks import InvalidEvaluation
from service.evaluation.probe.units import AttentionUnit, CopyUnit
from service.models.registry import ModelRegistry
from tests.service.evaluation.probe.conftest import DOCUMENTS, METHODS, planned
from tests.service.evaluation.prompting import finish


def test_tokens_are_counted_before_units_exist(tiny: ModelRegistry) -> None:
    for bos in ("auto", "never"):
        plan = planned(tiny, bos=bos)
        assert plan.tokens == sum(unit.tokens for unit in plan.units)
        assert len(plan.units) == 3 * (2 * 2 + 2 * 3 + 2)
        assert max(unit.length for unit in plan.units) == plan.longest == 128


def test_a_segment_stands_twice_a_distance_apart(tiny: ModelRegistry) -> None:
    plan = planned(tiny, methods=METHODS[:1])
    copies = [unit for unit in plan.units if isinstance(unit, CopyUnit)]
    special = set(tiny.default.tokenizer.all_special_ids)
    drawn = {}
    for unit in copies:
        distance, ids = unit.repeated.distance, unit.token_ids
        assert len(ids) == unit.length == 1 + distance + 6
        assert ids[0] == 0
        assert ids[1:7] == ids[1 + distance : 7 + distance]
        assert len(set(ids[1:7]) - special) == 6
        filler, document = ids[7 : 1 + distance], unit.repeated.document.token_ids
        assert any(document[i : i + len(filler)] == filler for i in range(len(document)))
        drawn.setdefault(distance, []).append(ids[1:7])
    assert drawn[12] == drawn[50], "the same segments at every distance"
    assert len({tuple(segment) for segment in drawn[12]}) == 3
    other = [u.token_ids[1:7] for u in planned(tiny, seed=1).units if isinstance(u, CopyUnit)]
    assert all(segment not in drawn[12] for segment in other)
    stretches = [u for u in planned(tiny, segment_of="document").units if isinstance(u, CopyUnit)]
    for unit in stretches:
        document = unit.repeated.document.token_ids
        assert any(document[i : i + 6] == unit.token_ids[1:7] for i in range(len(document)))


def test_what_is_not_given_follows_the_model(tiny: ModelRegistry) -> None:
    plan = planned(tiny, lengths=None, queries=None, distances=None, segment=20)
    assert (plan.lengths, plan.queries) == ([64, 256], 64)
    assert plan.distances == [32, 64, 128]
    assert plan.longest == 256
    short = planned(tiny, input=[DOCUMENTS[0][:180]], lengths=None, queries=None, distances=None)
    assert len(short.lengths) == 1
    assert short.queries == min(64, short.lengths[0])


@pytest.mark.parametrize(
    ("change", "param", "says"),
    [
        ({"queries": 41}, "queries", "at most the shortest length"),
        ({"distances": [5, 50]}, "distances", "below the segment's 6"),
        ({"distances": [12, 900_000]}, "distances", "at most"),
        ({"distances": list(range(6, 16))}, "distances", "at most 8"),
        ({"distances": None, "segment": 100}, "segment", "do not fit"),
        ({"segment": 300, "distances": [400]}, "segment", "different tokens"),
        ({"lengths": [64, 99_999]}, "lengths", "at most"),
        ({"methods": [{"method": "learned"}]}, "methods.0", "learned positions"),
        ({"samples": 1000}, "lengths", "100000 a request"),
        ({"input": [[5, 99_999]]}, "input", "0..383"),
    ],
)
def test_refusals(tiny: ModelRegistry, change: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(InvalidEvaluation, match=says) as refused:
        planned(tiny, **change)
    assert refused.value.param == param


def test_keys_of_several_tokens_have_no_distances(tiny: ModelRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    patch = tiny.get(None).patch
    monkeypatch.setattr(patch, "geometry", replace(patch.geometry, compresses_keys=True))
    with pytest.raises(InvalidEvaluation, match="cover several tokens") as refused:
        planned(tiny)
    assert refused.value.param == "model"


def test_inputs_tell_units_apart(tiny: ModelRegistry) -> None:
    plan = planned(tiny, methods=METHODS[:1])
    own = [unit for unit in plan.units if isinstance(unit, AttentionUnit | CopyUnit)]
    assert len({(unit.kind, str(unit.inputs())) for unit in own}) == len(own)
    again = [unit for unit in planned(tiny, methods=METHODS[1:2]).units if isinstance(unit, AttentionUnit | CopyUnit)]
    assert [unit.inputs() for unit in again] == [unit.inputs() for unit in own], "paired across methods"
    for unit, outcome in zip(own, map(finish, (unit.run() for unit in own)), strict=True):
        assert all(np.isfinite(value) for value in unit.summary(outcome).values())
