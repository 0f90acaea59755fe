"""Training through a patched model: gradients of every route, padding, and a LoRA fine-tuned under an encoding."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from patches import RopeGeometry, SlotTable, UnsupportedModel, patched
from tests.methods import Fields, one_per_shape, request_id, rows
from tests.models import ROPE_THETA, TRAINED_LENGTH, demo_model, tiny_model, tiny_tokens
from tests.patches.forward import left_padded, relative

LENGTH, STEP = 48, 1e-3
GEOMETRY = RopeGeometry(16, 16, ROPE_THETA, TRAINED_LENGTH, TRAINED_LENGTH, num_attention_heads=4)
SHAPES = one_per_shape([f for row in rows(8, TRAINED_LENGTH) for f in row.requests], GEOMETRY, LENGTH)
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, task_type="CAUSAL_LM")
DEPRECATED = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
"""peft 0.21 reads it."""


def loss_of(model: PreTrainedModel, tokens: torch.Tensor, chosen: dict[str, Any], **inputs: Any) -> torch.Tensor:
    loss: torch.Tensor = model(tokens, **{"labels": tokens, **inputs}, use_cache=False, **chosen).loss
    return loss


def check_gradients(model: PreTrainedModel, encoding: str | Fields, without: set[str] | None = None) -> None:
    """The derivative along the gradient, by differences; every parameter but ``without`` has one.

    transformers computes the loss in float32, which bounds the precision.
    """
    model, tokens = model.double().train(), tiny_tokens(2, LENGTH)
    parameters = dict(model.named_parameters())
    with patched(model) as patch:
        chosen = patch.encoding(encoding, length=LENGTH)
        loss_of(model, tokens, chosen).backward()
        missing = {name for name, weight in parameters.items() if weight.grad is None or not weight.grad.any()}
        assert missing == (without or set())
        gradient = {name: weight.grad for name, weight in parameters.items() if weight.grad is not None}
        norm = torch.stack([part.square().sum() for part in gradient.values()]).sum().sqrt()
        ends = []
        with torch.no_grad():
            for step in (STEP, -2 * STEP):
                for name, part in gradient.items():
                    parameters[name] += step * part / norm
                ends.append(float(loss_of(model, tokens, chosen)))
    assert (ends[0] - ends[1]) / (2 * STEP) == pytest.approx(float(norm), rel=2e-3)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "deepseek_v3"])
def test_a_model_is_patched_under_autocast_as_outside(family: str) -> None:
    """Mixed precision rounds more than the checks at the start allow for the model's own format."""
    tokens, models = tiny_tokens(1, LENGTH), [tiny_model(family)[1] for _ in range(2)]
    with patched(models[0]) as outside, torch.autocast("cpu", torch.bfloat16):
        expected = loss_of(models[0], tokens, outside.encoding("none"))
    with torch.autocast("cpu", torch.bfloat16), patched(models[1]) as inside:
        assert inside.geometry == outside.geometry
        assert torch.equal(loss_of(models[1], tokens, inside.encoding("none")), expected)


@pytest.mark.parametrize("fields", SHAPES, ids=request_id)
def test_gradients_of_every_shape_of_recipe(fields: Fields) -> None:
    check_gradients(tiny_model("llama", attn_implementation="sdpa")[1], fields)


@pytest.mark.parametrize(
    ("family", "encoding"),
    [
        ("gpt2", "default"),
        ("gpt2", "learned_interpolation:factor=2"),
        ("bloom", "default"),
        ("gemma3", "yarn:4"),
        ("gpt_neox", "yarn:4"),
    ],
)
def test_gradients_of_other_families(family: str, encoding: str) -> None:
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} if family == "gpt2" else {}
    check_gradients(tiny_model(family, **dropout)[1], encoding)


@pytest.mark.parametrize("family", ["shaw", "transformer_xl", "sinusoidal", "learned"])
def test_learned_encodings_get_gradients(family: str) -> None:
    check_gradients(demo_model(family), "default")


def test_the_table_of_t5_gets_none() -> None:
    """A slot has its values, read when the model was patched."""
    model = demo_model("t5")
    table = {name for name, _ in model.named_parameters() if "relative_attention_bias" in name}
    assert len(table) == 1
    check_gradients(model, "default", without=table)


