"""LoRA adapters beside their base: the tokens of peft, the declared encoding, the memory, and every refusal."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from patches import parse, patched
from service.cli.server import local_server
from service.models.checkpoint.adapters import Adapter, adapted, by_base
from service.models.checkpoint.fingerprint import contents
from service.models.checkpoint.loading import DEMO, Checkpoint, ModelLoadError, load
from service.settings import Settings
from tests.conftest import ROOT
from tests.service.cli.shell import ropeway
from tests.service.conftest import tiny_checkpoint

pytestmark = [  # of peft 0.21, where the tests use it
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings=True.:UserWarning"),
    pytest.mark.filterwarnings("ignore:Setting .save_embedding_layers. to .True.:UserWarning"),
]

BASE = DEMO / "ropeway-demo"
TEXT = (ROOT / "service/evaluation/texts/persuasion.txt").read_text(encoding="utf-8")[:20_000]
DECLARED = {"rope_type": "yarn", "factor": 4.0}
"""As a user writes it beside the adapter: without the base's theta and trained length."""

Files = dict[str, Any]


def on_disk(folder: Path, model: PreTrainedModel, **lora: Any) -> tuple[Path, PeftModel]:
    """An adapter of ``model``, saved with weights that change something, and peft's model."""
    torch.manual_seed(0)
    options = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, **lora}
    wrapped = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options))
    wrapped.save_pretrained(folder)
    return folder, wrapped.eval()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA tuned on the demo model for a few steps of 512 tokens, twice its trained length, under YaRN."""
    model: Any = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    tokens = torch.tensor(AutoTokenizer.from_pretrained(BASE)(TEXT, verbose=False)["input_ids"])
    torch.manual_seed(0)
    lora = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))
    optimizer = torch.optim.AdamW((p for p in lora.parameters() if p.requires_grad), lr=2e-2)
    losses = []
    with patched(lora.get_base_model()) as patch:
        for step in range(6):
            rows = tokens[step * 512 :][:512][None]
            loss = lora(rows, labels=rows, use_cache=False, **patch.encoding("yarn:4")).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    folder = tmp_path_factory.mktemp("adapters") / "long"
    lora.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"rope_parameters": DECLARED, "max_position_embeddings": 1024}))
    return folder


@pytest.fixture(scope="module")
def server(trained: Path) -> Iterator[str]:
    """The demo models and the adapter, in float32."""
    with local_server(Settings(_env_file=None, dtype="float32", adapters={"long": trained})) as url:
        yield url


@pytest.fixture(scope="module")
def of_peft(trained: Path) -> Any:
    """peft's own model: the adapter unmerged, over a base that transformers scales."""
    rope = {**DECLARED, "rope_theta": 10_000.0, "original_max_position_embeddings": 256}
    base = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32, rope_parameters=rope)
    return PeftModel.from_pretrained(base, trained).eval()


def models(url: str) -> dict[str, Any]:
    return {info["id"]: info for info in httpx.get(f"{url}/models", timeout=60).json()["models"]}


