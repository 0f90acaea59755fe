"""Positions that a model adds to its tokens: methods, maps and the embedding read at real-valued positions."""

from __future__ import annotations

import itertools
import json
import math
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers.models.xglm.modeling_xglm import XGLMSinusoidalPositionalEmbedding

from patches import METHODS, InvalidEncoding, Recipe, RopeGeometry, SlotTable, describe, encode, parse, resolve
from patches.attention.paged.compilation import base_of
from patches.encoding.positions import Stretched
from patches.encoding.recipe import NOTHING_ADDED
from patches.methods.absolute import At
from patches.model.absolute import AbsoluteEmbedding, LearnedTable, Sinusoid, embeddings, mapped
from tests import oracles
from tests.methods import OTHER_ROWS, ROWS, Fields, Row, request_id
from tests.patches.encoding.test_recipe import namespace
from tests.patches.methods.test_golden import load

TRAINED = 64
LEARNED = RopeGeometry(16, 0, 0.0, TRAINED, TRAINED, 4, family="learned", native=parse({"method": "learned"}))
LEARNED = replace(LEARNED, table_rows=TRAINED)
SINUSOIDAL = replace(LEARNED, family="sinusoidal", native=parse({"method": "sinusoidal"}), table_rows=None)
GEOMETRIES = {"learned": LEARNED, "sinusoidal": SINUSOIDAL}
ROTARY = RopeGeometry(16, 16, 10_000.0, TRAINED, TRAINED, 4)

OTHER_REQUESTS = [(row.family, fields) for row in OTHER_ROWS for fields in row.requests]
every_request = pytest.mark.parametrize(
    ("family", "fields"), OTHER_REQUESTS, ids=[request_id(fields) for _, fields in OTHER_REQUESTS]
)
every_method = pytest.mark.parametrize("row", OTHER_ROWS, ids=lambda row: row.name)


def table(rows: int = TRAINED, width: int = 6, offset: int = 0) -> LearnedTable:
    torch.manual_seed(0)
    return LearnedTable(nn.Embedding(rows + offset, width), offset)


def read(embedding: AbsoluteEmbedding, recipe: Recipe, length: int) -> torch.Tensor:
    """The vectors that a recipe adds to the first ``length`` tokens."""
    assert recipe.absolute is not None
    return mapped(embedding, recipe.absolute, torch.arange(length)).detach()


def recipe_of(fields: Fields, geometry: RopeGeometry, length: int) -> Recipe:
    return resolve(parse(fields), geometry, length).recipe


# Requests


@every_request
def test_requests_parse_echo_print_and_pickle(family: str, fields: Fields) -> None:
    geometry, method = GEOMETRIES[family], parse(fields)
    assert type(method) is METHODS[fields["method"]]
    parameters = json.loads(json.dumps(method.parameters(geometry)))
    assert parse({"method": fields["method"], **parameters}).recipe(geometry) == method.recipe(geometry)
    echo = json.loads(json.dumps(describe(method, geometry, TRAINED), allow_nan=False))
    assert echo["method"] == echo["requested"] == fields["method"]
    assert (echo["rotates_at"], echo["bands"]) == ("never", 1)
    resolved = resolve(method, geometry, TRAINED)
    assert resolved == pickle.loads(pickle.dumps(resolved)) == eval(repr(resolved), namespace())
    assert not resolved.rotates


def test_different_requests_are_different_recipes() -> None:
    for family, geometry in GEOMETRIES.items():
        requests = [fields for own, fields in OTHER_REQUESTS if own == family]
        assert len({parse(fields).recipe(geometry) for fields in requests}) == len(requests)


@every_method
def test_what_depends_on_the_reserved_length(row: Row) -> None:
    for fields, depends in zip(row.requests, (row.depends_on_length, row.hard_depends_on_length), strict=True):
        recipe = parse(fields).recipe(GEOMETRIES[row.family])
        assert recipe.depends_on_length == depends
        short, long = (recipe.resolve(replace(GEOMETRIES[row.family], table_rows=None), n) for n in (TRAINED, 200))
        assert (short != long) == depends


@every_method
def test_unknown_keys_and_bad_numbers_name_their_field(row: Row) -> None:
    def refused(**fields: Any) -> str:
        with pytest.raises(InvalidEncoding) as caught:
            parse({"method": row.name, **row.easy, **fields})
        return str(caught.value)

    assert "factr" in refused(factr=2.0)
    for name in {"factor", "alpha"} & set(METHODS[row.name].model_fields):
        for value in (0.0, -1.0, math.nan, math.inf, "two", [2.0]):
            assert name in refused(**{name: value})


@pytest.mark.parametrize(
    "fields",
    [
        {"method": "learned_interpolation"},
        {"method": "learned_interpolation", "align": "scale"},
        {"method": "learned_interpolation", "align": "ends", "factor": 2.0},
        {"method": "learned_interpolation", "align": "middle"},
        {"method": "learned_hierarchical", "alpha": 0.5},
        {"method": "learned_hierarchical", "alpha": 1.0},
        {"method": "sinusoidal_interpolation"},
    ],
    ids=request_id,
)
def test_fields_that_do_not_go_together(fields: Fields) -> None:
    with pytest.raises(InvalidEncoding, match=r"factor|align|alpha"):
        parse(fields)


