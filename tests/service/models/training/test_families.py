"""Demo models of every family that does not ship: trained a little, saved, loaded, served like any other."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from transformers import AutoConfig, DynamicCache, PreTrainedModel
from typer.testing import CliRunner

from benchmarks.quality.family_table import EXTENSIONS, compared, family_of
from patches import Patched, parse, patched
from service.engine.engine import Engine
from service.models.architecture import FAMILIES, RopewayDemoConfig
from service.models.checkpoint import loading
from service.models.training import __main__ as cli
from service.models.training import card, shape
from service.models.training.train import seams, token_losses
from service.settings import Settings
from tests.models import randomise
from tests.patches.forward import chunked_logits, left_padded, logits_of, relative, slot_of
from tests.service.engine.adapter.test_architectures import LIMITS, NEW, assert_greedy
from tests.service.engine.generating import finished
from tests.service.models.training.training_runs import CPU, TINY, story

STEPS = 12
KINDS = [kind for kind in shape.FAMILIES if kind not in shape.KINDS]
NONE = {"method": "none"}
OTHERS: dict[str, list[dict[str, Any]]] = {
    "learned": [{"method": "learned_interpolation", "factor": 4.0}, {"method": "learned_hierarchical"}],
    "sinusoidal": [{"method": "sinusoidal_interpolation", "factor": 4.0}],
    "rope_theta": [{"method": "yarn", "factor": 4.0}],
}
"""Encodings of a family beside its own, and beside those that every model can take."""

every_kind = pytest.mark.parametrize("kind", KINDS)
every_family = pytest.mark.parametrize("kind", FAMILIES)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of them, by one command."""
    texts, output = tmp_path_factory.mktemp("texts"), tmp_path_factory.mktemp("models")
    for number in range(3):
        (texts / f"story{number}.txt").write_text(story(number), encoding="utf-8")
    tokens = str(STEPS * TINY.batch * TINY.context)
    options = ["--corpus", str(texts), "--preset", "tiny", "--tokens", tokens, "--precision", "fp32"]
    models = [option for kind in KINDS for option in ("--model", kind)]
    folders = ["--run-dir", str(output / "runs"), "--output", str(output)]
    result = CliRunner().invoke(cli.app, ["all", *options, *models, *folders])
    assert result.exit_code == 0, result.output
    return output


def loaded(trained: Path, kind: str) -> PreTrainedModel:
    """As the service loads it, with weights that are far from where training starts."""
    model = loading.load(kind, trained / shape.served_name(kind), Settings(_env_file=None, device="cpu")).model
    randomise(model, 0)
    return model.requires_grad_(False)


