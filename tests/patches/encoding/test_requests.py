"""Request fields in, method or a refusal that names the field out."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import pytest
from pydantic import BaseModel

from patches import (
    METHODS,
    InvalidEncoding,
    Problem,
    RopeGeometry,
    describe,
    describe_methods,
    parse,
    resolve,
    to_shorthand,
)
from patches.problems import FEW
from tests.methods import REQUESTS, ROWS, Fields, Row, request_id

TRAINED = 256
GEOMETRY = RopeGeometry(64, 64, 10_000.0, TRAINED, 4 * TRAINED, num_attention_heads=4)


def refusal(fields: Any) -> list[Problem]:
    """The problems of a refused request."""
    try:
        parse(fields)
    except InvalidEncoding as error:
        return error.problems
    pytest.fail(f"accepted: {fields}")


def fields_named(fields: Any) -> set[str]:
    """Every field name that the refusal points at."""
    return {part for problem in refusal(fields) for part in problem.field.split(".")}


def says(shown: Any, given: Any) -> bool:
    """True if a parsed or echoed value is the given one, with short forms written out and defaults filled in."""
    if isinstance(shown, BaseModel):
        shown = shown.model_dump()
    if isinstance(given, dict):
        return all(says(shown[name], value) for name, value in given.items())
    if isinstance(shown, dict):  # an attention temperature given as a word or a number
        return bool(shown["kind"] == given if isinstance(given, str) else shown["multiplier"] == given)
    if isinstance(shown, tuple | list):
        return len(shown) == len(given) and all(says(*pair) for pair in zip(shown, given, strict=True))
    return bool(shown == given)


# Accepted


@pytest.mark.parametrize("fields", REQUESTS, ids=request_id)
def test_requests_of_the_table_parse_and_echo(fields: Fields) -> None:
    method = parse(fields)
    assert type(method) is METHODS[fields["method"]]
    for name, value in fields.items():
        assert says(getattr(method, name), value)
    resolved = resolve(method, GEOMETRY, 1000)
    echo = describe(method, GEOMETRY, 1000)
    assert echo["method"] == echo["requested"] == fields["method"]
    assert echo["frequency_hash"] == resolved.frequency_hash
    assert echo["rotates_at"] == resolved.rotates_at
    assert echo["attention_factor"] == resolved.attention_factor
    assert echo["effective_rope_theta"] == (resolved.rope_theta or None)
    assert json.loads(json.dumps(echo, allow_nan=False))["method"] == fields["method"]


@pytest.mark.parametrize("fields", REQUESTS, ids=request_id)
def test_the_echoed_parameters_asked_for_again_give_the_same_encoding(fields: Fields) -> None:
    method = parse(fields)
    parameters = json.loads(json.dumps(method.parameters(GEOMETRY)))
    again = parse({"method": fields["method"], **parameters})
    assert again.recipe(GEOMETRY) == method.recipe(GEOMETRY)
    for name, value in fields.items():
        assert name == "method" or says(parameters[name], value)


def test_every_method_is_described_with_its_schema() -> None:
    described = {entry["method"]: entry for entry in describe_methods()}
    assert list(described) == list(METHODS)
    for name, entry in described.items():
        assert all(entry[part] for part in ("summary", "paper", "training_free", "cost"))
        assert set(entry["parameters"]["properties"]) == set(METHODS[name].model_fields)
        assert entry["parameters"]["additionalProperties"] is False
    json.dumps(describe_methods(), allow_nan=False)


# Refused


@pytest.mark.parametrize("name", ["rope", "YARN", "", "yarn ", None, 3, ["yarn"], {"yarn": 1}])
def test_unknown_methods(name: Any) -> None:
    (problem,) = refusal({"method": name, "factor": 2.0})
    assert problem.field == "method"
    assert problem.message.startswith("unknown method ")


@pytest.mark.parametrize(
    ("encoding", "says"),
    [
        ({"method": "yarm"}, "method: unknown method 'yarm': did you mean yarn?"),
        ("yarm:4", "unknown method 'yarm': did you mean yarn?"),
        ({"method": "yarn", "fctor": 4}, "fctor: unknown field: did you mean factor?"),
        ("yarn:fctor=4", "fctor: unknown field: did you mean factor?"),
        ({"method": "linear", "factor": "four"}, "factor: must be a number, not 'four'"),
        ({"method": "linear", "factor": 5000}, "factor: must be at most 4096, not 5000"),
        ({"method": "linear"}, "factor: required"),
        ({"method": "yarn", "truncate": 1}, "truncate: must be true or false, not 1"),
        ({"method": "dual_chunk", "formulation": "repo"}, "formulation: must be 'repository' or 'paper', not 'repo'"),
        ({"method": "dpe", "group_factors": []}, "group_factors: needs at least 1 entry"),
        ({"method": "dpe", "group_factors": 4}, "group_factors: must be a list, not 4"),
        ({"method": "sandwich", "dim": 33}, "dim: must be a multiple of 2, not 33"),
        ({"method": "self_extend", "base": "yarn:0"}, "base.factor: must be at least 1, not 0"),
        ({"method": "self_extend", "base": "yrn"}, "base: unknown method 'yrn': did you mean yarn?"),
        ("pi:4", "unknown method 'pi': did you mean linear?"),
        ("YaRN:4", "unknown method 'YaRN': did you mean yarn?"),
        ({"method": "Dynamic NTK"}, "method: unknown method 'Dynamic NTK': did you mean dynamic?"),
        ("yam:4", "unknown method 'yam': did you mean yarn or dynamic?"),
        ({"method": "yarn", "attention_temperature": "logn"}, "attention_temperature.kind: unknown kind 'logn': did"),
        (
            {"method": "yarn", "attention_temperature": {"kind": "log_n", "lenght": 4}},
            "attention_temperature.lenght: unknown field: did you mean length?",
        ),
        ({"method": "yarn", "factor": 2, "beta_fast": 0.5}, "beta_fast must be at least beta_slow"),
        ({}, "method: required: the name of a method"),
        (4, "an encoding is an object with method, or a text such as 'yarn:4'"),
    ],
    ids=str,
)
def test_a_refusal_is_one_sentence_with_the_field_and_what_is_allowed(encoding: Any, says: str) -> None:
    with pytest.raises(InvalidEncoding) as caught:
        parse(encoding)
    assert str(caught.value).startswith(says)
    assert "\n" not in str(caught.value)
    assert len(caught.value.problems) == 1


def test_a_label_as_the_name_of_a_method_is_answered_with_the_short_form() -> None:
    with pytest.raises(InvalidEncoding, match=r"unknown method 'yarn\(factor=4\)': write yarn:factor=4$"):
        parse({"method": "yarn(factor=4)"})
    with pytest.raises(InvalidEncoding, match=r"unknown method 'yarm\(factor=4\)': there are default"):
        parse({"method": "yarm(factor=4)"})


def test_names_are_listed_where_none_is_near() -> None:
    (problem,) = refusal({"method": "zzz"})
    few = ", ".join(list(METHODS)[:FEW])
    assert f"there are {few} and {len(METHODS) - FEW} others: see GET /methods" in problem.message
    (problem,) = refusal({"method": "self_extend", "base": {"method": "alibi"}})
    assert problem.field == "base.method"
    assert "alibi is no frequency schedule" in problem.message
    assert "yarn_paper" in problem.message
    (problem,) = refusal({"method": "linear", "zzz": 1})
    assert problem.message.startswith("unknown field: there are ")
    assert all(name in problem.message for name in METHODS["linear"].model_fields)


def test_many_unknown_fields_are_refused_at_the_first() -> None:
    many = {f"field{number}": number for number in range(100_000)}
    assert [problem.field for problem in refusal({"method": "yarn", **many})] == ["field0"]


def test_many_bad_entries_are_reported_in_part() -> None:
    problems = refusal({"method": "custom", "inv_freq": ["a"] * 50_000})
    assert [problem.field for problem in problems] == [f"inv_freq.{index}" for index in range(11)]


@pytest.mark.parametrize("body", [None, "rope", 4, [], {}, {"factor": 2.0}, [{"method": "yarn"}]])
def test_bodies_that_name_no_method(body: Any) -> None:
    refusal(body)


@pytest.mark.parametrize("fields", REQUESTS, ids=request_id)
def test_the_short_form_is_the_same_encoding(fields: Fields) -> None:
    assert parse(to_shorthand(fields)) == parse(json.dumps(fields)) == parse(fields)
    if "base" in fields:
        assert parse({**fields, "base": to_shorthand(fields["base"])}) == parse(fields)


def test_an_encoding_that_was_parsed_is_itself() -> None:
    method = parse("yarn:4")
    assert parse(method) is method  # type: ignore[arg-type]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_unknown_keys(row: Any) -> None:
    assert "factr" in fields_named({"method": row.name, **row.easy, "factr": 2.0})
    assert "rope_type" in fields_named({"method": row.name, **row.easy, "rope_type": row.name})


def numbers_of(row: Row) -> list[str]:
    """The fields of both requests that take a number."""
    given = {**row.hard, **row.easy}
    return [name for name, value in given.items() if isinstance(value, int | float) and not isinstance(value, bool)]


BAD_NUMBERS = [math.nan, math.inf, -math.inf, -1.0, 0.0, "four", "", [4.0], {"value": 4.0}, "nan", "inf", True]


@pytest.mark.parametrize("row", [row for row in ROWS if numbers_of(row)], ids=lambda row: row.name)
def test_bad_numbers_name_their_field(row: Row) -> None:
    given = {"method": row.name, **row.easy, **row.hard}
    for name, value in itertools.product(numbers_of(row), BAD_NUMBERS):
        if value == 0.0 and name in row.takes_zero:
            continue
        assert name in fields_named({**given, name: value}), (name, value)
    for name in numbers_of(row):
        assert name in fields_named({**given, name: str(given[name])}), "a number in a text is none"


@pytest.mark.parametrize(
    "row", [row for row in ROWS if "factor" in METHODS[row.name].model_fields], ids=lambda row: row.name
)
def test_factors_outside_their_range(row: Row) -> None:
    for value in (0.999, 0.5, 4097.0, "0.5"):
        assert "factor" in fields_named({"method": row.name, **row.easy, "factor": value}), value


FACTOR_REQUIRED = ["linear", "ntk", "ntk_by_parts", "yarn_paper", "ntk_fixed", "ntk_mixed", "mrrope_uni", "tailspline"]


@pytest.mark.parametrize("name", FACTOR_REQUIRED)
def test_a_missing_factor(name: str) -> None:
    assert "factor" in fields_named({"method": name})


@pytest.mark.parametrize("name", ["short_factor", "long_factor"])
def test_bad_lists(name: str) -> None:
    lists = {"short_factor": [1.0] * 32, "long_factor": [1.0] * 32}
    for value in ([], [0.0], [-1.0], [math.nan], [math.inf], "1.0", 1.0, [[1.0]], [None], [1.0] * 5000):
        assert name in fields_named({"method": "longrope", **lists, name: value}), value
    for pairs in (1, 31, 33, 64):
        with pytest.raises(ValueError, match=rf"^{name}: .*\b32\b"):
            resolve(parse({"method": "longrope", **lists, name: [1.0] * pairs}), GEOMETRY, 1000)


@pytest.mark.parametrize(
    "fields",
    [
        {"method": "llama3", "low_freq_factor": 4.0, "high_freq_factor": 1.0},
        {"method": "llama3", "low_freq_factor": 2.0, "high_freq_factor": 1.9999},
        {"method": "yarn", "factor": 2.0, "beta_fast": 1.0, "beta_slow": 32.0},
        {"method": "ntk_by_parts", "factor": 2.0, "gamma_0": 2.0, "gamma_1": 16.0},
        {"method": "ntk_by_parts", "factor": 2.0, "beta_0": 0.75, "beta_1": 1.25},
        {"method": "mrrope_pro", "factor": 2.0, "beta_fast": 1.0, "beta_slow": 32.0},
        {"method": "dynamic_yarn", "beta_fast": 0.9999},
        {"method": "yarn_paper", "factor": 2.0, "alpha": 32.0, "beta": 1.0},
    ],
    ids=request_id,
)
def test_ranges_the_wrong_way_round(fields: Fields) -> None:
    assert any(name in str(refusal(fields)) for name in fields if name not in ("method", "factor"))


def test_bad_lists_of_frequencies() -> None:
    for value in ([], [-1e-9], [6.3], [math.nan], [math.inf], "1.0", 1.0, [None], [0.5] * 5000):
        assert "inv_freq" in fields_named({"method": "custom", "inv_freq": value}), value
    for pairs in (1, 31, 33, 64):
        with pytest.raises(ValueError, match=rf"^inv_freq: .*\b32 rotary pairs.*\b{pairs}$"):
            resolve(parse({"method": "custom", "inv_freq": [0.5] * pairs}), GEOMETRY, 1000)


def test_a_list_of_frequencies_takes_no_base() -> None:
    assert "rope_theta" in fields_named({"method": "custom", "inv_freq": [0.5] * 32, "rope_theta": 10_000.0})


@pytest.mark.parametrize("name", ["resonance", "clipped_rope"])
def test_wrappers_stand_on_frequency_schedules_only(name: str) -> None:
    for base in ({"method": "alibi"}, {"method": name}, {"method": "none"}, "alibi", 4):
        assert "base" in fields_named({"method": name, "base": base})
    assert "factor" in fields_named({"method": name, "base": {"method": "yarn", "factor": 0.5}})
    pasted = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED}
    named = {"method": "yarn", "factor": 4.0}
    assert resolve(parse({"method": name, "base": pasted}), GEOMETRY, 1000).inv_freq == (
        resolve(parse({"method": name, "base": named}), GEOMETRY, 1000).inv_freq
    )
