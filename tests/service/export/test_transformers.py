"""Exports to transformers, loaded by transformers: the logits of the demo model equal ours."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from patches import Patched, parse, patched
from service.export.target import Expression
from service.export.targets import TARGETS, NotExpressible, Source, export, source_of
from service.models.checkpoint.loading import DEMO
from tests.methods import Fields, rows
from tests.models import tiny_model, tiny_tokens
from tests.patches.forward import logits_of, relative, slot_of

CHECKPOINT = DEMO / "ropeway-demo"
LENGTH, TOKENS = 512, 320
"""Reserved length, a power of two: both sides then compute the same factors. Tokens; the model was trained at 256."""
TOLERANCE = 1e-6
OF_LISTS = 5e-4
"""A list divides the frequencies again in float32. One unit in their last place is 1e-4 radians after several hundred
tokens. A model that recalls is sensitive to it."""

ROTARY = [row for row in rows() if row.rotates and row.bands == 1 and row.family == "rotary"]
REQUESTS = [pytest.param(fields, id=f"{row.name}-{i}") for row in ROTARY for i, fields in enumerate(row.requests)]


def loaded(**config: Any) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float64, **config)


@pytest.fixture(scope="module")
def patch() -> Iterator[Patched]:
    with patched(loaded()) as patch:
        yield patch


def exported(patch: Patched, fields: Fields, length: int = LENGTH) -> Expression:
    source = Source(patch.geometry, patch.model.config.rope_parameters, patch.model.config.model_type)
    return export(parse(fields), source, TARGETS["transformers"], length)


@torch.no_grad()
def assert_equal(patch: Patched, theirs: PreTrainedModel, fields: Fields, tolerance: float) -> None:
    grows = theirs.config.rope_parameters["rope_type"] == "dynamic"  # with the tokens, not with the reserved length
    tokens = torch.arange(LENGTH if grows else TOKENS)[None] * 37 % 2000
    ours = logits_of(patch.model, tokens, slot_of(patch, fields, LENGTH))
    assert relative(theirs(tokens).logits, ours) <= tolerance


@pytest.mark.parametrize("fields", REQUESTS)
def test_an_export_gives_our_logits(patch: Patched, fields: Fields) -> None:
    config = exported(patch, fields).config
    listed = config.get("rope_parameters", {}).get("rope_type") == "longrope" != fields["method"]
    assert_equal(patch, loaded(**config), fields, OF_LISTS if listed else TOLERANCE)


@pytest.mark.parametrize("rotated_only", [True, False])
def test_a_temperature_becomes_a_factor_on_cos_and_sin(patch: Patched, rotated_only: bool) -> None:
    temperature = {"kind": "constant", "multiplier": 1.44, "rotated_only": rotated_only}
    fields: Fields = {"method": "yarn", "factor": 4.0, "attention_temperature": temperature}
    config = exported(patch, fields).config
    assert config["rope_parameters"]["attention_factor"] == pytest.approx(1.2 * (0.1 * math.log(4) + 1))
    assert_equal(patch, loaded(**config), fields, 5e-6)


def test_a_config_file_with_the_entries_gives_our_logits(patch: Patched, tmp_path: Path) -> None:
    fields: Fields = {"method": "yarn", "factor": 4.0}
    entries = json.loads((CHECKPOINT / "config.json").read_text()) | exported(patch, fields).config
    (tmp_path / "config.json").write_text(json.dumps(entries))
    model = loaded(config=AutoConfig.from_pretrained(tmp_path))
    assert_equal(patch, model, fields, TOLERANCE)


def test_the_line_of_python_runs(patch: Patched) -> None:
    fields: Fields = {"method": "yarn", "factor": 4.0}
    line = TARGETS["transformers"].usage(str(CHECKPOINT), exported(patch, fields))
    model = eval(line, {"AutoModelForCausalLM": AutoModelForCausalLM})
    assert_equal(patch, model.double(), fields, TOLERANCE)


@pytest.mark.parametrize(
    ("fields", "why", "closest"),
    [
        ({"method": "self_extend", "group_size": 4}, "moves the positions", "yarn:2"),
        ({"method": "alibi"}, "rotates nothing", "yarn:2"),
        ({"method": "streaming", "window": 16, "absolute_positions": True}, "limits the keys", "yarn:2"),
        (
            {"method": "yarn", "factor": 4.0, "attention_temperature": "log_n"},
            "attention_temperature depends",
            "yarn:4",
        ),
        ({"method": "self_extend", "base": {"method": "linear", "factor": 3.0}}, "moves the positions", "linear:3"),
    ],
)
def test_a_refusal_names_the_part_and_the_closest(patch: Patched, fields: Fields, why: str, closest: str) -> None:
    with pytest.raises(NotExpressible, match=why) as refused:
        exported(patch, fields)
    assert refused.value.closest == closest
    assert str(refused.value).endswith(closest)


@pytest.mark.parametrize("family", ["gpt_neox", "gemma3", "glm4", "stablelm"])
@torch.no_grad()
def test_other_entries_and_other_layers_stay(family: str) -> None:
    """Partial rotary embeddings, and layers whose frequencies differ."""
    fields: Fields = {"method": "yarn", "factor": 4.0}
    _, model = tiny_model(family)
    tokens = tiny_tokens(1, 160)
    with patched(model) as patch:
        config = exported(patch, fields, 256).config
        ours = logits_of(model, tokens, slot_of(patch, fields, 256))
    parameters = config["rope_parameters"]
    _, theirs = tiny_model(family, parameters.get("full_attention", parameters))
    assert relative(theirs(tokens).logits, ours) <= 5e-6
    others = {"full_attention", *patch.model.config.rope_parameters} - {"full_attention", "rope_type", "rope_theta"}
    assert {name: parameters[name] for name in others} == {name: model.config.rope_parameters[name] for name in others}


@pytest.mark.parametrize("family", ["bloom", "mpt", "falcon_rw"])
@torch.no_grad()
def test_a_model_without_rotation_reads_past_its_declared_length(family: str) -> None:
    """It was refused, since it rotates nothing."""
    _, model = tiny_model(family)
    with patched(model) as patch:
        source = source_of(patch)
        assert source is not None
        length = 4 * patch.geometry.max_position_embeddings
        tokens = tiny_tokens(1, length)
        ours = logits_of(model, tokens, slot_of(patch, {"method": "default"}, length))
    found = {name: export(parse("default"), source, target, length) for name, target in TARGETS.items()}
    entry = {"bloom": "seq_length", "mpt": "max_seq_len"}.get(family, "max_position_embeddings")
    assert {name for name, each in found.items() if each.config != {entry: length}} == {"llama.cpp"}
    for name in ("vllm", "sglang"):
        assert json.loads(found[name].arguments[1]) == {entry: length}
    _, theirs = tiny_model(family)
    lengthened = type(theirs)(type(theirs.config).from_dict(theirs.config.to_dict() | {entry: length})).eval()
    lengthened.load_state_dict(theirs.state_dict())
    assert relative(lengthened(tokens).logits, ours) <= 5e-6


def test_a_temperature_of_whole_scores_is_refused_where_a_part_rotates() -> None:
    _, model = tiny_model("gpt_neox")
    with patched(model) as patch, pytest.raises(NotExpressible, match="rotates 4 of 16 dimensions"):
        exported(patch, {"method": "yarn", "factor": 4.0, "attention_temperature": 1.2})


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
@torch.no_grad()
def test_deepseeks_form_of_yarn(family: str) -> None:
    """Its temperature multiplies whole scores, of which latent attention rotates a part."""
    fields: Fields = {"method": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.707}
    _, model = tiny_model(family)
    tokens = tiny_tokens(1, 160)
    with patched(model) as patch:
        parameters = exported(patch, fields, 256).config["rope_parameters"]
        ours = logits_of(model, tokens, slot_of(patch, fields, 256))
        with pytest.raises(NotExpressible, match="multiplies whole scores"):
            export(
                parse(fields), Source(patch.geometry, model.config.rope_parameters, family), TARGETS["llama.cpp"], 256
            )
    assert (parameters["mscale"], parameters["mscale_all_dim"]) == (1.0, 0.707)
    assert "attention_factor" not in parameters
    _, theirs = tiny_model(family, parameters)
    assert relative(theirs(tokens).logits, ours) <= 5e-6