@pytest.mark.slow
class TestServed:
    def test_its_tokens_are_those_of_peft(self, server: str, of_peft: Any) -> None:
        ids = AutoTokenizer.from_pretrained(BASE)(TEXT, verbose=False)["input_ids"]
        for prompt in (ids[:20], ids[1000:1400]):  # within the trained length, and beyond it
            body = {"model": "long", "prompt": prompt, "max_new_tokens": 16}
            answer = httpx.post(f"{server}/generate", json=body, timeout=120).json()["results"][0]
            wanted = of_peft.generate(input_ids=torch.tensor([prompt]), max_new_tokens=16, do_sample=False)
            assert answer["token_ids"] == wanted[0, len(prompt) :].tolist()[: len(answer["token_ids"])]
            assert len(answer["token_ids"]) > 8
            assert (answer["model"], answer["pe"]["method"], answer["pe"]["factor"]) == ("long", "yarn", 4.0)

    def test_its_base_answers_as_before(self, server: str) -> None:
        prompt = AutoTokenizer.from_pretrained(BASE)(TEXT, verbose=False)["input_ids"][:40]
        plain = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
        wanted = plain.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0, 40:].tolist()
        found = {}
        for name in ("ropeway-demo", "long"):
            body = {"model": name, "prompt": prompt, "max_new_tokens": 24}
            found[name] = httpx.post(f"{server}/generate", json=body, timeout=120).json()["results"][0]["token_ids"]
        assert found["ropeway-demo"] == wanted[: len(found["ropeway-demo"])]
        assert found["long"] != found["ropeway-demo"]

    def test_the_listing_has_its_base_its_encoding_and_its_memory(self, server: str) -> None:
        listed = models(server)
        assert list(listed) == ["ropeway-demo", "long", "ropeway-demo-alibi"]
        base, long = listed["ropeway-demo"], listed["long"]
        assert (base["base"], long["base"], long["variants"]) == (None, "ropeway-demo", {})
        assert (long["pe"]["method"], long["trained_length"], base["pe"]["method"]) == ("yarn", 256, "default")
        assert (long["fingerprint"] != base["fingerprint"], long["parameters"]) == (True, base["parameters"])
        assert (base["memory"]["shared"], long["memory"]["weights"]) == (0, base["memory"]["weights"])
        attention = 4 * 4 * (192 * 256 + 2 * 192 * 128 + 256 * 192)  # bytes of the merged projections of four layers
        assert long["memory"]["weights"] - long["memory"]["shared"] == pytest.approx(
            attention, abs=4096
        )  # and frequencies
        (card,) = [c for c in httpx.get(f"{server}/v1/models").json()["data"] if c["id"] == "long"]
        assert (card["root"], card["parent"]) == ("long", "ropeway-demo")

    def test_its_export_names_the_base_and_what_the_folder_declares(self, server: str) -> None:
        body = {"pe": "default", "model": "long"}
        told = httpx.post(f"{server}/export", json=body | {"target": "vllm"}).json()
        assert told["usage"].startswith("vllm serve ropeway-demo --hf-overrides ")
        assert told["usage"].endswith(" --max-model-len 1024 --enable-lora --lora-modules long=FOLDER")
        assert (told["model"], told["changes"]) == ("long", True)
        assert (told["config"]["rope_parameters"]["factor"], len(told["notes"])) == (4.0, 1)
        for target, options in {
            "sglang": "--enable-lora --lora-paths long=FOLDER",
            "tgi": "--lora-adapters long=FOLDER",
            "llama.cpp": "--lora FOLDER.gguf",
        }.items():
            beside = httpx.post(f"{server}/export", json=body | {"target": target}).json()
            assert beside["usage"].endswith(f" {options}")
            assert " ropeway-demo" in beside["usage"]
            assert len(beside["notes"]) == 1
        merged = httpx.post(f"{server}/export", json=body | {"target": "exllamav3"}).json()
        assert "lora" not in merged["usage"]
        assert merged["notes"] == ["long is an adapter: the line is for a checkpoint that has it merged."]
        base = httpx.post(f"{server}/export", json={"pe": "yarn:4", "target": "vllm"}).json()
        assert ("lora" in base["usage"], base["notes"]) == (False, [])

    def test_evaluations_and_aliases_reach_it(self, server: str) -> None:
        body: dict[str, Any] = {"input": TEXT[:4000], "methods": ["default"], "lengths": [512]}
        found = {}
        for name in ("ropeway-demo", "long"):
            answer = httpx.post(f"{server}/perplexity", json=body | {"model": name}, timeout=120).json()
            found[name] = answer["methods"][0]["lengths"][0]["perplexity"]
        assert found["long"] < found["ropeway-demo"]
        chosen = {"model": "long@linear:2", "prompt": [5, 6, 7], "max_tokens": 2, "temperature": 0}
        assert httpx.post(f"{server}/v1/completions", json=chosen, timeout=60).json()["model"] == "long@linear:2"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tiny_checkpoint(tmp_path_factory.mktemp("base") / "tiny", position_encoding_variants={"alibi": "other"})
    return load("tiny", folder, Settings(_env_file=None))


def fresh(base: Checkpoint) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(base.model.config.name_or_path)
    return model


LORAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "trained biases": {"bias": "all"},
    "DoRA": {"use_dora": True},
    "tied embedding, and norms": {"modules_to_save": ["norm"], "target_modules": ["embed_tokens", "down_proj"]},
    "whole modules": {"modules_to_save": ["input_layernorm", "up_proj"]},
}


@pytest.mark.parametrize("kind", LORAS)
@torch.no_grad()
def test_every_kind_of_lora_leaves_the_base_unchanged(kind: str, base: Checkpoint, tmp_path: Path) -> None:
    before, tokens = contents(base.model), torch.arange(3, 40)[None]
    model = fresh(base)
    wrapped = get_peft_model(
        model, LoraConfig(r=4, init_lora_weights=False, **{"target_modules": ["q_proj"], **LORAS[kind]})
    )
    for name, weight in wrapped.named_parameters():
        if "modules_to_save" in name or name.endswith("bias"):
            weight.add_(0.1)
    wrapped.save_pretrained(tmp_path)
    merged = adapted(base, Adapter("tuned", tmp_path))
    expected, found = wrapped.eval()(tokens).logits, merged.model(tokens).logits
    assert float((expected - found).abs().max()) < 1e-3 * float(expected.abs().max())
    assert float((base.model(tokens).logits - found).abs().max()) > 0.1
    assert (contents(base.model), merged.base) == (before, "tiny")


def test_number_formats_are_those_of_the_base(base: Checkpoint, tmp_path: Path) -> None:
    """peft saves in float32 what it trained in float32."""
    on_disk(tmp_path, fresh(base), target_modules=["q_proj", "embed_tokens"], modules_to_save=["norm"])
    half = load("tiny", base.model.config.name_or_path, Settings(_env_file=None, dtype="bfloat16"))
    half.model.model.layers[0].mlp.up_proj.float()  # as transformers keeps some weights
    merged = adapted(half, Adapter("tuned", tmp_path)).model
    wanted = {name: parameter.dtype for name, parameter in half.model.named_parameters(remove_duplicate=False)}
    assert {name: parameter.dtype for name, parameter in merged.named_parameters(remove_duplicate=False)} == wanted


