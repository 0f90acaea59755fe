"""The smallest and the largest numbers of requests, alone and in pairs, give finite logits and a JSON echo."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from patches import METHODS, InvalidEncoding, Patched, encode, parse, patched
from tests.methods import OTHER_ROWS, RELATIVE_ROWS, Fields, Row, rows
from tests.models import demo_model, tiny_model, tiny_tokens

LENGTH, TRAINED, PAIRS, HEADS = 48, 32, 8, 4
TABLE = [*rows(PAIRS, TRAINED, HEADS), *OTHER_ROWS, *RELATIVE_ROWS]
BATCH = 100
"""Requests in one forward, each in another slot."""


@dataclass(frozen=True)
class Schema:
    """A part of a method's JSON schema, with the definitions that it refers to."""

    part: dict[str, Any]
    definitions: dict[str, Any]

    def ends(self, example: Any) -> Iterator[Any]:
        """The smallest and the largest values that it takes; lists are as long as ``example``."""
        part = self.part
        if "$ref" in part:
            yield from Schema(self.definitions[part["$ref"].rpartition("/")[2]], self.definitions).ends(example)
        for other in (*part.get("anyOf", ()), *part.get("oneOf", ())):
            yield from Schema(other, self.definitions).ends(example)
        if "const" in part or "enum" in part:
            return
        if part.get("type") in ("number", "integer"):
            yield from self._numbers()
        elif part.get("type") == "array" and isinstance(example, list | tuple):
            values = list(Schema(part["items"], self.definitions).ends(example[0]))
            yield from ([value] * len(example) for value in values)
            yield [values[i % 2] for i in range(len(example))]
        elif "kind" in part.get("properties", ()):
            yield from self._kinds(part["properties"])

    def _numbers(self) -> Iterator[float | int]:
        part = self.part
        low = part.get("minimum", math.nextafter(part.get("exclusiveMinimum", math.nan), math.inf))
        high = part.get("maximum", math.nextafter(part.get("exclusiveMaximum", math.nan), -math.inf))
        assert math.isfinite(low), f"a number without a smallest value: {part}"
        assert math.isfinite(high), f"a number without a largest value: {part}"
        yield from (int(low), int(high)) if part["type"] == "integer" else (float(low), float(high))

    def _kinds(self, fields: dict[str, Any]) -> Iterator[Fields]:
        """A kind of temperature, with all its numbers at either end, and on the rotated part if it can be."""
        ends = {name: list(Schema(part, self.definitions).ends(None)) for name, part in fields.items()}
        numbers = {name: values for name, values in ends.items() if values}
        for values in itertools.product(*numbers.values()):
            kind = {"kind": fields["kind"]["const"], **dict(zip(numbers, values, strict=True))}
            yield kind
            if "rotated_only" in fields:
                yield kind | {"rotated_only": True}


def extremes(row: Row) -> Iterator[Fields]:
    """Every field at its ends, and every two fields at theirs; what else is needed is the row's."""
    schema = METHODS[row.name].model_json_schema()
    own = {"method": row.name, **row.easy}
    ends = {}
    for name, part in schema["properties"].items():
        if name not in ("method", "base"):
            found = list(Schema(part, schema.get("$defs", {})).ends({**row.hard, **row.easy}.get(name)))
            ends.update({name: found} if found else {})
    yield from ({**own, name: value} for name, values in ends.items() for value in values)
    if "attention_temperature" in ends:  # its kinds take numbers at their ends: two are enough beside another field
        ends["attention_temperature"] = [value for value in ends["attention_temperature"] if isinstance(value, float)]
    for (one, firsts), (other, seconds) in itertools.combinations(ends.items(), 2):
        yield from ({**own, one: a, other: b} for a, b in itertools.product(firsts, seconds))


def model_of(row: Row) -> PreTrainedModel:
    if row.family == "rotary":
        sizes: Fields = {"max_position_embeddings": TRAINED, "num_hidden_layers": 1}
        return tiny_model("llama", attn_implementation="sdpa", **sizes)[1]
    family = row.name if row.family == "relative" else row.family
    reached = TRAINED if row.name == "learned_hierarchical" else LENGTH  # the others end with the table
    return demo_model(family, max_position_embeddings=reached, num_hidden_layers=1)


def resolved_slots(patch: Patched, requests: list[Fields]) -> dict[int, Fields]:
    """Slot -> request, of those that fit the model; every echo is JSON."""
    slots = {}
    for fields in requests:
        refusal = ""
        try:
            method = parse(fields)
            resolved = patch.resolve(method, LENGTH)
        except ValueError as error:
            refusal = str(error)
        if refusal:
            assert any(name in refusal for name in fields), f"names no field: {refusal}"
            continue
        json.dumps(patch.describe(method, LENGTH), allow_nan=False)
        slots[patch.slots.acquire(resolved)] = fields
    return slots


@torch.no_grad()
def finite(patch: Patched, slots: list[int]) -> torch.Tensor:
    """True per slot if all logits are finite, in a prefill and in the step after it."""
    tokens = tiny_tokens(1, LENGTH).expand(len(slots), -1)
    encoded = encode(torch.arange(LENGTH)[None], torch.tensor(slots)[:, None])
    cache, parts = DynamicCache(config=patch.model.config), []
    for new in (slice(0, LENGTH - 1), slice(LENGTH - 1, LENGTH)):
        arguments = {"position_ids": encoded[:, new], "cache": cache, "use_cache": True}
        parts.append(patch.model(tokens[:, new], attention_mask=torch.ones(len(slots), new.stop), **arguments).logits)
    return torch.cat(parts, 1).isfinite().all(-1).all(-1)


@pytest.mark.slow
@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_extreme_numbers_give_finite_logits(row: Row) -> None:
    requests = list(extremes(row))
    assert len(requests) > 30
    for dtype in (torch.float32, torch.float16):
        check(row, requests, dtype)


def check(row: Row, requests: list[Fields], dtype: torch.dtype) -> None:
    tried = 0
    for start in range(0, len(requests), BATCH):
        with patched(model_of(row).to(dtype)) as patch:
            slots = resolved_slots(patch, requests[start : start + BATCH])
            tried += len(slots)
            wrong = [slots[slot] for slot, fine in zip(slots, finite(patch, list(slots)), strict=True) if not fine]
            assert wrong == [], dtype
    assert tried > len(requests) / 10, "nearly all were refused, or one and the same"


@pytest.mark.parametrize("asked", [1e-46, 5e-324, 0.009, 10.1, {"kind": "constant", "multiplier": 1e-46}])
def test_a_temperature_out_of_range_is_refused_with_the_range(asked: Any) -> None:
    with pytest.raises(
        InvalidEncoding, match=r"attention_temperature.multiplier: must be (at least 0\.01|at most 10), not "
    ):
        parse({"method": "default", "attention_temperature": asked})
