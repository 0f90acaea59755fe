"""transformers' ``rope_parameters``: pasted into a request, and read from a checkpoint, they mean the same."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from patches import InvalidEncoding, NoRopeParameters, RopeGeometry, geometry_of, parse, resolve, rope_parameters
from patches.encoding.bands import Band
from patches.encoding.biases import LinearBias
from patches.encoding.masks import DistanceRange
from patches.encoding.positions import Grouped
from patches.encoding.temperature import ConstantTemperature
from patches.rope_parameters import grouping, in_configuration
from tests import oracles
from tests.methods import Fields, rows
from tests.models import ROPE_THETA, TRAINED_LENGTH, tiny_config, tiny_model

LONGEST = 4 * TRAINED_LENGTH
GEOMETRY = RopeGeometry(16, 16, ROPE_THETA, TRAINED_LENGTH, LONGEST, num_attention_heads=4)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED_LENGTH}

ROPE_PARAMETERS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 5e5},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "linear, as written before rope_type": {"type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {**YARN, "rope_theta": 1e6},
    "yarn of gpt-oss": {**YARN, "factor": 32.0, "rope_theta": 150_000.0, "beta_fast": 32.0, "truncate": False},
    "yarn of DeepSeek": {**YARN, "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.707},
    "yarn of Kimi K2": {
        **YARN,
        "type": "yarn",
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "yarn of one number of turns, not truncated": {**YARN, "beta_fast": 1.0, "beta_slow": 1.0, "truncate": False},
    "yarn whose range ends past the last dimension": {**YARN, "rope_theta": 50.0, "beta_slow": 1e-3},
    "yarn with an attention factor": {**YARN, "attention_factor": 1.25},
    "yarn of Qwen3-VL": {**YARN, "rope_theta": 5e6, "mrope_section": [3, 3, 2], "mrope_interleaved": True},
    "yarn of Ministral 3": {**YARN, "llama_4_scaling_beta": 0.1, "max_position_embeddings": LONGEST},
    "yarn, one mscale": {**YARN, "mscale": 0.5},
    "yarn, factor from the lengths": {**YARN, "factor": None},
    "yarn, nulls for what is left to the default": {**YARN, "beta_fast": None, "beta_slow": None},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": TRAINED_LENGTH,
    },
    "llama3 of Llama 4 Scout": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 1.0,
        "original_max_position_embeddings": TRAINED_LENGTH,
    },
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.01 * i for i in range(8)],
        "long_factor": [1.0 + 0.5 * i for i in range(8)],
        "original_max_position_embeddings": TRAINED_LENGTH,
        "partial_rotary_factor": 1.0,
    },
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "factor": 2.0, "rope_theta": 1e6},
    "longrope with a factor": {
        "rope_type": "longrope",
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "factor": 32.0,
        "original_max_position_embeddings": TRAINED_LENGTH,
    },
}
DYNAMIC_WITH_A_LENGTH = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": TRAINED_LENGTH}

LENGTHS = (10, TRAINED_LENGTH, TRAINED_LENGTH + 1, LONGEST + 44)


def transformers_answer(config: PreTrainedConfig, length: int) -> tuple[list[float], float]:
    """Frequencies and factor on cos and sin for one sequence of ``length`` tokens."""
    parameters: dict[str, Any] = config.rope_parameters
    if parameters["rope_type"] == "default":
        return oracles.default(parameters["rope_theta"], 16), 1.0
    inv_freq, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, None, seq_len=length)
    return inv_freq.tolist(), factor


@pytest.mark.parametrize("name", ROPE_PARAMETERS)
def test_an_object_pastes_unchanged(name: str) -> None:
    config = tiny_config("llama", ROPE_PARAMETERS[name], max_position_embeddings=LONGEST)
    pasted = copy.deepcopy(config.rope_parameters)
    # transformers scales "dynamic" from max_position_embeddings, which a pasted object cannot carry.
    trained = LONGEST if pasted["rope_type"] == "dynamic" else TRAINED_LENGTH
    for length in LENGTHS:
        resolved = resolve(parse(pasted), replace(GEOMETRY, original_max_position_embeddings=trained), length)
        inv_freq, factor = transformers_answer(config, length)
        assert resolved.inv_freq == pytest.approx(inv_freq, rel=3e-7, abs=0), length
        assert resolved.attention_factor == pytest.approx(factor, rel=1e-9), length
    assert pasted == config.rope_parameters, "the object itself is left alone"


@pytest.mark.parametrize(
    "pasted",
    [
        {"type": "mrope", "mrope_section": [2, 3, 3]},
        {"rope_type": "mrope", "mrope_section": [2, 3, 3]},
        {"rope_type": "default", "type": "mrope", "mrope_section": [2, 3, 3]},
        {"rope_type": "mrope", "type": "mrope", "mrope_section": [2, 3, 3], "mrope_interleaved": True},
    ],
    ids=str,
)
def test_positions_of_images_are_no_part_of_the_encoding(pasted: Fields) -> None:
    """Qwen2-VL's files say so, and transformers makes the third form of them."""
    assert parse(pasted) == parse({"method": "default"})
    assert parse({**pasted, "rope_theta": 1e6}) == parse({"method": "default", "rope_theta": 1e6})
    with pytest.raises(InvalidEncoding, match="mrope_section"):
        parse({"method": "default", "mrope_section": [2, 3, 3]})


