"""The encoding of an answer, sent back as a request."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest

from patches import METHODS, EchoMismatch, InvalidEncoding, Method, RopeGeometry, describe, label_of, parse, resolve
from patches.encoding.echo import FOLLOWS
from patches.resolution import confirmed
from tests.methods import OTHER_ROWS, RELATIVE_ROWS, REQUESTS, ROWS, Fields, Row, request_id

TRAINED = 256
GEOMETRY = RopeGeometry(64, 64, 10_000.0, TRAINED, 4 * TRAINED, num_attention_heads=4)
LENGTHS = [100, TRAINED, 1000]
LAYERS = {"slots": 3, "never": 1}


def echo_of(encoding: Any, geometry: RopeGeometry = GEOMETRY, length: int = 1000) -> Fields:
    """The ``pe`` of an answer as a client reads it."""
    described = describe(parse(encoding), geometry, length, LAYERS)
    echo: Fields = json.loads(json.dumps(described, allow_nan=False))
    return echo


def same_again(encoding: Any, geometry: RopeGeometry, length: int) -> None:
    """The answer's encoding is the one asked for, to the last number, and is answered in the same way."""
    echo = echo_of(encoding, geometry, length)
    assert echo_of(echo, geometry, length) == {**echo, "requested": echo["method"]}
    without_layers = parse({name: value for name, value in echo.items() if name != "layers"})
    assert resolve(without_layers, geometry, length) == resolve(parse(encoding), geometry, length)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_method(row: Row) -> None:
    for fields, length in itertools.product(row.requests, LENGTHS):
        same_again(fields, GEOMETRY, length)


@pytest.mark.parametrize("row", [row for row in ROWS if row.name != "default"], ids=lambda row: row.name)
def test_default_on_a_model_that_ships_an_encoding(row: Row) -> None:
    for fields, length in itertools.product(row.requests, LENGTHS):
        check_default(row, parse(fields), length)


def check_default(row: Row, native: Method, length: int) -> None:
    scaled = replace(GEOMETRY, native=native, family="rotary" if row.rotates else native.family)
    for encoding in (
        {"method": "default"},
        {"method": "default", "attention_temperature": "log_n"},
        {"method": "default", "rope_theta": 5e5},
    ):
        try:
            resolve(parse(encoding), scaled, length)
        except ValueError:
            continue  # does not apply to this model, whatever it is called
        same_again(encoding, scaled, length)
    if row.rotates and resolve(native, scaled, length).rotates_at == "cache_write" and row.bands == 1:
        same_again({"method": "self_extend"}, scaled, length)
        same_again({"method": "self_extend", "base": "default"}, scaled, length)


@pytest.mark.parametrize("native", ["yarn:4", "resonance", "resonance:base=yarn:4", "clipped_rope"])
def test_a_position_map_over_what_a_model_ships(native: str) -> None:
    scaled = replace(GEOMETRY, native=parse(native))
    same_again({"method": "self_extend"}, scaled, 1000)
    echo = echo_of({"method": "self_extend"}, scaled)
    assert resolve(parse(echo["base"]), scaled, 1000) == resolve(parse(native), GEOMETRY, 1000)


@pytest.mark.parametrize("row", [*OTHER_ROWS, *RELATIVE_ROWS], ids=lambda row: row.name)
def test_methods_of_other_families(row: Any) -> None:
    native = parse({"method": row.name}) if row.family == "relative" else None
    geometry = replace(GEOMETRY, family=row.family, native=native, table_rows=TRAINED)
    for fields in row.requests:
        same_again(fields, geometry, TRAINED)


TEMPERED_ON_COS_AND_SIN = {"kind": "constant", "multiplier": 1.44, "rotated_only": True}


@pytest.mark.parametrize(
    "fields",
    [
        {"method": "yarn", "factor": 4},
        {"method": "yarn", "factor": 4, "attention_factor": 1.3},
        {"method": "mrrope_pro", "factor": 4},
        {"method": "longrope", "short_factor": [1.0] * 32, "long_factor": [2.0] * 32},
        {"method": "custom", "inv_freq": [0.5] * 32, "attention_factor": 1.3},
        {"method": "linear", "factor": 4},
    ],
    ids=request_id,
)
def test_a_temperature_on_cos_and_sin_is_not_applied_twice(fields: Fields) -> None:
    tempered = {**fields, "attention_temperature": TEMPERED_ON_COS_AND_SIN}
    plain = resolve(parse(fields), GEOMETRY, 1000).attention_factor
    echo = echo_of(tempered)
    assert echo["attention_factor"] == pytest.approx(1.2 * plain)
    same_again(tempered, GEOMETRY, 1000)


def test_a_ratio_below_one_is_answered_as_one() -> None:
    short = replace(GEOMETRY, max_position_embeddings=TRAINED)
    lists = {"short_factor": [1.0] * 32, "long_factor": [2.0] * 32}
    same_again({"method": "longrope", **lists, "original_max_position_embeddings": 2 * TRAINED}, short, 1000)


def test_one_name_alone_is_both_a_parameter_and_a_number_that_follows() -> None:
    both = {name for method in METHODS.values() for name in method.model_fields if name in FOLLOWS}
    assert both == {"attention_factor"}
    assert echo_of("yarn:factor=4,attention_factor=1.3")["chosen_attention_factor"] == 1.3
    assert echo_of("yarn:4")["chosen_attention_factor"] is None
    assert "chosen_attention_factor" not in echo_of("linear:4")


