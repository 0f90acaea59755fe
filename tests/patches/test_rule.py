"""The rule of ``auto`` without a calibration."""

from __future__ import annotations

from dataclasses import replace

import pytest

from patches import Method, RopeGeometry, parse, ranges_by_rule, resolve

PLAIN = RopeGeometry(
    head_dim=16,
    rotary_dim=16,
    rope_theta=10_000.0,
    original_max_position_embeddings=64,
    max_position_embeddings=64,
    num_attention_heads=4,
)


def method_at(geometry: RopeGeometry, length: int) -> Method:
    return next(method for up_to, method in ranges_by_rule(geometry) if up_to is None or length <= up_to)


def test_a_plain_model_is_itself_and_then_scaled() -> None:
    assert [up_to for up_to, _ in ranges_by_rule(PLAIN)] == [64, None]
    for length in (1, 64):
        assert method_at(PLAIN, length) == parse("default")
    assert resolve(method_at(PLAIN, 65), PLAIN, 256).inv_freq == resolve(parse("yarn:4"), PLAIN, 256).inv_freq


@pytest.mark.parametrize(
    ("native", "declared", "reach"),
    [("yarn:4", 64, 256), ("yarn:4", 512, 512), ("llama3", 256, 256), ("dynamic:2", 64, 128)],
)
def test_a_shipped_scaling_serves_the_length_that_it_declares(native: str, declared: int, reach: int) -> None:
    if native == "llama3":
        native = "llama3:factor=4,low_freq_factor=1,high_freq_factor=4"
    geometry = replace(PLAIN, native=parse(native), max_position_embeddings=declared)
    assert [up_to for up_to, _ in ranges_by_rule(geometry)] == [64, reach, None]
    assert method_at(geometry, reach) == parse("default")
    assert method_at(geometry, reach + 1).method == "dynamic_yarn"


def test_a_model_whose_rotating_layers_are_local_keeps_its_own_encoding() -> None:
    """Dynamic YaRN cost 2 to 5 % of perplexity there, since no distance exceeds a window."""
    for within, ends in ((64, [None]), (65, [64, None]), (None, [64, None])):
        assert [up_to for up_to, _ in ranges_by_rule(replace(PLAIN, window=within))] == ends


@pytest.mark.parametrize("family", ["bias", "learned", "sinusoidal", "none"])
def test_a_model_without_rotation_keeps_its_own_encoding(family: str) -> None:
    geometry = replace(PLAIN, family=family, native=parse("alibi"))
    assert ranges_by_rule(geometry) == [(None, parse("default"))]
    assert ranges_by_rule(replace(geometry, table_rows=48)) == [(48, parse("default"))]