@pytest.mark.parametrize(
    ("declared", "method", "trained", "factor"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 8.0}, "max_position_embeddings": 512}, "linear", 64, 8.0),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "yarn", 64, 2.0),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}},
            "yarn",
            32,
            2.0,
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "default", 64, None),
        ({"rope_scaling": None}, "default", 64, None),
    ],
)
def test_factors_are_relative_to_the_trained_length_of_the_base(
    declared: Files, method: str, trained: int, factor: float | None, base: Checkpoint, tmp_path: Path
) -> None:
    on_disk(tmp_path, fresh(base))
    (tmp_path / "config.json").write_text(json.dumps(declared))
    with patched(adapted(base, Adapter("tuned", tmp_path)).model) as patch:
        described = patch.describe(parse({"method": "default"}), 64)
        assert (described["method"], described.get("factor")) == (method, factor)
        assert patch.geometry.original_max_position_embeddings == trained


def edit(name: str, **fields: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        file = folder / name
        content = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(content | fields))

    return change


def without(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def load_both(folder: Path, base: Checkpoint) -> Checkpoint:
    (adapter,) = by_base({"tuned": folder}, {"tiny": ""})["tiny"]
    return adapted(base, adapter)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without(CONFIG), "its folder has no adapter_config.json"),
        (without(WEIGHTS), "its folder has no adapter_model.safetensors"),
        (edit(CONFIG, peft_type="PREFIX_TUNING"), "its peft_type is 'PREFIX_TUNING', and only 'LORA' is served"),
        (edit(CONFIG, ensure_weight_tying=True), "it has ensure_weight_tying"),
        (
            edit(CONFIG, init_lora_weights="pissa"),
            "its init_lora_weights is 'pissa', which changes the weights of the base",
        ),
        (edit(CONFIG, init_lora_weights="pissa_niter_4"), "convert it with peft's path_initial_model"),
        (edit(CONFIG, target_modules=["c_attn"]), "c_attn"),
        (
            edit(CONFIG, target_modules=["q_proj"]),
            "4 tensors do not fit, .*v_proj.* has no place in the base",
        ),
        (edit(CONFIG, target_modules=["q_proj", "v_proj", "o_proj"]), "4 tensors do not fit, .*o_proj.* is missing"),
        (edit(CONFIG, r=8), "size mismatch"),
        (lambda folder: (folder / WEIGHTS).write_bytes(b"cut"), "header"),
        (lambda folder: (folder / CONFIG).write_text("{"), "Expecting property name"),
        (edit("config.json", rope_parameters=3), "its config.json has rope_parameters that are no object"),
    ],
)
def test_a_bad_adapter_is_refused(
    damage: Callable[[Path], object], message: str, base: Checkpoint, tmp_path: Path
) -> None:
    on_disk(tmp_path, fresh(base))
    damage(tmp_path)
    told = rf"ROPEWAY_ADAPTERS: adapter 'tuned' in '.*' cannot be loaded: .*{message}"
    with pytest.raises(ModelLoadError, match=told):
        load_both(tmp_path, base)


def test_its_base_is_found_by_name(base: Checkpoint, tmp_path: Path) -> None:
    on_disk(tmp_path, fresh(base))
    served = {"org/tiny": "", "other": ""}
    assert by_base({"a": tmp_path, "b": tmp_path}, served) == {"org/tiny": [Adapter(n, tmp_path) for n in "ab"]}
    assert list(by_base({"a": tmp_path}, {"renamed": ""})) == ["renamed"]  # the only one it can be
    with pytest.raises(ModelLoadError, match=r"its base is '.*tiny', and the served models are one, two"):
        by_base({"a": tmp_path}, {"one": "", "two": ""})
    with pytest.raises(ModelLoadError, match=r"adapter 'other' .*: a served model has this name"):
        by_base({"other": tmp_path}, served)


def test_the_setting_is_read_from_text() -> None:
    assert Settings(_env_file=None, adapters="a=/x, b=y=z").adapters == {"a": Path("/x"), "b": Path("y=z")}
    for wrong, message in (("a", "'a' is not NAME=FOLDER"), ("a=x,a=y", "two adapters have the name 'a'")):
        result = ropeway("serve", "--set", f"adapters={wrong}")
        assert (result.exit_code, message in result.stderr) == (1, True)


def test_the_command_refuses_an_adapter_in_one_line(checkpoints: Path) -> None:
    result = ropeway("serve", "--port", "0", "--model", str(checkpoints), "--adapter", "tiny=/nowhere")
    assert result.exit_code == 1
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert line.startswith("error: ROPEWAY_ADAPTERS: adapter 'tiny' in '/nowhere' cannot be loaded: a served model")
