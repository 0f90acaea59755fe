"""Every system gets published option names, and numbers by the rules of its version."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from patches import RopeGeometry, from_text, parse, resolve, rope_parameters
from service.export.target import TRAINED, Expression
from service.export.targets import TARGETS, LengthRequired, NotExpressible, Source, default_length, export, shorthand
from tests.methods import Fields, Row, rows

GEOMETRY = RopeGeometry(64, 64, 10_000.0, 256, 256, num_attention_heads=4)
PLAIN = Source(GEOMETRY, {"rope_type": "default", "rope_theta": 10_000.0}, "llama")
REQUESTS = [fields for row in rows() for fields in row.requests if row.family == "rotary"]
REQUESTS.append({"method": "yarn", "factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0})

OPTIONS = {
    "transformers": set(),
    "vllm": {"--hf-overrides", "--max-model-len"},
    "sglang": {"--json-model-override-args", "--context-length"},
    "llama.cpp": {
        *("--rope-scaling", "--rope-scale", "--rope-freq-base", "--yarn-orig-ctx", "--yarn-beta-fast"),
        *("--yarn-beta-slow", "--grp-attn-n", "--grp-attn-w", "--override-kv", "--ctx-size"),
    },
    "exllamav3": {"--cache_size"},
    "tgi": {"--rope-scaling", "--rope-factor", "--max-total-tokens", "--max-input-tokens"},
}
"""Options by their names in vLLM 0.33.0, SGLang 0.5.23, llama.cpp b11549, ExLlamaV3 1.6.5 and TGI 3.3.6."""


def exported(text: str | Fields, name: str, length: int = 1024, source: Source = PLAIN) -> Expression:
    fields = from_text(text) if isinstance(text, str) else text
    return export(parse(fields), source, TARGETS[name], length)


def closest_to(fields: Fields, name: str) -> str | Fields:
    """The encoding itself, or the closest one, which is expressible."""
    try:
        exported(fields, name)
    except NotExpressible as error:
        return str(error.closest)
    return fields


def config(text: str | Fields, name: str, length: int = 1024, source: Source = PLAIN) -> dict[str, Any]:
    return exported(text, name, length, source).config


@pytest.mark.parametrize("name", TARGETS)
def test_options_have_their_published_names(name: str) -> None:
    used = set()
    for fields in REQUESTS:
        used |= set(exported(closest_to(fields, name), name).arguments[::2])
    assert used == OPTIONS[name]


def test_lists_of_divisors_give_every_frequency_back() -> None:
    checked = 0
    for fields in REQUESTS:
        resolved = resolve(parse(fields), GEOMETRY, 1024)
        if not resolved.is_plain or not resolved.rotates or "log_n" in str(fields):
            continue
        listed = rope_parameters(resolved, GEOMETRY, 1024)[-1]
        assert listed["short_factor"] == listed["long_factor"]
        exponents = np.arange(0, 64, 2) / 64
        again = 1 / (np.array(listed["short_factor"]) * listed["rope_theta"] ** exponents)
        np.testing.assert_allclose(again, resolved.inv_freq, rtol=1e-12, atol=1e-29)
        checked += 1
    assert checked > 30


def test_vllm_and_sglang_get_a_maximum_that_covers_the_length() -> None:
    for name in ("vllm", "sglang"):
        assert config("yarn:4", name, 900)["max_position_embeddings"] == 900
        linear = config("linear:4", name, 900)
        assert linear["max_position_embeddings"] == 225  # times the factor
        assert json.loads(exported("linear:4", name, 900).arguments[1]) == linear


def test_vllm_and_sglang_get_lists_past_the_reach_of_yarns_table() -> None:
    within, beyond = (config("yarn:4", "vllm", length)["rope_parameters"] for length in (1024, 1025))
    assert (within["rope_type"], beyond["rope_type"]) == ("yarn", "longrope")
    factor = 0.1 * math.log(4) + 1
    assert (beyond["short_mscale"], beyond["long_mscale"]) == (factor, factor)
    assert beyond["original_max_position_embeddings"] == 1025
    interleaved = replace(PLAIN, geometry=replace(GEOMETRY, interleaved=True))
    with pytest.raises(NotExpressible, match="no option for these frequencies"):
        exported("yarn:4", "vllm", 1025, interleaved)


def test_a_length_that_fixes_the_frequencies_is_named() -> None:
    dynamic = exported("dynamic", "vllm")
    assert dynamic.config["rope_parameters"]["rope_type"] == "default"
    assert dynamic.config["rope_parameters"]["rope_theta"] == pytest.approx(10_000 * 4 ** (64 / 62))
    assert "fixed for 1024 tokens" in dynamic.differences[0]
    assert config("dynamic_yarn", "sglang") == config("yarn:4", "sglang")
    with pytest.raises(LengthRequired):
        default_length(parse(from_text("dynamic")), GEOMETRY)


def test_a_factor_that_follows_the_length_is_fixed_too() -> None:
    """Other systems have two lists by length, and one factor for both."""
    lists = {"short_factor": [1.0] * 32, "long_factor": [2.0] * 32}
    both = {"method": "longrope", **lists, "short_mscale": 1.1, "long_mscale": 1.3}
    fixed, equal = (exported(fields, "transformers") for fields in (both, both | {"short_mscale": 1.3}))
    assert fixed.config["rope_parameters"]["short_factor"] == pytest.approx(lists["long_factor"])
    assert fixed.config["rope_parameters"]["attention_factor"] == 1.3
    assert "fixed for 1024 tokens" in fixed.differences[0]
    assert equal.config["rope_parameters"].items() >= lists.items()
    assert not any("fixed" in difference for difference in equal.differences)


@pytest.mark.parametrize("row", [row for row in rows() if row.reach is not None], ids=lambda row: row.name)
def test_the_default_length_of_moved_positions_is_the_one_that_they_reach(row: Row) -> None:
    """``reach`` of the table is compared with the distances themselves elsewhere."""
    assert row.reach is not None
    for fields in row.requests:
        method = parse(fields)
        parameters = method.parameters(GEOMETRY)
        trained = parameters["original_max_position_embeddings"] * fields.get("base", {}).get("factor", 1)
        reach = row.reach(parameters | {"original_max_position_embeddings": trained})
        if row.covers_all and math.isfinite(reach) and row.name != "dual_chunk":
            assert default_length(method, GEOMETRY) == reach
        else:
            with pytest.raises(LengthRequired, match="name none"):
                default_length(method, GEOMETRY)


def test_encodings_without_a_length_ask_for_one_and_others_have_theirs() -> None:
    for text in (
        "alibi",
        "none",
        "default:rope_theta=500000",
        "rerope:base=yarn:4",
        "self_extend:base=(default:rope_theta=500000)",
    ):
        with pytest.raises(LengthRequired, match=r"length: required, from 2 to .* name none"):
            default_length(parse(from_text(text)), GEOMETRY)
    lengths = {"default": 256, "resonance": 256, "resonance:base=yarn:3": 768, "linear:1": 256, "self_extend": 1600}
    assert {text: default_length(parse(from_text(text)), GEOMETRY) for text in lengths} == lengths
    # (256 - 64) x 8 + 64, which --ctx-size gets
    assert exported("self_extend", "llama.cpp", 1600).arguments[-6:-4] == ["--ctx-size", "1600"]
    long = replace(GEOMETRY, original_max_position_embeddings=8192, max_position_embeddings=8192)
    assert default_length(parse("linear:4096"), long) == (1 << 24) - 1, "the longest text of any request"
    declared = replace(GEOMETRY, max_position_embeddings=1024, native=parse({"method": "dynamic", "factor": 4}))
    assert default_length(parse({"method": "default"}), declared) == 1024


def test_sglang_gets_its_own_name_for_the_factor_and_an_end_of_the_checkpoints_entries() -> None:
    own = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 2.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    source = replace(PLAIN, own={**own, "original_max_position_embeddings": 256, "mrope_section": [8, 8]})
    parameters = config("yarn:factor=4,attention_factor=1.5", "sglang", source=source)["rope_parameters"]
    assert parameters["attn_factor"] == pytest.approx(1.5 / (0.1 * math.log(4) + 1))
    assert (parameters["mscale"], parameters["mscale_all_dim"], parameters["mrope_section"]) == (1.0, 0.0, [8, 8])
    assert config("ntk:4", "sglang", source=source)["rope_parameters"]["factor"] == 1.0
    assert "mscale" not in config("yarn:4", "vllm", source=source)["rope_parameters"]


def test_exllamav3_gets_yarns_factor_as_a_ratio_of_lengths() -> None:
    made = exported("yarn:4", "exllamav3", 900)
    assert made.config["max_position_embeddings"] == 1024
    assert made.config["rope_scaling"]["original_max_position_embeddings"] == 256
    assert made.arguments == ["--cache_size", "1024"]
    shares = {**PLAIN.own, "partial_rotary_factor": 0.5, "mrope_section": [8, 8]}
    kept = config("yarn:4", "exllamav3", 900, replace(PLAIN, own=shares))["rope_scaling"]
    assert kept == {**made.config["rope_scaling"], "mrope_section": [8, 8]}
    with pytest.raises(NotExpressible, match="can: yarn:4"):
        exported("yarn:3.33", "exllamav3", 900)


def test_exllamav3_gets_lists_whose_factor_its_lengths_imply() -> None:
    """It has sqrt(1 + ln(s) / ln(256)) on cos and sin, for s = length / 256 beyond 256 tokens."""
    lists: Fields = {"method": "longrope", "short_factor": [1.0] * 32, "long_factor": [2.0] * 32}
    for length, factor in ((1024, 4.0), (512, 2.0), (512, 4.0), (200, 4.0)):
        fields = {**lists, "factor": factor}
        if length == factor * 256:
            made = exported(fields, "exllamav3", length).config
            assert made["max_position_embeddings"] == length
            assert (made["rope_scaling"]["long_factor"], made["rope_scaling"][TRAINED]) == ([2.0] * 32, 256)
        else:
            with pytest.raises(NotExpressible, match="no option for these frequencies or their factor"):
                exported(fields, "exllamav3", length)
    without = {**lists, "factor": 4.0, "attention_factor": 1.0}
    assert exported(without, "exllamav3", 200).config["rope_scaling"][TRAINED] == 256
    one_list = exported(without, "exllamav3", 1024).config["rope_scaling"]
    assert one_list[TRAINED] == 1024
    assert one_list["short_factor"] == pytest.approx([2.0] * 32)


def test_tgi_gets_one_list_for_all_positions() -> None:
    """Of two, it takes each for some of the positions of one text."""
    lists: Fields = {"method": "longrope", "short_factor": [1.0] * 32, "long_factor": [2.0] * 32}
    made = config({**lists, "factor": 4.0, "attention_factor": 1.0}, "tgi")["rope_scaling"]
    assert made["short_factor"] == made["long_factor"] == pytest.approx([2.0] * 32)


def test_tgi_gets_lists_for_linear_and_options_for_dynamic() -> None:
    linear = config("linear:4", "tgi")
    assert linear["rope_scaling"]["long_factor"] == pytest.approx([4.0] * 32)
    assert linear["original_max_position_embeddings"] == linear["max_position_embeddings"] == 1024
    assert linear["rope_theta"] == 10_000.0
    lists = {"rope_type", "short_factor", "long_factor", "original_max_position_embeddings"}
    assert linear["rope_scaling"].keys() == lists, "its launcher has the base and the length beside them"
    assert config("ntk:4", "tgi")["rope_scaling"] is None
    dynamic = exported("dynamic:2", "tgi")
    limits = ["--max-total-tokens", "1024", "--max-input-tokens", "1023"]
    assert dynamic.arguments == ["--rope-scaling", "dynamic", "--rope-factor", "2", *limits]
    assert dynamic.config == {"rope_theta": 10_000.0, "max_position_embeddings": 256}
    assert dynamic.differences == ["Frequencies follow the longest text so far, and stay for every later text."]
    with pytest.raises(NotExpressible, match="can: yarn:4"):
        exported("yarn:factor=4,beta_fast=16", "tgi")


def test_llama_cpp_gets_the_length_where_it_would_cut_it() -> None:
    assert "--override-kv" not in exported("yarn:4", "llama.cpp").arguments
    assert "--override-kv" not in exported("linear:4", "llama.cpp", 256).arguments
    assert "llama.context_length=int:1024" in exported("linear:4", "llama.cpp").arguments
    unknown = exported("linear:4", "llama.cpp", source=replace(PLAIN, model_type="new"))
    assert "--override-kv" not in unknown.arguments
    assert "cuts contexts" in unknown.differences[0]
    llama3 = replace(PLAIN, own={"rope_type": "llama3", "rope_theta": 10_000.0})
    with pytest.raises(NotExpressible, match="own divisors"):
        exported("yarn:4", "llama.cpp", source=llama3)


@pytest.mark.parametrize("entry", ["attention_factor=1.5", "truncate=false"])
def test_llama_cpp_refuses_entries_of_yarn_without_an_option(entry: str) -> None:
    with pytest.raises(NotExpressible, match=r"no option for these frequencies .* can: yarn:4"):
        exported(f"yarn:factor=4,{entry}", "llama.cpp")


def test_transformers_gets_yarn_with_all_its_entries() -> None:
    """A list of divisors would have the same numbers, but not for other lengths."""
    asked = config("yarn:factor=4,truncate=false,attention_factor=1.5", "transformers")["rope_parameters"]
    assert (asked["rope_type"], asked["truncate"], asked["attention_factor"]) == ("yarn", False, 1.5)


def test_llama_cpp_says_where_its_contexts_end() -> None:
    with pytest.raises(NotExpressible, match="contexts under YaRN end at 1,024 tokens") as refused:
        exported("yarn:4", "llama.cpp", length=2048)
    assert "no option" not in str(refused.value)


def test_llama_cpp_gets_groups_in_a_width_of_whole_groups() -> None:
    made = exported("self_extend:group_size=6,neighbor_window=20,base=linear:2", "llama.cpp")
    assert made.arguments[-4:] == ["--grp-attn-n", "6", "--grp-attn-w", "24"]
    assert made.arguments[:2] == ["--rope-scaling", "linear"]
    rounded = "neighbor_window 20 becomes 24, since llama.cpp asks for a multiple of group_size 6."
    assert made.differences[2:] == [rounded]
    assert len(exported("self_extend:group_size=6,neighbor_window=24", "llama.cpp").differences) == 2
    assert TARGETS["llama.cpp"].usage("m", made).startswith("llama-completion ")


def test_a_checkpoint_that_ships_a_scaling_gets_another_from_its_trained_length() -> None:
    native = parse(from_text("yarn:4"))
    geometry = replace(GEOMETRY, max_position_embeddings=1024, native=native)
    source = Source(geometry, {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10_000.0}, "llama")
    assert default_length(parse(from_text("yarn:8")), geometry) == 2048
    eight = config("yarn:8", "vllm", 2048, source)["rope_parameters"]
    assert (eight["factor"], eight["original_max_position_embeddings"]) == (8.0, 256)
    for name, target in TARGETS.items():
        assert exported("default", name, 1024, source) == target.unchanged(1024)
        assert exported("yarn:4", name, 1024, source) == target.unchanged(1024)
    assert config("default", "vllm", 900, replace(source, geometry=replace(geometry, max_position_embeddings=800)))


def test_what_the_folder_of_an_adapter_declares_is_written_out() -> None:
    """Other systems load the base, whose configuration says nothing of it."""
    declared = replace(GEOMETRY, max_position_embeddings=1024, native=parse(from_text("yarn:4")))
    adapter = replace(PLAIN, geometry=declared, base=GEOMETRY)
    assert default_length(parse({"method": "default"}), declared) == 1024
    for name, target in TARGETS.items():
        for length in (200, 1024):
            assert exported("default", name, length, adapter) == exported("yarn:4", name, length)
        assert exported("default", name, 256, replace(adapter, geometry=GEOMETRY)) == target.unchanged(256)


def test_a_short_form_has_whole_numbers_without_a_fraction() -> None:
    for text in ("yarn:3.5", "yarn:4", "yarn:truncate=false,factor=2", "ntk:2.25"):
        assert shorthand(parse(text)) == text


@pytest.mark.parametrize("name", ["llama.cpp", "exllamav3", "tgi"])
def test_layers_that_differ_are_refused(name: str) -> None:
    by_layer = {"full_attention": PLAIN.own, "sliding_attention": PLAIN.own}
    with pytest.raises(NotExpressible, match="differ by layer"):
        exported("yarn:4", name, source=replace(PLAIN, own=by_layer))


@pytest.mark.parametrize("name", TARGETS)
def test_a_configuration_without_rope_parameters_takes_none(name: str) -> None:
    """GPT-J rotates, and its configuration says nothing of it."""
    gptj = Source(replace(GEOMETRY, interleaved=True), {}, "gptj")
    with pytest.raises(NotExpressible, match="configuration of gptj models has no rope_parameters") as refused:
        exported("yarn:4", name, source=gptj)
    assert refused.value.closest is None
    assert exported("default", name, 256, gptj).config == {}
