"""The short form of an encoding, and its agreement with the JSON form."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patches import METHODS, InvalidEncoding, label_of, parse
from patches.shorthand import from_shorthand, from_text, to_shorthand
from tests.methods import REQUESTS, request_id


def shorthand(fields: dict[str, Any]) -> str:
    """The short form with every key written out."""
    rest = ",".join(f"{key}={json.dumps(value)}" for key, value in fields.items() if key != "method")
    return f"{fields['method']}:{rest}" if rest else fields["method"]


@pytest.mark.parametrize("request_fields", REQUESTS, ids=request_id)
def test_says_the_same_as_the_json_object(request_fields: dict[str, Any]) -> None:
    assert from_shorthand(shorthand(request_fields)) == request_fields
    assert from_text(json.dumps(request_fields)) == request_fields
    assert from_text(shorthand(request_fields)) == request_fields
    assert from_shorthand(to_shorthand(request_fields)) == request_fields


TEMPERED = {"kind": "yarn", "factor": 2}


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("default", {}),
        ("yarn:4", {"factor": 4}),
        (" yarn: 4 ", {"factor": 4}),
        ("yarn : 4", {"factor": 4}),
        ("yarn:4,beta_fast=16", {"factor": 4, "beta_fast": 16}),
        ("yarn:beta_fast=16,4.5", {"beta_fast": 16, "factor": 4.5}),
        (r'default:rope_theta="a\",b",factor=2', {"rope_theta": 'a",b', "factor": 2}),
        (r'default:rope_theta="\\",factor=2', {"rope_theta": "\\", "factor": 2}),
        ("yarn:factor=4,truncate=false", {"factor": 4, "truncate": False}),
        ("yarn:factor=4,attention_factor=null", {"factor": 4, "attention_factor": None}),
        ("dynamic:2", {"factor": 2}),
        ("self_extend:16", {"group_size": 16}),
        ("alibi:16,use_variant=false", {"alibi_bias_max": 16, "use_variant": False}),
        ("none:1.5", {"attention_temperature": 1.5}),
        ("longrope:[1,2],long_factor=[2,4]", {"short_factor": [1, 2], "long_factor": [2, 4]}),
        ("learned:log_n", {"attention_temperature": "log_n"}),
        ("yarn:4,attention_temperature=log_n", {"factor": 4, "attention_temperature": "log_n"}),
        ('yarn:4,attention_temperature={"kind":"yarn","factor":2}', {"factor": 4, "attention_temperature": TEMPERED}),
        ("self_extend:base=yarn", {"base": {"method": "yarn"}}),
        ("self_extend:4,base=yarn:4", {"group_size": 4, "base": {"method": "yarn", "factor": 4}}),
        ("self_extend:base=yarn:4,group_size=4", {"base": {"method": "yarn", "factor": 4}, "group_size": 4}),
        ('self_extend:base="yarn"', {"base": {"method": "yarn"}}),
        ("self_extend:base=(yarn:factor=4,beta_fast=16)", {"base": {"method": "yarn", "factor": 4, "beta_fast": 16}}),
        ("resonance:base=(custom:[1,0.5])", {"base": {"method": "custom", "inv_freq": [1, 0.5]}}),
        ("resonance:base=null", {"base": None}),
        ("t5_bias:relative_attention_bias=[[1,2],[3,4]]", {"relative_attention_bias": [[1, 2], [3, 4]]}),
        ("linear:four", {"factor": "four"}),
        ("linear:(4)", {"factor": "(4)"}),
        ("linear:NaN", {"factor": "NaN"}),
        ("linear:-Infinity", {"factor": "-Infinity"}),
        ("linear:nonsense=1", {"nonsense": 1}),
    ],
)
def test_reads(text: str, fields: dict[str, Any]) -> None:
    assert from_text(text) == {"method": text.partition(":")[0].strip(), **fields}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "unknown method ''"),
        ("zzz:4", "unknown method 'zzz': there are default, linear, .* and \\d+ others: see GET /methods or "),
        ("yrn(factor=4)", "unknown method 'yrn': did you mean yarn\\?"),
        ("yarn()", "yarn: '' is not key=value"),
        ("yrn:4", "unknown method 'yrn': did you mean yarn\\?"),
        ("YARN:4", "unknown method 'YARN'"),
        ("default:4", "default takes no bare value"),
        ("yarn:", "yarn: '' is not key=value"),
        ("yarn:factor=", "yarn: 'factor=' is not key=value"),
        ("yarn:=4", "yarn: '=4' is not key=value"),
        ("yarn:4,", "yarn: '' is not key=value"),
        ("yarn:4,factor=4", "yarn: 'factor' is given twice"),
        ("yarn:4,8", "yarn: '8' is another factor: commas separate the parameters of one encoding"),
        ("yarn:factor=4,linear:8", "yarn: 'linear:8' is another factor: .* give several .* by repeating --pe$"),
        ("default,yarn:4", "'default,yarn:4' names several: commas separate the parameters of one encoding"),
        ("auto,yarn:4", "'auto,yarn:4' names several: commas"),
        ("zzz,zz:4", "unknown method 'zzz,zz'"),
        ("yarn:method=linear", "yarn: 'method' is given twice"),
        ("self_extend:base=(yarn:4", "base: '\\(yarn:4' opens a parenthesis that it does not close"),
        ("self_extend:base=", "self_extend: 'base=' is not key=value"),
        ("self_extend:base=yrn:4", "unknown method 'yrn'"),
        ("self_extend:base=()", "unknown method ''"),
        ("self_extend:base=(yarn:4,beta_fast=16", "base: '\\(yarn:4,beta_fast=16' opens a parenthesis"),
        ("self_extend:base=(yarn:4,4)", "yarn: '4' is another factor"),
        ("resonance:base=" * 9 + "yarn", "base: encodings are nested more than 4 deep"),
        (f'{{"method": "yarn", "factor": 1{"0" * 4300}}}', "not valid JSON: a number has more than 4300 digits$"),
        ('{"method": "yarn"', "not valid JSON: .* at character 18"),
    ],
)
def test_refuses(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_text(text)


@pytest.mark.parametrize(
    "text",
    [
        *("linear:NaN", "linear:Infinity", "linear:four", "linear:0.5", "linear:4,beta=1"),
        *("self_extend:base=alibi", "self_extend:base=yarn:4,beta_fast=16"),
    ],
)
def test_validation_refuses_what_the_grammar_lets_through(text: str) -> None:
    with pytest.raises(InvalidEncoding):
        parse(from_text(text))


def test_an_endless_number_is_refused_by_its_field() -> None:
    with pytest.raises(InvalidEncoding, match=r"factor: must be .*, not a number of more than 4300 digits"):
        parse({"method": "yarn", "factor": 10**5000})


@pytest.mark.parametrize(
    ("asked", "label"),
    [
        ("yarn:4.0", "yarn(factor=4)"),
        ("yarn:4.25,truncate=false", "yarn(truncate=false, factor=4.25)"),
        ("self_extend:neighbor_window=1000001", "self_extend(neighbor_window=1000001)"),
        ("none:1.5", "none(attention_temperature=1.5)"),
        ("none:log_n", "none(attention_temperature=log_n)"),
        ("self_extend:4,base=yarn:4.0", "self_extend(base=yarn:4, group_size=4)"),
        (
            "self_extend:4,base=(yarn:4,attention_temperature=1.5)",
            "self_extend(base=(yarn:attention_temperature=1.5,factor=4), group_size=4)",
        ),
        (
            'rerope:attention_temperature={"kind":"yarn","factor":2.0}',
            'rerope(attention_temperature={"kind": "yarn", "factor": 2})',
        ),
    ],
)
def test_a_label_is_a_short_form(asked: str, label: str) -> None:
    method = parse(asked)
    assert label_of(method) == label
    assert parse(label) == method


@pytest.mark.parametrize("request_fields", REQUESTS, ids=request_id)
def test_a_label_gives_back_its_encoding(request_fields: dict[str, Any]) -> None:
    method = parse(request_fields)
    left_out = {name for name, value in method.model_dump().items() if isinstance(value, tuple)}
    assert parse({**from_text(label_of(method)), **{name: getattr(method, name) for name in left_out}}) == method


def test_labels_of_different_lists_differ() -> None:
    first, second = ({"method": "custom", "inv_freq": [1.0, number]} for number in (0.5, 0.25))
    pairs = (first, second), ({"method": "self_extend", "base": first}, {"method": "self_extend", "base": second})
    for one, other in pairs:
        assert label_of(parse(one)) != label_of(parse(other))
        assert label_of(parse(one)) == label_of(parse(dict(one)))
        assert len(label_of(parse(one))) < 50


def test_an_unknown_name_is_repeated_in_part_only() -> None:
    with pytest.raises(ValueError, match="unknown method") as raised:
        from_shorthand("x" * 10_000)
    assert len(str(raised.value)) < 700


@pytest.mark.parametrize(
    "hostile", [",", "[", "[,", "],", "1,", "a=[1,2],", '"', '\\"', '"\\', "((", "base=(", "self_extend:base=("]
)
def test_long_text_takes_no_long_time(hostile: str) -> None:
    began = time.perf_counter()
    for text in (f"yarn:{hostile * 100_000}", f"resonance:base=({hostile * 100_000}", '{"a":' * 100_000):
        with contextlib.suppress(ValueError):
            from_text(text)
    assert time.perf_counter() - began < 5  # quadratic would be minutes


@given(st.one_of(st.text(), st.builds("{}:{}".format, st.sampled_from(sorted(METHODS)), st.text())))
def test_any_text_gives_fields_or_a_value_error(text: str) -> None:
    try:
        fields = from_shorthand(text)
    except ValueError:
        return
    assert fields["method"] in METHODS
    json.dumps(fields, allow_nan=False)