@pytest.mark.parametrize("encoding", ["yarn:4", "self_extend:neighbor_window=16", "alibi"])
@torch.no_grad()
def test_padding_on_either_side_trains_alike(encoding: str) -> None:
    """Collators pad on the right."""
    model = tiny_model("llama", attn_implementation="sdpa")[1].train()
    texts = [tiny_tokens(1, length, seed=length)[0] for length in (48, 30)]
    left, left_mask, _ = left_padded(texts)
    right = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    right_mask = (torch.arange(48) < torch.tensor([[48], [30]])).long()
    with patched(model) as patch:
        chosen = patch.encoding(encoding)
        losses = []
        for ids, mask in ((left, left_mask), (right, right_mask)):
            labels = ids.masked_fill((mask == 0) | (mask.cumsum(1) == 1), -100)  # a first token has no context
            losses.append(float(loss_of(model, ids, chosen, attention_mask=mask, labels=labels)))
        alone = [float(loss_of(model, text[None], chosen)) * (len(text) - 1) for text in texts]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0] == pytest.approx(sum(alone) / 76, rel=1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "bloom", "deepseek_v3", "phi3"])
def test_gradient_checkpointing_gives_the_same_gradients(
    family: str, reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of rows with encodings, after the slots of the forward have been taken by others."""
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} if family == "gpt2" else {}
    model, tokens = tiny_model(family, **dropout)[1].train(), tiny_tokens(3, LENGTH)
    encodings = (
        ["none", "alibi", "learned_interpolation:factor=2"] if family == "gpt2" else ["none", "alibi", "default"]
    )
    encodings = ["yarn:4", "self_extend:neighbor_window=16", "alibi"] if family not in ("gpt2", "bloom") else encodings
    mask = torch.ones(3, LENGTH).long()
    mask[0, :9] = 0
    gradients, runs = [], list[int]()

    def counted(opened: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
        runs.append(1)
        return opened(*inputs, **options)

    with patched(model) as patch:
        for checkpoints in (False, True):
            if checkpoints:
                model.activation_checkpointing_enable({"use_reentrant": reentrant})
                monkeypatch.setattr(patch._forwards, "opened", partial(counted, patch._forwards.opened))
            loss = loss_of(model, tokens, patch.encoding(encodings), attention_mask=mask)
            with torch.no_grad():
                for factor in range(2, 2 + SlotTable.capacity):
                    patch.slots.release(
                        patch.slots.acquire(patch.resolve(f"none:attention_temperature={factor / 16}", LENGTH))
                    )
            model.zero_grad()
            loss.backward()
            gradients.append(
                {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
            )
        assert len(runs) == 1 + model.config.num_hidden_layers, "each layer ran again"
        assert patch.slots.in_use() == 0
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        assert relative(gradients[1][name], gradient) < 1e-5, name


def test_forwards_of_several_threads_checkpoint_their_own_encoding() -> None:
    """Both run at once: the layers that the first one leaves are those of the second still."""
    model, tokens = tiny_model("llama")[1].train(), tiny_tokens(1, LENGTH)
    entered, leaves = threading.Event(), threading.Event()
    with patched(model) as patch:
        chosen = [patch.encoding(encoding) for encoding in ("alibi", "self_extend:group_size=4,neighbor_window=8")]
        expected = [gradient_of(model, tokens, each) for each in chosen]
        model.activation_checkpointing_enable()
        own = [layer._gradient_checkpointing_func for layer in model.model.layers]

        def slow(module: Any, inputs: Any) -> None:
            if threading.current_thread() is not threading.main_thread():
                entered.set()
                leaves.wait(30)

        hook = model.model.layers[0].register_forward_pre_hook(slow)
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(loss_of, model, tokens, chosen[0])
            assert entered.wait(30)
            loss = loss_of(model, tokens, chosen[1])
            leaves.set()
            losses = [other.result(), loss]
        hook.remove()
        assert [layer._gradient_checkpointing_func for layer in model.model.layers] == own
        for each, gradient in zip(losses, expected, strict=True):
            model.zero_grad()
            each.backward()
            assert relative(model.model.layers[0].self_attn.q_proj.weight.grad, gradient) < 1e-5


def gradient_of(model: PreTrainedModel, tokens: torch.Tensor, chosen: dict[str, Any]) -> torch.Tensor:
    model.zero_grad()
    loss_of(model, tokens, chosen).backward()
    gradient: torch.Tensor = model.model.layers[0].self_attn.q_proj.weight.grad.clone()
    return gradient


def test_a_backward_pass_outside_of_the_patch_is_refused() -> None:
    """Layers would run again under the model's own attention."""
    model = tiny_model("llama")[1].train()
    model.activation_checkpointing_enable()
    own = [layer._gradient_checkpointing_func for layer in model.model.layers]
    with patched(model) as patch:
        loss = loss_of(model, tiny_tokens(1, 9), patch.encoding("yarn:4"))
    with pytest.raises(RuntimeError, match="call backward inside of the patch"):
        loss.backward()
    assert [layer._gradient_checkpointing_func for layer in model.model.layers] == own
    loss_of(model, tiny_tokens(1, 9), {}).backward()


@pytest.mark.parametrize(
    ("family", "option"),
    [
        ("llama", {"attention_dropout": 0.1}),
        ("gpt2", {}),  # 0.1 by default
        ("bloom", {"attention_dropout": 0.1}),
        ("falcon", {"attention_dropout": 0.1}),
        ("gptj", {"attn_pdrop": 0.1}),
        ("codegen", {"attn_pdrop": 0.1}),
        ("gpt_neo", {"attention_dropout": 0.1}),
    ],
)
def test_attention_dropout_is_refused(family: str, option: dict[str, Any]) -> None:
    model, tokens = tiny_model(family, **option)[1], tiny_tokens(1, 9)
    with patched(model), torch.no_grad():
        model(tokens)
        with pytest.raises(ValueError, match=r"attention dropout 0\.1"):
            model.train()(tokens)


@DEPRECATED
def test_a_wrapper_is_refused() -> None:
    """``generate`` would run the model inside."""
    lora = get_peft_model(tiny_model("llama")[1], LORA)
    with pytest.raises(UnsupportedModel, match=r"PeftModelForCausalLM .* get_base_model\(\)"), patched(lora):
        raise AssertionError("never entered")
    with patched(lora.get_base_model()) as patch:
        lora.generate(input_ids=tiny_tokens(1, 9), max_new_tokens=1, **patch.encoding("yarn:4"))


YARN: Fields = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED_LENGTH}


