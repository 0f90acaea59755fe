"""Training of the demo models, by real runs of the smallest preset on generated text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from patches import patched
from service.models.training import __main__ as cli
from service.models.training import card, corpus, shape
from service.models.training.curriculum import Curriculum, Stage
from service.models.training.tokenizer import load_tokenizer
from service.models.training.train import (
    CheckpointMismatch,
    Progress,
    Run,
    learning_rate,
    measure_steps,
    position_losses,
    seams,
    token_losses,
    train,
)
from tests.service.models.training.training_runs import CPU, HELDOUT, STEPS, TINY, fresh, packed

MAX_BYTES = 12_000_000


def progressed(model: Any, run: Run, run_dir: Path, on_step: Any = lambda *_: None) -> Progress:
    return train(model, run, batches(run_dir, run), packed(run_dir, "heldout.bin"), on_step)


def batches(run_dir: Path, run: Run, stages: tuple[Stage, ...] = (Stage(1.0, TINY.context),)) -> Curriculum:
    tokens = run.preset.batch * run.preset.context
    tokenizer = load_tokenizer(run_dir / "tokenizer")
    return Curriculum(run_dir / "train.bin", tokenizer, stages, tokens, run.steps, run.seed)


@pytest.mark.slow
class TestTraining:
    @pytest.mark.parametrize("kind", shape.KINDS)
    def test_loss_falls(self, run_dir: Path, trained: Path, kind: str) -> None:
        facts = card.Facts.load(run_dir / shape.served_name(kind) / "facts.json")
        losses = [entry.validation_loss for entry in facts.log]
        assert [entry.step for entry in facts.log] == list(range(1, STEPS + 1))
        assert losses[-1] < losses[0] - 0.5
        assert np.mean(facts.position_losses) == pytest.approx(losses[-1], abs=0.05)

    @pytest.mark.parametrize("kind", shape.KINDS)
    def test_resumed_weights_are_those_of_an_uninterrupted_run(self, run_dir: Path, tmp_path: Path, kind: str) -> None:
        def interrupt(step: int, loss: float) -> None:
            if step == 4:
                raise KeyboardInterrupt

        whole, model = fresh(run_dir, kind), fresh(run_dir, kind)
        run = Run(TINY, 10, 0, "bf16", tmp_path / "parts", checkpoint_minutes=0.0)
        expected = progressed(whole, replace(run, folder=tmp_path / "whole"), run_dir)
        with pytest.raises(KeyboardInterrupt):
            progressed(model, run, run_dir, interrupt)
        resumed = fresh(run_dir, kind, seed=5)
        steps: list[int] = []
        progress = progressed(resumed, run, run_dir, lambda step, _: steps.append(step))
        assert steps == list(range(5, 11))
        for name, weights in whole.state_dict().items():
            assert torch.equal(resumed.state_dict()[name], weights), name
        assert [replace(entry, seconds=0.0) for entry in progress.log] == [
            replace(entry, seconds=0.0) for entry in expected.log
        ]

    def test_batches_follow_the_order_across_an_interruption(self, run_dir: Path, tmp_path: Path) -> None:
        def interrupt(step: int, loss: float) -> None:
            if step == 3:
                raise KeyboardInterrupt

        heldout = packed(run_dir, "heldout.bin")
        run = Run(TINY, 6, 4, "fp32", tmp_path, checkpoint_minutes=0.0)
        data, asked = batches(run_dir, run), []
        data.batch = lambda step: asked.append(step) or Curriculum.batch(data, step)  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            train(fresh(run_dir, shape.ROTARY), run, data, heldout, interrupt)
        train(fresh(run_dir, shape.ROTARY), run, data, heldout, lambda *_: None)
        assert asked == list(range(6))

    def test_a_batch_of_text_has_the_rows_of_its_step(self, run_dir: Path, tmp_path: Path) -> None:
        run, text = Run(TINY, 6, 4, "fp32", tmp_path), packed(run_dir, "train.bin")
        for step in range(6):
            rows = text.rows(corpus.batch_order(len(text), TINY.batch, step, run.seed))
            assert all(map(torch.equal, batches(run_dir, run).batch(step), rows))

    def test_a_checkpoint_of_another_job_is_refused(self, run_dir: Path, tmp_path: Path) -> None:
        run = Run(TINY, 2, 0, "fp32", tmp_path)
        progressed(fresh(run_dir, shape.ROTARY), run, run_dir)
        with pytest.raises(CheckpointMismatch, match="'steps': 2"):
            progressed(fresh(run_dir, shape.ROTARY), replace(run, steps=3), run_dir)

    def test_seams_give_the_gradients_of_the_plain_model(self, run_dir: Path) -> None:
        rows = packed(run_dir, "train.bin").rows(np.arange(4))
        plain, model = fresh(run_dir, shape.ROTARY), fresh(run_dir, shape.ROTARY)
        token_losses(plain, *rows, "fp32").mean().backward()
        with seams(model):
            token_losses(model, *rows, "fp32").mean().backward()
        for (name, expected), actual in zip(plain.named_parameters(), model.parameters(), strict=True):
            assert expected.grad is not None
            assert expected.grad.abs().max() > 0
            torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-4, atol=1e-6, msg=name)

    def test_kinds_share_their_initial_weights_and_differ_in_encoding(self, run_dir: Path) -> None:
        models = [fresh(run_dir, kind) for kind in shape.KINDS]
        for model in models[1:]:
            assert all(map(torch.equal, models[0].parameters(), model.parameters()))
        rows = packed(run_dir, "train.bin").rows(np.arange(4))
        losses = []
        for model in models:
            with seams(model), torch.no_grad():
                losses.append(token_losses(model, *rows, "fp32"))
        assert len(losses) > 1
        assert all(not torch.allclose(losses[0], other, atol=1e-6) for other in losses[1:])

    def test_schedule(self) -> None:
        rates = [learning_rate(step, 1000, 1.0) for step in range(1000)]
        assert rates[0] == pytest.approx(1 / 30)
        assert rates[30] == max(rates) == 1.0
        assert rates[:30] == sorted(rates[:30])
        assert rates[30:] == sorted(rates[30:], reverse=True)
        assert rates[515] == pytest.approx(0.55)
        assert rates[-1] == pytest.approx(0.1, abs=1e-5)

    def test_position_losses_are_means_over_rows(self, run_dir: Path) -> None:
        data, model = packed(run_dir, "heldout.bin"), fresh(run_dir, shape.ROTARY)
        expected = token_losses(model, *data.rows(np.arange(len(data))), "fp32").double().mean(0)
        torch.testing.assert_close(position_losses(model, data, 10**6, "fp32"), expected.detach())

    def test_measured_steps_fill_the_time(self, run_dir: Path, tmp_path: Path) -> None:
        run = Run(TINY, 1, 0, "bf16", tmp_path)
        data = batches(run_dir, run)
        short, long = (measure_steps(fresh(run_dir, shape.ROTARY), run, data, m, 0.3) for m in (0.01, 1.0))
        assert 1 <= short < long

    @pytest.mark.parametrize("kind", shape.KINDS)
    def test_a_run_goes_on_from_trained_weights_in_stages(
        self, run_dir: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
    ) -> None:
        stages = (Stage(0.5, 16, recall=0.5), Stage(0.5, TINY.context, recall=0.25))
        monkeypatch.setitem(shape.PRESETS, "staged", replace(TINY, stages=stages))
        for file in ("documents.json", "heldout.bin", "train.bin"):
            (tmp_path / file).symlink_to(run_dir / file)
        (tmp_path / "tokenizer").symlink_to(run_dir / "tokenizer")
        tokens = str(4 * TINY.batch * TINY.context)
        options = ["--model", kind, "--preset", "staged", "--tokens", tokens, "--initial", str(trained)]
        result = CliRunner().invoke(
            cli.app, ["train", *options, "--run-dir", str(tmp_path), "--output", str(tmp_path / "out")]
        )
        assert result.exit_code == 0, result.output
        facts = card.Facts.load(tmp_path / shape.served_name(kind) / "facts.json")
        first = card.Facts.load(run_dir / shape.served_name(kind) / "facts.json").log[-1]
        assert facts.log[0].validation_loss == pytest.approx(first.validation_loss, abs=0.5)
        assert facts.preset.stages == stages
        text = (tmp_path / "out" / shape.served_name(kind) / "README.md").read_text()
        assert "## Training, run 1 of 2" in text
        assert "## Training, run 2 of 2" in text
        assert "50% of the steps on rows of 16 tokens, 50% of them recall" in text

    def test_weights_of_another_shape_are_refused(self, run_dir: Path, trained: Path, tmp_path: Path) -> None:
        options = ["--model", "rope", "--preset", "small", "--initial", str(trained), "--run-dir", str(run_dir)]
        result = CliRunner().invoke(cli.app, ["train", *options, "--output", str(tmp_path)], env={"COLUMNS": "300"})
        assert result.exit_code == 2
        assert "hidden_size is 32, and the preset has 128" in result.output


class TestFolder:
    @pytest.mark.parametrize("kind", shape.KINDS)
    def test_loads_and_carries_the_trained_weights(self, run_dir: Path, trained: Path, kind: str) -> None:
        folder = trained / shape.served_name(kind)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        state = torch.load(run_dir / folder.name / "checkpoint.pt", weights_only=True)["model"]
        assert all(torch.equal(model.state_dict()[name], weights.half().float()) for name, weights in state.items())
        with patched(model) as patch:
            assert patch.geometry.rotates == (kind == shape.ROTARY)
            assert patch.geometry.original_max_position_embeddings == TINY.context
            ids = AutoTokenizer.from_pretrained(folder)("the cats", return_tensors="pt").input_ids
            generated = model.generate(ids, max_new_tokens=4, do_sample=False)
        assert generated.shape[1] == ids.shape[1] + 4

    def test_the_rotary_model_names_its_variants(self, trained: Path) -> None:
        config = AutoModelForCausalLM.from_pretrained(trained / shape.BASE).config
        assert config.position_encoding_variants == {kind: shape.served_name(kind) for kind in shape.VARIANTS}
        assert all((trained / name / "config.json").exists() for name in config.position_encoding_variants.values())

    @pytest.mark.parametrize("preset", ["cpu", "gpu"])
    def test_real_sizes_stay_under_the_limit(self, run_dir: Path, tmp_path: Path, preset: str) -> None:
        config = shape.model_config(shape.ROTARY, shape.PRESETS[preset], 2048, 0, 1)
        shape.save_folder(shape.new_model(config, 0, CPU), run_dir / "tokenizer", tmp_path)
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) < MAX_BYTES


class TestCard:
    def test_says_what_was_done(self, trained: Path) -> None:
        text = (trained / shape.BASE / "README.md").read_text(encoding="utf-8")
        assert text.startswith("---\nlicense: apache-2.0\nlanguage: en\n")
        assert "CC0-1.0" in text
        assert f"Held out whole, for validation: `{HELDOUT}`" in text
        assert f"Tokens seen: {STEPS * TINY.batch * TINY.context:,}" in text
        assert sum(line.startswith(f"| {STEPS} |") for line in text.splitlines()) == 1

    def test_table_is_replaced_and_outlives_a_new_card(self, run_dir: Path, trained: Path, tmp_path: Path) -> None:
        path, source = tmp_path / "README.md", tmp_path / "table.md"
        facts = card.Facts.load(run_dir / shape.BASE / "facts.json")
        card.write_card(facts, path)
        before = path.read_text(encoding="utf-8")
        for number in ("| 1 |", "| 2 |"):
            source.write_text(f"\n{number}\n\n")
            result = CliRunner().invoke(cli.app, ["table", str(path), str(source)])
            assert result.exit_code == 0, result.output
        card.write_card(facts, path)
        assert path.read_text(encoding="utf-8") == before.replace("Not measured yet.", "| 2 |")
        path.write_text("no markers")
        with pytest.raises(ValueError, match="table:start"):
            card.insert_table(path, "| 3 |")

    @pytest.mark.parametrize("rate", [TINY.learning_rate, 1.5e-4])
    def test_names_the_learning_rate_that_the_run_used(self, run_dir: Path, tmp_path: Path, rate: float) -> None:
        options = ["--model", "rope", "--preset", "tiny", "--tokens", "1", "--learning-rate", str(rate)]
        (tmp_path / "run").mkdir()
        for name in ("tokenizer", "train.bin", "heldout.bin", "documents.json"):
            (tmp_path / "run" / name).symlink_to(run_dir / name)
        folders = ["--run-dir", str(tmp_path / "run"), "--output", str(tmp_path / "out")]
        result = CliRunner().invoke(cli.app, ["train", *options, *folders])
        assert result.exit_code == 0, result.output
        optimizer = torch.load(tmp_path / "run" / shape.BASE / "checkpoint.pt", weights_only=True)["optimizer"]
        assert optimizer["param_groups"][0]["lr"] == rate
        text = (tmp_path / "out" / shape.BASE / "README.md").read_text(encoding="utf-8")
        assert f"peak learning rate {rate:g}," in text
        assert ("--learning-rate 0.00015" in text) == (rate != TINY.learning_rate)
        assert "PRESET=tiny " in text

    @pytest.mark.parametrize(("rate", "option"), [(1.5e-3, ""), (1.5e-4, " --learning-rate 0.00015")])
    def test_the_shipped_preset_ships_at_another_learning_rate(
        self, run_dir: Path, trained: Path, tmp_path: Path, rate: float, option: str
    ) -> None:
        preset = replace(shape.PRESETS[shape.SHIPPED], learning_rate=rate)
        facts = card.Facts.load(run_dir / shape.BASE / "facts.json")
        facts = replace(facts, preset=preset, position_losses=[1.0] * preset.context)
        card.write_card(facts, tmp_path / "README.md")
        text = (tmp_path / "README.md").read_text(encoding="utf-8")
        command = f"--preset {shape.SHIPPED} --initial DIR --run-dir NEW --tokens {facts.tokens} --seed 0{option}"
        assert f'make train-demo ARGS="train {command}"' in text

    def test_card_command_writes_it_again(self, run_dir: Path, trained: Path) -> None:
        path = trained / shape.BASE / "README.md"
        written = path.read_text(encoding="utf-8")
        path.unlink()
        result = CliRunner().invoke(cli.app, ["card", "--run-dir", str(run_dir), "--output", str(trained)])
        assert result.exit_code == 0, result.output
        assert path.read_text(encoding="utf-8") == written


@pytest.mark.slow
class TestCommands:
    @pytest.mark.parametrize(
        ("arguments", "named"),
        [
            (["prepare"], "--corpus"),
            (["prepare", "--stdlib", "--preset", "huge"], "huge"),
            (["prepare", "--corpus", "STORIES", "--heldout", "nothing.txt"], "nothing.txt"),
            (["train", "--model", "unlearned"], "unlearned"),
            (["train", "--precision", "fp8"], "fp8"),
            (["train", "--learning-rate", "0"], "--learning-rate"),
            (["train", "--learning-rate", "2"], "--learning-rate"),
            (["train"], "prepare"),
        ],
    )
    def test_mistakes_are_named(self, stories: Path, tmp_path: Path, arguments: list[str], named: str) -> None:
        filled = [str(stories) if argument == "STORIES" else argument for argument in arguments]
        result = CliRunner().invoke(cli.app, [*filled, "--run-dir", str(tmp_path)])
        assert result.exit_code == 2
        assert named in result.output

    def test_every_kind_trains_for_the_steps_measured_once(
        self, stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        measured: list[float] = []

        def measure(model: Any, run: Run, data: Any, minutes: float) -> int:
            measured.append(minutes)
            return 3

        monkeypatch.setattr(cli, "measure_steps", measure)
        options = ["--preset", "tiny", "--run-dir", str(tmp_path), "--output", str(tmp_path / "out")]
        arguments = ["all", "--corpus", str(stories), "--minutes", "1.5", *options]
        for _ in range(2):  # the second call finds both runs complete
            result = CliRunner().invoke(cli.app, arguments)
            assert result.exit_code == 0, result.output
        assert measured == [1.5]
        folders = [tmp_path / shape.served_name(kind) for kind in shape.KINDS]
        assert [card.Facts.load(folder / "facts.json").steps for folder in folders] == [3] * len(folders)