CHANGED: Fields = {
    "requested": "ntk",
    "attention_factor": 1.5,
    "effective_rope_theta": 5e5,
    "rotates_at": "cache_read",
    "bands": 2,
    "reserved_length": 1000,
    "frequency_hash": "0123456789ab",
    "layers": {"slots": 4},
}


@pytest.mark.parametrize("name", FOLLOWS)
def test_what_does_not_follow_is_refused_by_name(name: str) -> None:
    echo = echo_of("linear:4")
    for value in (CHANGED[name], None, True, [], {}, "1", -1, 1e300):
        if value == echo[name] and type(value) is type(echo[name]):
            continue
        with pytest.raises(EchoMismatch, match=rf"^{name}: .* was sent and .* is true here") as caught:
            describe(parse({**echo, name: value}), GEOMETRY, 1000, LAYERS)
        assert caught.value.name == name, value


@pytest.mark.parametrize(
    ("changed", "name"),
    [({"factor": 8.0}, "frequency_hash"), ({"method": "ntk"}, "requested"), ({"rope_theta": 5e5}, "effective_rope")],
)
def test_a_parameter_that_was_edited_contradicts_what_follows(changed: Fields, name: str) -> None:
    with pytest.raises(EchoMismatch, match=f"^{name}"):
        resolve(parse({k: v for k, v in (echo_of("linear:4") | changed).items() if k != "layers"}), GEOMETRY, 1000)


def test_another_model_is_noticed() -> None:
    echo = {name: value for name, value in echo_of("self_extend").items() if name != "layers"}
    same = replace(GEOMETRY, original_max_position_embeddings=2 * TRAINED, rope_theta=5e5)
    assert resolve(parse(echo), same, 1000) == resolve(parse("self_extend"), GEOMETRY, 1000), "every number is in it"
    narrower = replace(GEOMETRY, head_dim=32, rotary_dim=32)
    with pytest.raises(EchoMismatch, match=r"^frequency_hash"):
        resolve(parse(echo), narrower, 1000)


def test_default_is_held_to_be_the_models_own() -> None:
    scaled = replace(GEOMETRY, native=parse("yarn:4"))
    echo = {name: value for name, value in echo_of("default", scaled).items() if name != "layers"}
    assert (echo["method"], echo["requested"]) == ("yarn", "default")
    with pytest.raises(EchoMismatch, match=r"^requested: 'default' was sent and 'yarn' is true here"):
        resolve(parse(echo), GEOMETRY, 1000)
    changed = {"method": "yarn", "factor": 8.0, "requested": "default"}
    for geometry in (scaled, replace(GEOMETRY, native=parse("yarn:2")), GEOMETRY):
        with pytest.raises(EchoMismatch, match=r"^requested: 'default' was sent and 'yarn' is true here"):
            resolve(parse(changed), geometry, 1000)
    assert resolve(parse(changed | {"factor": 4.0}), scaled, 1000) == resolve(parse("default"), scaled, 1000)
    del echo["requested"]
    assert resolve(parse(echo), GEOMETRY, 1000) == resolve(parse("default"), scaled, 1000)


@pytest.mark.parametrize(
    "fields", [{"method": "dynamic"}, {"method": "alibi", "slope_factor": "dynamic"}], ids=request_id
)
def test_another_reserved_length_is_refused_where_it_changes_the_encoding(fields: Fields) -> None:
    echo = {name: value for name, value in echo_of(fields, length=50).items() if name != "layers"}
    assert echo["reserved_length"] == 50
    within = resolve(parse(echo), GEOMETRY, TRAINED)
    assert within == resolve(parse(fields), GEOMETRY, 50), "up to the trained length all lengths give the same"
    with pytest.raises(EchoMismatch, match=r"^reserved_length: 50 was sent and 1000 is true here, .* another encoding"):
        resolve(parse(echo), GEOMETRY, 1000)


def test_layers_need_a_model() -> None:
    with pytest.raises(EchoMismatch, match=r"^layers"):
        resolve(parse(echo_of("linear:4")), GEOMETRY, 1000)


@pytest.mark.parametrize("encoding", ["yarn:4", "yarn:factor=4,attention_factor=1.3", "linear:4"])
def test_what_is_stored_is_what_was_sent(encoding: str) -> None:
    echo = echo_of(encoding)
    echoed, plain = parse(echo), parse(encoding)
    assert json.loads(json.dumps(echoed.model_dump(mode="json", exclude_unset=True))) == echo
    assert echoed.without_follows().recipe(GEOMETRY) == plain.recipe(GEOMETRY)
    assert set(echoed.follows) == set(FOLLOWS)
    for kept in (plain, echoed.without_follows()):
        assert not kept.follows
        assert not set(FOLLOWS) & (set(kept.model_dump()) - {"attention_factor"})


@pytest.mark.parametrize("fields", REQUESTS, ids=request_id)
def test_what_is_sent_back_has_the_name_of_what_was_asked_for(fields: Fields) -> None:
    geometry = replace(GEOMETRY, max_position_embeddings=5 * TRAINED)  # a ratio that no request of the table has
    asked = parse(fields)
    again = confirmed(parse(echo_of(fields, geometry)), geometry, 1000, LAYERS)
    assert again.recipe(geometry) == asked.recipe(geometry)
    assert again.parameters(geometry) == asked.parameters(geometry)
    if asked.attention_temperature is None:  # which is spelled out as an object with all that its kind takes
        assert label_of(again) == label_of(asked)


def test_what_follows_stands_in_no_base() -> None:
    with pytest.raises(InvalidEncoding, match="chosen_attention_factor"):
        parse({"method": "linear", "factor": 2, "chosen_attention_factor": 1.0})