@pytest.mark.parametrize("name", [*ROPE_PARAMETERS, "dynamic with a length that transformers ignores"])
def test_default_is_the_checkpoints_own_scaling(name: str) -> None:
    rope_parameters = ROPE_PARAMETERS.get(name, DYNAMIC_WITH_A_LENGTH)
    config, model = tiny_model("llama", rope_parameters, max_position_embeddings=LONGEST)
    geometry = geometry_of(model)
    for length in LENGTHS:
        resolved = resolve(parse({"method": "default"}), geometry, length)
        inv_freq, factor = transformers_answer(config, length)
        assert resolved.inv_freq == pytest.approx(inv_freq, rel=3e-7, abs=0), length
        assert resolved.attention_factor == pytest.approx(factor, rel=1e-9), length


NATIVE: dict[str, Fields] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED_LENGTH},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": TRAINED_LENGTH,
    },
}


@pytest.mark.parametrize("native", NATIVE)
@pytest.mark.parametrize("name", ["yarn", "linear", "ntk"])
def test_a_factor_is_relative_to_the_length_before_any_scaling(native: str, name: str) -> None:
    """A checkpoint that ships four times its trained length: a request's schedule replaces that, on the same length."""
    shipped = geometry_of(tiny_model("llama", NATIVE[native], max_position_embeddings=4 * TRAINED_LENGTH)[1])
    plain = geometry_of(tiny_model("llama", max_position_embeddings=TRAINED_LENGTH)[1])
    request = parse({"method": name, "factor": 8.0})
    assert shipped.original_max_position_embeddings == plain.original_max_position_embeddings == TRAINED_LENGTH
    assert resolve(request, shipped, 100) == resolve(request, plain, 100)
    assert resolve(parse({"method": "default"}), shipped, 100) != resolve(parse({"method": "default"}), plain, 100)


def test_a_position_map_stands_on_the_checkpoints_own_schedule() -> None:
    shipped = geometry_of(tiny_model("llama", NATIVE["llama3"], max_position_embeddings=4 * TRAINED_LENGTH)[1])
    own, plain = parse({"method": "self_extend"}), parse({"method": "self_extend", "base": {"method": "default"}})
    native = resolve(parse({"method": "default"}), shipped, 100)
    assert resolve(own, shipped, 100).inv_freq == native.inv_freq
    assert resolve(plain, shipped, 100).inv_freq == native.inv_freq, "default means the checkpoint's own here too"
    unscaled = {"method": "default", "rope_theta": ROPE_THETA}
    assert resolve(parse({"method": "self_extend", "base": unscaled}), shipped, 100).inv_freq != native.inv_freq


@pytest.mark.parametrize(("family", "rotary_dim"), [("gpt_neox", 4), ("stablelm", 8)])
def test_a_partial_rotary_object_fits_its_own_model_only(family: str, rotary_dim: int) -> None:
    config, model = tiny_model(family, {"rope_type": "linear", "factor": 2.0})
    geometry = geometry_of(model)
    assert geometry.rotary_dim == rotary_dim
    method = parse(config.rope_parameters)
    assert resolve(method, geometry, 10).inv_freq == pytest.approx(oracles.linear(ROPE_THETA, rotary_dim, 2.0))
    with pytest.raises(ValueError, match="partial_rotary_factor"):
        resolve(method, GEOMETRY, 10)


def test_a_type_we_do_not_have() -> None:
    with pytest.raises(InvalidEncoding, match="axial"):
        parse({"rope_type": "axial", "factor": 2.0})


# Encodings as ``rope_parameters``