# Families


@every_request
def test_models_of_another_family_refuse(family: str, fields: Fields) -> None:
    others = [ROTARY, replace(ROTARY, family="bias", native=parse({"method": "alibi"})), LEARNED, SINUSOIDAL]
    for geometry in others:
        if geometry.family != family:
            with pytest.raises(ValueError, match=rf"^method: {fields['method']} is for models trained with {family}"):
                resolve(parse(fields), geometry, 10)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_other_methods_on_a_model_that_adds_positions(row: Row) -> None:
    """``default`` is the model's encoding; a bias or nothing replaces its positions; rotation is refused."""
    for fields, geometry in itertools.product(row.requests, GEOMETRIES.values()):
        check_other_method(row, fields, geometry)


def check_other_method(row: Row, fields: Fields, geometry: RopeGeometry) -> None:
    if fields == {"method": "default"}:
        assert geometry.native is not None
        assert recipe_of(fields, geometry, TRAINED) == geometry.native.recipe(geometry)
        assert describe(parse(fields), geometry, TRAINED)["method"] == geometry.native.method
    elif row.rotates:
        with pytest.raises(ValueError, match="without rotary embeddings"):
            resolve(parse(fields), geometry, TRAINED)
    else:
        recipe = recipe_of(fields, geometry, 1000)
        assert recipe.absolute == NOTHING_ADDED
        assert not read(table(), recipe, 5).any()
        assert parse(fields).recipe(ROTARY).absolute is None


def test_a_recipe_of_absolute_positions_needs_a_model_that_adds_them() -> None:
    with pytest.raises(ValueError, match="no table to map"):
        Recipe(None, absolute=At(Stretched(2.0))).resolve(ROTARY, 10)


# The end of the table

REACH: list[tuple[Fields, int]] = [
    ({"method": "learned"}, TRAINED),
    ({"method": "default"}, TRAINED),
    ({"method": "learned", "attention_temperature": 1.5}, TRAINED),
    ({"method": "learned_interpolation", "factor": 4.0}, 4 * TRAINED),
    ({"method": "learned_hierarchical"}, TRAINED**2),
]


@pytest.mark.parametrize(("fields", "reach"), REACH, ids=lambda value: str(value))
def test_past_the_table_is_refused_with_both_numbers(fields: Fields, reach: int) -> None:
    resolve(parse(fields), LEARNED, reach)
    with pytest.raises(ValueError, match=rf"has {TRAINED} positions.* {reach + 1} reserved"):
        resolve(parse(fields), LEARNED, reach + 1)


@pytest.mark.parametrize(
    "fields", [{"method": "none"}, {"method": "alibi"}, {"method": "learned_interpolation", "align": "ends"}]
)
def test_what_never_reads_past_the_table(fields: Fields) -> None:
    for length in (1, TRAINED, TRAINED + 1, 100_003, 1 << 24):
        resolve(parse(fields), LEARNED, length)


def test_the_formula_has_no_end() -> None:
    resolve(parse({"method": "sinusoidal"}), SINUSOIDAL, 1 << 24)


# Values


