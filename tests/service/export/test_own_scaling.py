"""Exports for checkpoints that ship a scaling, which the systems read in their own ways."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from patches import describe, parse, patched
from service.export.targets import TARGETS, NotExpressible, Source, default_length, source_of
from tests.methods import Fields
from tests.models import tiny_model
from tests.service.export.test_targets import GEOMETRY, PLAIN, config, exported

YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 256}
LISTS: Fields = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0] * 32,
    "long_factor": [2.0] * 32,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
}
DYNAMIC: Fields = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}

FIXED = "Frequencies are fixed for {} tokens; shorter requests get the same ones."


def shipped(own: dict[str, Any], model_type: str = "llama", **changed: Any) -> Source:
    """A checkpoint whose configuration has ``own``."""
    geometry = replace(GEOMETRY, **{"max_position_embeddings": 1024, "native": parse(own)} | changed)
    return Source(geometry, own, model_type)


GPT_OSS = shipped({**YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}, "gpt_oss")
LATENT = shipped(
    {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    "deepseek_v3",
    **{"head_dim": 128, "rotary_offset": 64, "latent": True, "interleaved": True},
)


def scaling(text: str, name: str, source: Source, length: int = 900) -> dict[str, Any]:
    parameters: dict[str, Any] = config(text, name, length, source)["rope_parameters"]
    return parameters


def mscale_of_sglang(entries: dict[str, Any]) -> float:
    """The factor on cos and sin of its two classes of YaRN."""
    one, other = entries.get("mscale", 1.0), entries.get("mscale_all_dim", 0.0)
    ratio = (0.1 * one * math.log(entries["factor"]) + 1) / (0.1 * other * math.log(entries["factor"]) + 1)
    return float(ratio * entries.get("attn_factor", 1.0))


def test_a_scaling_beside_the_trained_maximum_reaches_its_own_length() -> None:
    """Cards of Qwen add YaRN to a configuration whose maximum stays."""
    carded = shipped(YARN, max_position_embeddings=256)
    for text in ("default", "yarn", "yarn:4"):
        assert default_length(parse(text), carded.geometry) == 1024
    assert parse("yarn").parameters(carded.geometry)["factor"] == 4.0
    expression = exported("default", "vllm", 1024, carded)
    assert expression.config["max_position_embeddings"] == 1024
    assert expression.config["rope_parameters"].items() >= YARN.items()
    assert expression.arguments[-2:] == ["--max-model-len", "1024"]
    assert default_length(parse("default"), shipped(YARN, max_position_embeddings=2048).geometry) == 2048
    with pytest.raises(ValueError, match="declares no length"):
        parse("yarn").parameters(GEOMETRY)


@pytest.mark.parametrize("source", [GPT_OSS, LATENT], ids=["gpt_oss", "latent"])
def test_sglang_reads_numbers_in_place_of_the_checkpoints_yarn(source: Source) -> None:
    plain = scaling("yarn:8", "sglang", source)
    assert (plain["factor"], plain["beta_fast"], plain["beta_slow"], plain["truncate"]) == (8.0, 32.0, 1.0, True)
    assert mscale_of_sglang(plain) == pytest.approx(0.1 * math.log(8) + 1)
    assert mscale_of_sglang(scaling("yarn:factor=8,attention_factor=1.5", "sglang", source)) == pytest.approx(1.5)
    assert scaling("yarn:factor=8,beta_fast=20", "sglang", source)["beta_fast"] == 20.0
    for text in ("yarn:8", "ntk:4"):
        assert None not in scaling(text, "sglang", source).values()


def test_sglang_reads_numbers_under_every_other_type() -> None:
    own = {**GPT_OSS.own, "type": "yarn", "attn_factor": 1.2, "mscale": 1.0, "mscale_all_dim": 1.0}
    source = replace(GPT_OSS, own=own)
    kinds = {"ntk:4": "default", "linear:4": "linear", "llama3:4": "llama3", "mrrope_pro:4": "longrope"}
    for text, kind in kinds.items():
        made = scaling(text, "sglang", source)
        assert None not in made.values()
        assert (made["type"], made["rope_type"]) == (kind, kind)
    linear = config("linear:4", "sglang", 900, source)
    assert linear["max_position_embeddings"] == 900  # an original length beside a factor ends the multiplication


def test_code_of_latent_attention_reads_yarn_or_a_base() -> None:
    assert scaling("ntk:4", "vllm", LATENT)["rope_type"] == "default"
    base = scaling("ntk:4", "sglang", LATENT)
    assert (base["rope_type"], base["factor"], base["original_max_position_embeddings"]) == ("yarn", 1.0, 900)
    assert mscale_of_sglang(base) == 1.0
    for name in ("vllm", "sglang"):
        for text in ("linear:4", "yarn:factor=8,truncate=false"):
            with pytest.raises(NotExpressible, match="can: yarn:4"):
                exported(text, name, 900, LATENT)
    with pytest.raises(NotExpressible, match="can: yarn:4"):
        exported("yarn:factor=8,attention_factor=1.5", "vllm", 900, LATENT)


def test_vllm_reads_yarn_alone_for_gpt_oss() -> None:
    read = {"rope_theta", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate"}
    for text in ("yarn:8", "yarn:factor=8,beta_fast=20,truncate=false", "ntk:4", "default:rope_theta=20000"):
        made = scaling(text, "vllm", GPT_OSS)
        assert made.keys() == read | {"rope_type"}
        assert made["factor"] * made["original_max_position_embeddings"] >= 900
    assert scaling("ntk:4", "vllm", GPT_OSS)["factor"] == 1.0
    assert scaling("yarn:factor=8,truncate=false", "vllm", GPT_OSS)["truncate"] is False
    for text in ("linear:4", "yarn:factor=4,attention_factor=1.5"):
        with pytest.raises(NotExpressible, match=r"gpt-oss reads YaRN alone.* can: yarn:4"):
            exported(text, "vllm", 900, GPT_OSS)


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_a_factor_on_cos_and_sin_has_the_name_that_they_read(name: str) -> None:
    """``get_rope`` of both has ``attn_factor`` among YaRN's entries, and no ``attention_factor``."""
    asked = scaling("yarn:factor=4,attention_factor=1.5", name, PLAIN)
    assert "attention_factor" not in asked
    assert mscale_of_sglang(asked) == pytest.approx(1.5)
    own = shipped({**YARN, "attention_factor": 1.5})
    assert mscale_of_sglang(scaling("default", name, own)) == pytest.approx(1.5)
    assert exported("default", name, 900, shipped(YARN)).config == {}


