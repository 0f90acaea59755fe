"""Learned vectors for distances: scores against the papers, the fused route against the reference, what is refused."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from patches import METHODS, InvalidEncoding, RopeGeometry, describe, parse, resolve
from patches.attention import fused, reference
from patches.attention.layer import Layer
from patches.batch.segments import Batch
from patches.encoding.masks import CAUSAL, DistanceRange
from service.models.architecture import ShawKeys, TransformerXLTerms
from tests import oracles
from tests.methods import RELATIVE_ROWS, Fields, Row, request_id
from tests.patches.encoding.test_recipe import namespace
from tests.patches.forward import relative

TRAINED, HEADS, HEAD_DIM, WIDTH, SCALING = 32, 4, 16, 24, 0.3
PLAIN = RopeGeometry(HEAD_DIM, 0, 0.0, TRAINED, TRAINED, HEADS, family="none", native=parse({"method": "none"}))
WEIGHTS = {"shaw": ShawKeys, "transformer_xl": TransformerXLTerms}
TEMPERATURES: list[Any] = [None, 1.7, "log_n"]

every_method = pytest.mark.parametrize("row", RELATIVE_ROWS, ids=lambda row: row.name)
every_request = pytest.mark.parametrize(
    "fields", [fields for row in RELATIVE_ROWS for fields in row.requests], ids=request_id
)


def geometry_for(name: str) -> RopeGeometry:
    return replace(PLAIN, family="relative", native=parse({"method": name}))


class Attention(nn.Module):
    """A layer's attention, as far as an encoding reads it; weights that make distances matter."""

    def __init__(self, name: str) -> None:
        super().__init__()
        sizes = type("Sizes", (), {"num_attention_heads": HEADS, "head_dim": HEAD_DIM, "hidden_size": WIDTH})
        self.relative = WEIGHTS[name](sizes)
        generator = torch.Generator().manual_seed(1)
        for weight in self.parameters():
            weight.requires_grad_(False).copy_(torch.randn(weight.shape, generator=generator) / 2)


def states(
    new: int, held: int, *, groups: int = 1, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key, value of two rows."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(HEADS, new), *[(HEADS // groups, held)] * 2]
    query, key, value = (torch.randn(2, *shape, HEAD_DIM, generator=generator).mul(2).to(dtype) for shape in shapes)
    return query, key, value


@every_method
def test_scores_are_those_of_the_paper(row: Row) -> None:
    attention, (query, key, _) = Attention(row.name), states(6, 40)
    distance = (torch.arange(34, 40)[:, None] - torch.arange(40)).clamp_min(0)
    recipe = parse({"method": row.name}).recipe(geometry_for(row.name))
    assert recipe.relative is not None
    scores = recipe.relative(attention, query, key, distance)
    own = {name: weight.double().numpy() for name, weight in attention.relative.named_parameters()}
    for head, q, k in ((0, 0, 0), (1, 5, 39), (2, 3, 20), (3, 0, 34), (2, 4, 39)):
        pair = query[1, head, q].numpy(), key[1, head, k].numpy()
        apart = int(distance[q, k])
        if row.name == "shaw":
            expected = oracles.shaw(pair[0], own["relative_keys.weight"], apart)
        else:
            w = own["r_net.weight"].reshape(HEADS, HEAD_DIM, WIDTH)[head]
            expected = oracles.transformer_xl(*pair, own["r_w_bias"][head], own["r_r_bias"][head], w, apart)
        assert float(scores[1, head, q, k]) == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("window", [None, 12], ids=["", "window"])
@pytest.mark.parametrize(("new", "past"), [(45, 0), (15, 25), (1, 60)], ids=["prefill", "chunk", "decode"])
@every_method
def test_fused_equals_the_reference(
    row: Row, new: int, past: int, window: int | None, temperature: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("patches.attention.blocks.QUERY_BLOCK", 7)
    method = parse({"method": row.name, "attention_temperature": temperature})
    resolved = resolve(method, geometry_for(row.name), past + new)
    assert not resolved.is_plain
    own = CAUSAL if window is None else DistanceRange(0, window)
    layer = Layer(SCALING, own, attention=Attention(row.name))
    tensors = states(new, past + new, groups=2)
    expected = reference.attend(*tensors, resolved, layer, q_start=past)
    assert relative(fused.attend(*tensors, resolved, Batch([]), layer, q_start=past), expected) < 1e-5
    without = replace(resolved, recipe=replace(resolved.recipe, relative=None))
    assert relative(reference.attend(*tensors, without, layer, q_start=past), expected) > 0.1


@every_method
def test_half_precision_stays_in_its_dtype(row: Row) -> None:
    resolved = resolve(parse({"method": row.name}), geometry_for(row.name), 40)
    layer, tensors = Layer(SCALING, attention=Attention(row.name)), states(40, 40, dtype=torch.bfloat16)
    result = fused.attend(*tensors, resolved, Batch([]), layer, q_start=0)
    assert result.dtype == torch.bfloat16
    assert relative(result.float(), reference.attend(*tensors, resolved, layer, q_start=0)) < 8e-2


@every_request
def test_requests_parse_echo_print_and_pickle(fields: Fields) -> None:
    geometry, method = geometry_for(fields["method"]), parse(fields)
    assert type(method) is METHODS[fields["method"]]
    echo = json.loads(json.dumps(describe(method, geometry, TRAINED), allow_nan=False))
    assert echo["method"] == echo["requested"] == fields["method"]
    assert (echo["rotates_at"], echo["bands"]) == ("never", 1)
    resolved = resolve(method, geometry, TRAINED)
    assert resolved == pickle.loads(pickle.dumps(resolved)) == eval(repr(resolved), namespace())
    assert resolved == resolve(method, geometry, 4 * TRAINED)


@every_method
def test_default_is_the_native_encoding(row: Row) -> None:
    geometry = geometry_for(row.name)
    default = parse({"method": "default"})
    assert resolve(default, geometry, 9) == resolve(parse({"method": row.name}), geometry, 9)
    assert describe(default, geometry, 9)["method"] == row.name


@every_method
def test_models_without_the_weights_refuse_it(row: Row) -> None:
    others = [geometry_for(other.name) for other in RELATIVE_ROWS if other is not row]
    rotary = RopeGeometry(HEAD_DIM, HEAD_DIM, 1e4, TRAINED, TRAINED, HEADS)
    for geometry in [PLAIN, rotary, *others]:
        native = "default" if geometry.native is None else geometry.native.method
        with pytest.raises(ValueError, match=f"^method: {row.name} reads weights.* {native}$"):
            parse({"method": row.name}).recipe(geometry)


@every_method
def test_unknown_keys_and_bad_numbers_name_their_field(row: Row) -> None:
    for field, value in (("clip", 16), ("attention_temperature", math.nan)):
        with pytest.raises(InvalidEncoding, match=field):
            parse({"method": row.name, field: value})
