"""Cost of a parameter: elements computed when an encoding is resolved and first used, counted and not timed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from patches import METHODS, RopeGeometry, parse, resolve
from patches.batch.slots import MAX_POSITION
from tests.methods import OTHER_ROWS, RELATIVE_ROWS, ROWS, Fields, Row

LONGEST, HEADS, VALUES = 32_768, 4, 64
"""The longest request of a server on a CPU, as configured by default; heads; different values of a parameter."""

PER_PAIR = 8
"""Tensors of one number per head and pair that a bias may take to compute."""

GEOMETRY = RopeGeometry(64, 64, 1e4, 256, 256, HEADS)
BIASES = ("alibi", "sandwich", "kerple_log", "kerple_power", "t5_bias")


class Counted(TorchDispatchMode):
    """``elements`` of all results, and ``products`` of numbers inside matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.elements, self.products = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.elements += result.numel()
            if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm):
                self.products += result.numel() * args[0].shape[-1]
        return result


@contextmanager
def counted() -> Iterator[Counted]:
    with Counted() as count:
        yield count


def test_the_counting_itself() -> None:
    with counted() as count:
        torch.ones(3, 5) @ torch.ones(5, 2)
    assert (count.elements, count.products) == (15 + 10 + 6, 30)


def table(number: int) -> list[list[float]]:
    return [[(number * bucket + head) / 1024 for head in range(HEADS)] for bucket in range(1024)]


VARIED: dict[str, Any] = {
    "alibi": lambda i: {"alibi_bias_max": 8.0 + i / VALUES},
    "sandwich": lambda i: {"dim": largest("sandwich", "dim") - 2 * i},
    "kerple_log": lambda i: {"r2": 0.5 + i},
    "kerple_power": lambda i: {"r2": 2.0 - i / VALUES},
    "t5_bias": lambda i: (
        {"relative_attention_bias": table(i), "relative_attention_num_buckets": 1024}
        | {"relative_attention_max_distance": 2048}
    ),
}
"""Fields of value number i, the most expensive first; other methods vary their temperature."""


def largest(name: str, field: str) -> int:
    return int(METHODS[name].model_json_schema()["properties"][field]["maximum"])


def variants(row: Row) -> list[Fields]:
    if row.name in VARIED:
        return [{"method": row.name, **VARIED[row.name](i)} for i in range(VALUES)]
    easy = {key: value for key, value in row.easy.items() if row.name != "drope"}
    return [{"method": row.name, **easy, "attention_temperature": 1.0 + i / VALUES} for i in range(VALUES)]


def geometry_for(row: Row) -> RopeGeometry:
    native = parse({"method": row.name}) if row.family == "relative" else None
    rows = LONGEST if row.family == "learned" else None
    return replace(GEOMETRY, family=row.family, native=native, table_rows=rows)


@pytest.mark.parametrize("row", [*ROWS, *OTHER_ROWS, *RELATIVE_ROWS], ids=lambda row: row.name)
def test_resolving_computes_nothing_that_grows_with_the_length(row: Row) -> None:
    for fields in variants(row):
        method, geometry = parse(fields), geometry_for(row)
        with counted() as count:
            resolve(method, geometry, LONGEST)
        assert count.elements < 64 * GEOMETRY.head_dim


def decoded(fields: Fields) -> Counted:
    """The bias of one query to every key of the longest request."""
    score_bias = resolve(parse(fields), GEOMETRY, LONGEST).recipe.score_bias
    assert score_bias is not None
    q_idx, kv_idx = torch.tensor([[LONGEST - 1]]), torch.arange(LONGEST)[None]
    with counted() as count:
        bias = score_bias(q_idx, kv_idx)
    assert bias.shape == (HEADS, 1, LONGEST)
    return count


@pytest.mark.slow
@pytest.mark.parametrize("row", [row for row in ROWS if row.name in BIASES], ids=lambda row: row.name)
def test_the_first_use_of_every_value_is_cheap_and_none_pushes_out_another(row: Row) -> None:
    """A first use takes fewer products than the queries and keys of one layer of 512 dimensions; no later use any."""
    for fields in variants(row):
        first = decoded(fields)
        assert first.elements <= PER_PAIR * HEADS * LONGEST, fields
        assert first.products <= 512 * LONGEST, fields
    for fields in variants(row):
        later = decoded(fields)
        assert later.elements <= PER_PAIR * HEADS * LONGEST, fields
        assert later.products == 0, fields


@pytest.mark.slow
@pytest.mark.parametrize("name", BIASES)
def test_a_few_pairs_cost_what_they_are_however_far_apart(name: str) -> None:
    """As pictures ask for them."""
    row = next(row for row in ROWS if row.name == name)
    places = torch.linspace(0, MAX_POSITION - 1, 128).long()
    score_bias = resolve(parse(variants(row)[0]), GEOMETRY, MAX_POSITION).recipe.score_bias
    assert score_bias is not None
    with counted() as count:
        bias = score_bias(places[:, None], places[None])
        step = score_bias(places[-1:, None], places[None])
    assert count.elements <= 2 * PER_PAIR * HEADS * 128 * 128
    assert bool(bias.tril().isfinite().all())
    torch.testing.assert_close(step[:, 0], bias[:, -1], rtol=1e-6, atol=1e-4)