def tokens_for(kind: str, rows: int = 2) -> torch.Tensor:
    """Past the trained length where the family goes on there: distances past Shaw's clip and T5's last bucket."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, 250, (rows, TINY.context if kind == "learned" else 150), generator=generator)


def requests_for(kind: str) -> list[dict[str, Any]]:
    return [{"method": "default"}, NONE, {"method": "alibi", "use_variant": False}, *OTHERS.get(kind, [])]


def fresh(kind: str) -> Any:
    return shape.new_model(shape.model_config(kind, TINY, 300, 0, 1), 0, CPU)


class TestTraining:
    @every_kind
    def test_loss_falls_and_the_card_says_what_it_is(self, trained: Path, kind: str) -> None:
        folder = trained / shape.served_name(kind)
        text = (folder / "README.md").read_text(encoding="utf-8")
        facts = card.Facts.load(trained / "runs" / folder.name / "facts.json")
        losses = [entry.validation_loss for entry in facts.log]
        assert len(losses) == STEPS
        assert losses[-1] < losses[0] - 0.1
        assert f"make train-demo FAMILY={kind} PRESET=tiny CORPUS=DIR" in text
        assert shape.encoding_of(kind) in text
        assert "ships inside" not in text

    @every_kind
    def test_every_weight_learns(self, kind: str) -> None:
        model = fresh(kind)
        rows = torch.randint(2, 300, (4, TINY.context + 1), generator=torch.Generator().manual_seed(0))
        with seams(model):
            token_losses(model, rows[:, :-1], rows[:, 1:], "fp32").mean().backward()
        for name, weight in model.named_parameters():
            assert weight.grad is not None, name
            assert weight.grad.abs().max() > 0, name

    @every_kind
    def test_families_share_their_initial_weights(self, kind: str) -> None:
        base, own = fresh(shape.ROTARY).state_dict(), fresh(kind).state_dict()
        assert set(base) <= set(own)
        assert all(torch.equal(weight, own[name]) for name, weight in base.items())

    def test_cards_tell_families_apart(self) -> None:
        assert len({shape.encoding_of(kind) for kind in shape.FAMILIES}) == len(shape.FAMILIES)
        assert shape.encoding_of(shape.ROTARY) == "rotary position embedding (theta 10000)"

    def test_what_ships_is_as_it_was(self) -> None:
        assert shape.KINDS == ("rope", "alibi")
        assert {folder.name for folder in loading.DEMO.iterdir()} == {shape.served_name(kind) for kind in shape.KINDS}


class TestModel:
    """The model by itself, without a patch: a transformers model whose cache changes nothing."""

    @every_family
    def test_cached_decoding_and_padding(self, trained: Path, kind: str) -> None:
        model, tokens = loaded(trained, kind), tokens_for(kind)
        whole = model(tokens, use_cache=False).logits
        rows = [tokens[0], tokens[1, :11]]
        padded, mask, positions = left_padded(rows)
        cache = DynamicCache()
        chunks = [tokens.shape[1] - 7, 4, 1, 1, 1]
        stepwise = chunked_logits(model, padded, mask, positions, cache=cache, chunks=chunks)
        assert relative(stepwise[0], whole[0]) < 1e-5
        assert relative(stepwise[1, -11:], whole[1, :11]) < 1e-5

    def test_an_unknown_family_is_refused(self) -> None:
        with pytest.raises(ValueError, match="position_family"):
            RopewayDemoConfig(position_family="rope")


class TestPatched:
    @every_family
    def test_default_is_the_model_itself(self, trained: Path, kind: str) -> None:
        model, tokens = loaded(trained, kind), tokens_for(kind)
        expected = model(tokens, use_cache=False).logits
        rows = [tokens[0], tokens[1, :11]]
        padded, mask, positions = left_padded(rows)
        with patched(model) as patch:
            assert relative(logits_of(model, tokens), expected) < 1e-5
            chunks = [tokens.shape[1] - 7, 4, 1, 1, 1]
            stepwise = chunked_logits(model, padded, mask, positions, cache=DynamicCache(), chunks=chunks)
            without = logits_of(model, tokens, slot_of(patch, NONE, tokens.shape[1]))
        assert relative(stepwise[0], expected[0]) < 1e-5
        assert relative(stepwise[1, -11:], expected[1, :11]) < 1e-5
        assert relative(without, expected) > 0.05
        assert torch.equal(model(tokens, use_cache=False).logits, expected)

    @every_kind
    def test_rows_of_a_mixed_batch_are_what_each_is_alone(self, trained: Path, kind: str) -> None:
        model, tokens = loaded(trained, kind), tokens_for(kind, rows=len(requests_for(kind)))
        with patched(model) as patch:
            slots = [slot_of(patch, fields, tokens.shape[1]) for fields in requests_for(kind)]
            mixed = logits_of(model, tokens, slots)
            alone = [logits_of(model, tokens[i : i + 1], slot) for i, slot in enumerate(slots)]
        for row, expected in zip(mixed, alone, strict=True):
            assert relative(row, expected[0]) < 1e-5
        assert len(set(slots)) == len(slots) - (kind == "nope")

    @every_kind
    def test_the_native_encoding(self, trained: Path, kind: str) -> None:
        model = loaded(trained, kind)
        with patched(model) as patch:
            echo = patch.describe(parse({"method": "default"}), 20)
            assert patch.geometry.original_max_position_embeddings == TINY.context
            _check_native(kind, model, patch, echo)

    def test_a_learned_table_ends_and_can_be_extended(self, trained: Path) -> None:
        with patched(loaded(trained, "learned")) as patch:
            for length in (TINY.context, TINY.context + 1):
                patch.resolve(parse({"method": "learned_interpolation", "align": "ends"}), length)
            with pytest.raises(ValueError, match=f"has {TINY.context} positions"):
                patch.resolve(parse({"method": "default"}), TINY.context + 1)


def _check_native(kind: str, model: Any, patch: Patched, echo: dict[str, Any]) -> None:
    expected = {"nope": "none", "rope_theta": "default", "t5": "t5_bias"}.get(kind, kind)
    assert echo["method"] == expected
    assert patch.geometry.rotates == (kind == "rope_theta")
    if kind == "rope_theta":
        assert patch.geometry.rope_theta == echo["effective_rope_theta"] == 500_000.0
    if kind == "t5":
        weights = model.model.relative_attention_bias.weight
        assert torch.equal(torch.tensor(echo["relative_attention_bias"]), weights)


@every_kind
async def test_the_engine_serves_it(trained: Path, kind: str) -> None:
    model = loaded(trained, kind)
    methods = [parse(fields) for fields in requests_for(kind)]
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 250, (n,), generator=generator).tolist() for n in (20, 13, 60, 41, 70)]
    with patched(model) as patch:
        engine = Engine(patch, LIMITS, eos_token_ids=())
        try:
            jobs = [finished(engine, prompt, NEW, method) for prompt, method in zip(prompts, methods, strict=False)]
            generations = await asyncio.gather(*jobs)
        finally:
            engine.thread.stop(grace_s=1.0)
        for prompt, method, generation in zip(prompts, methods, generations, strict=False):
            assert len(generation.token_ids) == NEW
            assert_greedy(patch, method, prompt, generation.token_ids)


class TestTable:
    def test_one_table_of_two_families(self, trained: Path) -> None:
        folders = [trained / shape.served_name(kind) for kind in ("learned", "shaw")]
        result = compared(folders, {"story": story(7)[:4000]})
        assert result.lengths == [TINY.context << step for step in range(5)]
        measured = [(method.model, method.label, [at.length for at in method.lengths]) for method in result.methods]
        assert [model for model, _, _ in measured] == [folders[0].name] * 3 + [folders[1].name] * 2
        assert measured[0][2] == result.lengths[:1]
        assert all(lengths == result.lengths for _, _, lengths in measured[1:])
        assert all(at.perplexity > 1 for method in result.methods for at in method.lengths)

    def test_every_family_has_its_row(self) -> None:
        configs = [shape.model_config(kind, TINY, 300, 0, 1).to_dict() for kind in shape.FAMILIES]
        assert {family_of(json.loads(json.dumps(config))) for config in configs} == set(EXTENSIONS)

    def test_models_of_different_lengths_are_refused(self, tmp_path: Path) -> None:
        folders = [tmp_path / "short", tmp_path / "long"]
        for folder, length in zip(folders, (32, 64), strict=True):
            AutoConfig.for_model("llama", max_position_embeddings=length).save_pretrained(folder)
        with pytest.raises(typer.BadParameter, match=r"\[32, 64\]"):
            compared(folders, {"story": "text"})