@pytest.mark.slow
@DEPRECATED
def test_a_lora_trained_under_yarn_is_a_checkpoint_of_transformers(tmp_path: Path) -> None:
    """transformers' own trainer under our encoding, and under its own: the same loss; then the same saved model."""
    from transformers import Trainer, TrainingArguments

    texts = [{"input_ids": row, "labels": row} for row in tiny_tokens(8, 2 * TRAINED_LENGTH)]

    def collate(samples: list[dict[str, torch.Tensor]], **chosen: Any) -> dict[str, Any]:
        return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]} | chosen

    def trained(model: PreTrainedModel, **chosen: Any) -> tuple[PeftModel, list[float]]:
        torch.manual_seed(0)
        lora = get_peft_model(model, LORA)
        options: dict[str, Any] = {"max_steps": 6, "logging_steps": 1, "learning_rate": 1e-2, "report_to": []}
        quiet = {"use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "dataloader_pin_memory": False}
        arguments = TrainingArguments(tmp_path / "run", per_device_train_batch_size=2, **options, **quiet)
        trainer = Trainer(lora, arguments, train_dataset=texts, data_collator=lambda rows: collate(rows, **chosen))
        trainer.train()
        return lora, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    plain = tiny_model("llama", attn_implementation="sdpa")[1]
    before = {name: weight.clone() for name, weight in plain.state_dict().items()}
    with patched(plain) as patch:
        chosen = patch.encoding("yarn:4")
        lora, losses = trained(plain, **chosen)
        tokens = tiny_tokens(1, 2 * TRAINED_LENGTH, seed=9)
        with torch.no_grad():
            expected = lora.eval()(tokens, **chosen).logits
            sampled = lora.generate(input_ids=tokens, max_new_tokens=4, do_sample=False, **chosen)
            assert relative(plain(tokens).logits, expected) > 0.01, "without the encoding"
    own = trained(tiny_model("llama", YARN, attn_implementation="sdpa")[1])[1]
    assert losses == pytest.approx(own, rel=1e-4)
    assert losses[-1] < losses[0]
    for name, weight in plain.state_dict().items():
        if "lora" not in name:
            assert torch.equal(weight, before[name.replace("base_layer.", "")]), name

    merged = lora.merge_and_unload()
    merged.config.rope_parameters = {"rope_theta": ROPE_THETA, **YARN}
    merged.save_pretrained(tmp_path / "merged")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    with torch.no_grad():
        assert relative(loaded(tokens).logits, expected) < 2e-5
    assert torch.equal(loaded.generate(tokens, max_new_tokens=4, do_sample=False), sampled)
