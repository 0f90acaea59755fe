"""Factors per pair: those of methods, and encodings that have given ones."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from patches import by_factors, factors_of, parse, resolve, starts
from tests.patches.test_rule import PLAIN

TIMES, LENGTH = 4.0, 256
PAIRS = PLAIN.rotary_dim // 2


def test_a_search_starts_from_three_methods() -> None:
    linear, ntk, yarn = (factors_of(method, PLAIN, LENGTH) for method in starts(TIMES))
    assert linear == pytest.approx([TIMES] * PAIRS)
    assert ntk == pytest.approx([TIMES ** (pair / (PAIRS - 1)) for pair in range(PAIRS)], rel=1e-4)
    assert yarn is not None
    assert yarn == sorted(yarn)
    assert (yarn[0], yarn[-1]) == (pytest.approx(1.0), pytest.approx(TIMES))


def test_an_encoding_has_the_factors_it_was_made_of() -> None:
    factors = [1.0, 1.01, 1.5, 2.0, 3.0, 3.99, 4.0, 5.0]
    method = by_factors(factors, PLAIN, TIMES)
    assert factors_of(method, PLAIN, LENGTH) == pytest.approx(factors)
    assert factors_of(method, PLAIN, 64) == pytest.approx([1.0] * PAIRS), "up to the trained length"
    expected = math.sqrt(1 + math.log(TIMES) / math.log(64))
    assert resolve(method, PLAIN, LENGTH).attention_factor == pytest.approx(expected)
    method = by_factors(factors, PLAIN, TIMES, attention_factor=1.0)
    assert resolve(method, PLAIN, LENGTH).attention_factor == 1
    assert factors_of(method, PLAIN, LENGTH) == pytest.approx(factors)


def test_pairs_that_carry_no_position_have_no_factor() -> None:
    geometry = replace(PLAIN, native=parse("proportional:partial_rotary_factor=0.5"))
    assert geometry.rotating_pairs == PAIRS // 2
    factors = [1.0, 2.0, 3.0, 4.0]
    method = by_factors(factors, geometry, TIMES)
    assert factors_of(method, geometry, LENGTH) == pytest.approx(factors)
    assert resolve(method, geometry, LENGTH).inv_freq[PAIRS // 2 :] == (0.0,) * (PAIRS // 2)


def test_other_encodings_have_none() -> None:
    for name in ("self_extend", "streaming", "alibi", "none"):
        assert factors_of(parse(name), PLAIN, LENGTH) is None
    with pytest.raises(ValueError, match="rotate"):
        factors_of(parse("yarn:4"), replace(PLAIN, family="none"), LENGTH)