def test_vllm_gets_the_factor_of_a_pair_that_it_passes_over() -> None:
    ministral = shipped({**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, "ministral3")
    assert mscale_of_sglang(scaling("default", "vllm", ministral)) == pytest.approx(1.0)
    assert exported("default", "vllm", 900, LATENT).config == {}, "its code of latent attention reads the pair"


@pytest.mark.parametrize("fields", ["default", LISTS], ids=["default", "lists"])
def test_own_lists_by_length_name_the_choice_of_each_system(fields: str | Fields) -> None:
    source = shipped(LISTS)
    names = {
        "transformers": "The list follows the tokens so far; cached keys keep the frequencies of their time.",
        "sglang": "The longest sequence of a batch chooses the list of all.",
        "tgi": "Positions past the trained length take the long list, and those before it keep the short one.",
    }
    for name, target in TARGETS.items():
        made = exported(fields, name, 900, source)
        declared = 1024 if name == "exllamav3" else 900  # the configuration chooses the list there
        assert made.differences == [names.get(name, FIXED.format(declared))]
        assert replace(made, differences=[]) == target.unchanged(900)
        within = exported(fields, name, 256, source)
        assert within.differences == ([FIXED.format(1024)] if name == "exllamav3" else [])


def factor_by_lengths(longest: int, trained: int) -> float:
    """``scaling_factor`` of vLLM's phi3_long_rope_scaled_rope.py, ExLlamaV3's rope.py and TGI's rotary.py."""
    return math.sqrt(1 + math.log(longest / trained) / math.log(trained)) if longest > trained else 1.0


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_lists_with_another_factor_than_their_lengths_imply_have_it_written(name: str) -> None:
    chosen = {**LISTS, "attention_factor": 1.5}
    made = scaling("default", name, shipped(chosen))
    assert (made["short_mscale"], made["long_mscale"]) == (1.5, 1.5)
    assert (made["short_factor"], made["long_factor"]) == (LISTS["short_factor"], LISTS["long_factor"])
    lacking = {**LISTS, "attention_factor": factor_by_lengths(1024, 256)}
    read = {**LISTS, "short_mscale": 1.5, "long_mscale": 1.5}
    for own in (LISTS, lacking, read):
        assert exported("default", name, 900, shipped(own)).config == {}
    assert scaling("default", name, shipped(LISTS, max_position_embeddings=2048))["long_mscale"] == pytest.approx(
        factor_by_lengths(1024, 256)
    ), "the factor 4 counts here, and the lengths there"


def test_lists_with_another_factor_are_refused_or_named() -> None:
    own = shipped({**LISTS, "attention_factor": 1.5})
    for name in ("exllamav3", "tgi"):
        with pytest.raises(NotExpressible, match="or their factor on cos and sin"):
            exported("default", name, 900, own)
    assert exported("default", "llama.cpp", 900, own).differences[1:] == [
        "convert_hf_to_gguf.py computes LongRoPE's factor on cos and sin from the lengths, and this checkpoint has 1.5."
    ]


def test_exllamav3_gets_the_maximum_that_gives_yarns_own_factor() -> None:
    """It divides the maximum by the trained length in place of ``factor``."""
    for declared, written in ((1024, None), (2048, 1024)):
        made = config("default", "exllamav3", 900, shipped(YARN, max_position_embeddings=declared))
        assert made.get("max_position_embeddings") == written


def test_tgi_gets_what_it_does_not_read_of_a_checkpoint_in_another_form() -> None:
    """Its "linear" leaves the frequencies as they are, and its YaRN has fixed turns."""
    linear = shipped({"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0})
    assert config("default", "tgi", 900, linear)["rope_scaling"]["long_factor"] == pytest.approx([4.0] * 32)
    for own in (YARN, {**YARN, "beta_fast": 32.0, "truncate": True, "attention_factor": None}):
        assert config("default", "tgi", 900, shipped(own)) == {}
    for entry in ({"beta_fast": 16.0}, {"beta_slow": 2.0}, {"truncate": False}, {"attention_factor": 1.5}):
        with pytest.raises(NotExpressible, match="no option for these frequencies"):
            exported("default", "tgi", 900, shipped({**YARN, **entry}))
    unscaled = config("default", "tgi", 900, shipped({**YARN, "attention_factor": 1.0}))["rope_scaling"]
    assert unscaled["rope_type"] == "longrope", "lists have no factor on cos and sin"


@pytest.mark.parametrize("name", TARGETS)
def test_equal_lists_follow_no_length(name: str) -> None:
    assert exported("default", name, 900, shipped({**LISTS, "short_factor": LISTS["long_factor"]})).differences == []


@pytest.mark.parametrize("fields", ["default", DYNAMIC], ids=["default", "dynamic"])
def test_own_dynamic_is_fixed_at_start_up_by_two_systems(fields: str | Fields) -> None:
    """Within the trained length it scales nothing here."""
    source = shipped(DYNAMIC, max_position_embeddings=256)
    for name, target in TARGETS.items():
        made = exported(fields, name, 200, source)
        assert made.differences == ([FIXED.format(1024)] if name in ("vllm", "sglang") else [])
        if name != "exllamav3":
            assert replace(made, differences=[]) == target.unchanged(200)
    scaled = json.loads(json.dumps(exported(fields, "exllamav3", 200, source).config["rope_scaling"]))
    assert scaled == {"rope_type": "default"}  # it refuses the type "dynamic"


def test_the_encoding_of_an_answer_is_exported_as_its_request() -> None:
    echo = describe(parse("dynamic"), GEOMETRY, 900)
    assert exported(echo, "transformers", 900, PLAIN) == exported("dynamic", "transformers", 900, PLAIN)


def test_llama_cpp_refuses_what_a_gguf_file_keeps() -> None:
    for text in ("yarn:8", "linear:4"):
        with pytest.raises(NotExpressible, match="whole scores of latent attention"):
            exported(text, "llama.cpp", 900, LATENT)
    assert exported("ntk:4", "llama.cpp", 900, LATENT).arguments[:2] == ["--rope-scaling", "none"]
    ministral = replace(PLAIN, own={**YARN, "mscale": 1.0, "mscale_all_dim": 1.0})
    with pytest.raises(NotExpressible, match="mscale_all_dim"):
        exported("yarn:4", "llama.cpp", 900, ministral)
    assert exported("linear:4", "llama.cpp", 900, ministral).differences == []


def test_llama_cpp_gets_options_in_place_of_entries_of_the_file() -> None:
    arguments = exported("yarn:8", "llama.cpp", 900, GPT_OSS).arguments
    given = dict(zip(arguments[::2], arguments[1::2], strict=True))
    assert (given["--yarn-beta-fast"], given["--yarn-beta-slow"]) == ("32", "1")
    source = replace(PLAIN, own={**YARN, "attention_factor": 1.5})
    arguments = exported("ntk:4", "llama.cpp", 900, source).arguments
    assert arguments[arguments.index("--yarn-attn-factor") + 1] == "1"
    assert "--yarn-attn-factor" not in exported("yarn:8", "llama.cpp", 900, source).arguments
    assert "truncate false" in exported("default", "llama.cpp", 900, GPT_OSS).differences[0]


CHUNKS = replace(
    shipped({"rope_type": "default", "rope_theta": 10_000.0}, "qwen2"),
    in_chunks=True,
    geometry=replace(GEOMETRY, native=parse({"method": "dual_chunk", "chunk_size": 200, "local_window": 50})),
)
"""A checkpoint with ``dual_chunk_attention_config``."""


@pytest.mark.parametrize("name", TARGETS)
def test_declared_dual_chunk_attention_is_for_no_other_system(name: str) -> None:
    """Most rotate without it. So a configuration alone would not say what is computed here."""
    for pe in ("default", "dual_chunk:chunk_size=200,local_window=50"):
        with pytest.raises(NotExpressible, match="no option for this encoding, which is `dual_chunk_attention_config`"):
            exported(pe, name, 900, CHUNKS)


@pytest.mark.parametrize("name", TARGETS)
def test_systems_that_read_declared_chunks_take_no_other_encoding(name: str) -> None:
    if name in ("vllm", "sglang"):
        with pytest.raises(NotExpressible, match="it reads `dual_chunk_attention_config` instead") as refused:
            exported("yarn:4", name, 900, CHUNKS)
        assert refused.value.closest is None
    else:
        assert exported("yarn:4", name, 900, CHUNKS) == exported("yarn:4", name, 900)


def test_a_served_model_says_that_it_declares_chunks() -> None:
    declared = {"chunk_size": 40, "local_size": 8, "original_max_position_embeddings": 48}
    for entries in ({}, {"dual_chunk_attention_config": declared}):
        with patched(tiny_model("qwen2", **entries)[1]) as patch:
            source = source_of(patch)
        assert source is not None
        assert source.in_chunks is bool(entries)