def test_golden_tables(shared: Path) -> None:
    golden = load(shared, "absolute_tables")
    values = torch.tensor(golden["learned_table"], dtype=torch.float64)
    learned = LearnedTable(nn.Embedding.from_pretrained(values.float()))
    geometry = replace(LEARNED, table_rows=len(values), original_max_position_embeddings=len(values))
    cases: dict[str, Fields] = {
        "end_aligned_to_12": {"method": "learned_interpolation", "align": "ends"},
        "pi_style_factor2_n12": {"method": "learned_interpolation", "factor": 2.0},
    }
    for name, fields in cases.items():
        expected = torch.tensor(golden[name])
        result = read(learned, recipe_of(fields, geometry, len(expected)), len(expected))
        torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-6)
    expected = torch.tensor(golden["sinusoidal_interleaved_n8_d8"], dtype=torch.float64)
    result = Sinusoid(nn.Identity(), torch.zeros(8, 8), interleaved=True).at(torch.arange(8).double())
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("offset", [0, 2])
def test_a_table_between_its_rows(offset: int) -> None:
    learned = table(offset=offset)
    values = learned.module.weight.detach().double().numpy()[offset:]
    for fields, divisor in (
        ({"method": "learned_interpolation", "factor": 3.7}, 3.7),
        ({"method": "learned_interpolation", "align": "ends"}, (150 - 1) / (TRAINED - 1)),
    ):
        result = read(learned, recipe_of(fields, LEARNED, 150), 150)
        expected = np.stack([oracles.table_at(values, p / divisor) for p in range(150)])
        np.testing.assert_allclose(result.numpy(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(
        read(learned, Recipe(None, absolute=At(Stretched(1.0))), TRAINED), learned.module.weight[offset:]
    )


def test_ends_are_the_ends_and_short_requests_are_left_alone() -> None:
    learned, fields = table(), {"method": "learned_interpolation", "align": "ends"}
    result = read(learned, recipe_of(fields, LEARNED, 1001), 1001)
    assert torch.equal(result[[0, -1]], learned.module.weight[[0, -1]])
    for length in (1, 2, TRAINED):
        assert recipe_of(fields, LEARNED, length).absolute is None


@pytest.mark.parametrize(
    ("fields", "longest"),
    [
        ({"method": "learned"}, TRAINED),
        ({"method": "learned_interpolation", "factor": 2.5}, 5 * TRAINED // 2),
        ({"method": "learned_interpolation", "align": "ends"}, 1000),
        ({"method": "learned_hierarchical"}, 1000),
    ],
)
def test_a_length_is_as_long_as_the_table_allows(fields: dict[str, Any], longest: int) -> None:
    recipe = parse(fields).recipe(LEARNED)
    assert recipe.longest(LEARNED, 1000) == longest
    recipe.resolve(LEARNED, longest)
    if longest < 1000:
        with pytest.raises(ValueError, match="table has"):
            recipe.resolve(LEARNED, longest + 1)


@pytest.mark.parametrize("alpha", [0.4, 0.1, 0.9])
def test_hierarchical_is_the_papers_and_the_table_inside_it(alpha: float) -> None:
    learned = table(8)
    geometry = replace(LEARNED, table_rows=8)
    result = read(learned, recipe_of({"method": "learned_hierarchical", "alpha": alpha}, geometry, 64), 64)
    values = learned.module.weight.detach().double().numpy()
    expected = np.stack([oracles.hierarchical(values, p, alpha) for p in range(64)])
    np.testing.assert_allclose(result.numpy(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(result[:8], learned.module.weight)
    assert len({tuple(row) for row in result.tolist()}) == 64, "every position has its own vector"


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_sinusoid_at_real_valued_positions(interleaved: bool) -> None:
    waves = Sinusoid(nn.Identity(), torch.zeros(4, 12), offset=2, interleaved=interleaved)
    result = read(waves, recipe_of({"method": "sinusoidal_interpolation", "factor": 2.5}, SINUSOIDAL, 90), 90)
    expected = [oracles.sinusoid(p / 2.5 + 2, 12, interleaved=interleaved) for p in range(90)]
    np.testing.assert_allclose(result.numpy(), expected, rtol=0, atol=1e-6)
    own = waves.native(torch.arange(5, 50))
    expected = [oracles.sinusoid(p + 2, 12, interleaved=interleaved) for p in range(5, 50)]
    np.testing.assert_allclose(own.numpy(), expected, rtol=0, atol=1e-5)


def test_a_sinusoid_past_its_table_is_the_longer_table_of_the_model() -> None:
    short, long = (XGLMSinusoidalPositionalEmbedding(n, 64, padding_idx=1) for n in (30, 5000))
    ours = Sinusoid(short, short.weights, short.offset)
    position = torch.arange(5000)
    assert torch.equal(ours.native(position), long.weights[2:])
    assert len(short.weights) == 32, "the model's own table did not grow"


# Several encodings in one forward


def test_tokens_of_several_encodings_in_one_forward() -> None:
    learned = table(offset=2)
    slots = SlotTable(resolve(parse({"method": "default"}), LEARNED, TRAINED), 0, torch.device("cpu"), base_of)
    requests: list[Fields] = [
        {"method": "learned_hierarchical"},
        {"method": "none"},
        {"method": "learned_interpolation", "factor": 2.0},
    ]
    resolved = [resolve(parse(fields), LEARNED, 90) for fields in requests]
    position = torch.arange(50)
    own = embeddings(learned, position[None], slots)
    assert torch.equal(own[0], learned.module.weight[2:52])
    numbers = [0, *(slots.acquire(one) for one in resolved)]
    assert len(set(numbers)) == 4
    encoded = encode(position[None] + torch.tensor([[0], [40], [7], [20]]), torch.tensor(numbers)[:, None])
    encoded[0] -= encoded[0].min()
    result = embeddings(learned, encoded, slots)
    assert torch.equal(result[0], own[0])
    for row, first, one in zip((1, 2, 3), (40, 7, 20), resolved, strict=True):
        assert one.recipe.absolute is not None
        assert torch.equal(result[row], mapped(learned, one.recipe.absolute, position + first))


def test_half_precision_and_gradients() -> None:
    learned = table()
    slots = SlotTable(resolve(parse({"method": "default"}), LEARNED, TRAINED), 0, torch.device("cpu"), base_of)
    slot = slots.acquire(resolve(parse({"method": "learned_interpolation", "factor": 2.0}), LEARNED, 4))
    encoded = encode(torch.arange(4)[None], slot)
    embeddings(learned, encoded, slots).sum().backward()
    grad = learned.module.weight.grad
    assert grad is not None
    assert grad[:4, 0].tolist() == [1.5, 2.0, 0.5, 0.0]
    exact = embeddings(learned, encoded, slots)
    half = LearnedTable(learned.module.bfloat16())
    result = embeddings(half, encoded, slots)
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result.float(), exact, rtol=0.02, atol=0.02)