@pytest.mark.parametrize("multiplier", [None, 1.44])
def test_every_way_to_write_an_encoding_is_that_encoding_in_transformers(multiplier: float | None) -> None:
    """A temperature of whole scores is a factor on cos and sin. A type that takes no factor cannot have one."""
    checked, length = set(), 2 * TRAINED_LENGTH
    for fields in (fields for row in rows(8, TRAINED_LENGTH) if row.rotates for fields in row.requests):
        asked = fields if multiplier is None else {**fields, "attention_temperature": multiplier}
        resolved = resolve(parse(asked), GEOMETRY, length)
        try:
            forms = rope_parameters(resolved, GEOMETRY, length)
        except NoRopeParameters:
            continue
        temperature = resolved.recipe.attention_temperature
        of_scores = temperature.multiplier if isinstance(temperature, ConstantTemperature) else 1.0
        for form in forms:
            # transformers scales "dynamic" from max_position_embeddings.
            longest = form["original_max_position_embeddings"] if form["rope_type"] == "dynamic" else LONGEST
            config = tiny_config("llama", form, max_position_embeddings=longest)
            inv_freq, factor = transformers_answer(config, length)
            assert inv_freq == pytest.approx(resolved.inv_freq, rel=1e-6, abs=1e-29), form
            assert factor == pytest.approx(resolved.attention_factor * of_scores**0.5, rel=1e-9), form
            checked.add(form["rope_type"])
    taking_a_factor = {"yarn", "longrope"}
    assert checked == (taking_a_factor if multiplier else {*taking_a_factor, "default", "linear", "dynamic", "llama3"})


NEAR, FAR = DistanceRange(0, 8), DistanceRange(8)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"schedule": None}, "rotates nothing"),
        ({"score_bias": LinearBias((1.0,) * 4)}, "adds a term to the scores"),
        ({"bands": (Band(predicate=NEAR),)}, "limits the keys"),
        ({"bands": (Band(predicate=NEAR), Band(Grouped(2), Grouped(2), FAR))}, "moves the positions"),
    ],
)
def test_more_than_frequencies_and_a_factor_is_named(changed: Fields, why: str) -> None:
    recipe = replace(parse("linear:2").recipe(GEOMETRY), **changed)
    with pytest.raises(NoRopeParameters, match=why):
        rope_parameters(recipe.resolve(GEOMETRY, 100), GEOMETRY, 100)


def test_a_temperature_of_whole_scores_needs_whole_heads() -> None:
    part = replace(GEOMETRY, head_dim=32)
    resolved = resolve(parse({"method": "yarn", "factor": 4.0, "attention_temperature": 1.44}), part, 100)
    with pytest.raises(NoRopeParameters, match="rotates 16 of 32 dimensions"):
        rope_parameters(resolved, part, 100)


@pytest.mark.parametrize("attention_factor", [1.0, 1.2])
def test_a_temperature_of_latent_attention_is_written_as_deepseek_has_it(attention_factor: float) -> None:
    """From a multiplier of 1 on: the pair of DeepSeek has no smaller one."""
    latent = replace(GEOMETRY, head_dim=32, latent=True)
    for multiplier in (0.81, 1.0, 1.44):
        fields = {"method": "yarn", "factor": 4.0, "attention_factor": attention_factor}
        resolved = resolve(parse({**fields, "attention_temperature": multiplier}), latent, 100)
        if multiplier <= 1.0:
            with pytest.raises(NoRopeParameters, match="multiplies whole scores"):
                rope_parameters(resolved, latent, 100)
            continue
        (form,) = rope_parameters(resolved, latent, 100)
        again = resolve(parse(form), latent, 100)
        assert again.inv_freq == resolved.inv_freq
        assert again.attention_factor == pytest.approx(resolved.attention_factor, rel=1e-9)
        assert isinstance(again.recipe.attention_temperature, ConstantTemperature)
        assert again.recipe.attention_temperature.multiplier == pytest.approx(multiplier, rel=1e-9)


def test_the_group_and_the_window_of_self_extend_alone_are_found() -> None:
    recipe = parse("self_extend:group_size=4,neighbor_window=8,base=linear:2").recipe(GEOMETRY)
    found = grouping(recipe.resolve(GEOMETRY, 100))
    assert found is not None
    assert found == (4, 8, resolve(parse("linear:2"), GEOMETRY, 100))
    near, far = recipe.bands
    for bands in (
        (near,),
        (near, replace(far, predicate=DistanceRange(9))),
        (near, replace(far, query_map=Grouped(4, 7))),
        (near, replace(far, query_map=Grouped(2, 6))),
        (near, replace(far, key_map=near.key_map)),
        (replace(near, query_map=Grouped(4, 6)), far),
        (replace(near, predicate=DistanceRange(0)), far),
    ):
        assert grouping(replace(recipe, bands=bands).resolve(GEOMETRY, 100)) is None, bands


def test_parameters_take_the_place_of_those_of_full_attention() -> None:
    written = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    own = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 2.0, "mrope_section": [2, 3, 3]}
    assert in_configuration(written, own) == {**written, "mrope_section": [2, 3, 3]}
    sliding = {"rope_type": "default", "rope_theta": 1e4}
    by_layer = {"sliding_attention": sliding, "full_attention": own}
    assert in_configuration(written, by_layer) == {**by_layer, "full_attention": in_configuration(written, own)}
    with pytest.raises(NoRopeParameters, match="differ by layer"):
        in_configuration(written, {"sliding_attention": sliding, "full_attention": None})
