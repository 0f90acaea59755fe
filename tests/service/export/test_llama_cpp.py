"""Exports to llama.cpp, run by llama.cpp: the perplexity of the demo model is ours."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from patches import Patched, parse, patched
from service.evaluation.documents import BUILT_IN
from service.export.targets import TARGETS, Source, export
from service.models.checkpoint.loading import DEMO
from tests.methods import Fields
from tests.patches.forward import logits_of, slot_of

pytest.importorskip("xllamacpp", reason="llama.cpp is not installed: pip install -c constraints.txt '.[llama-cpp]'")

import xllamacpp

from tests.service.export.gguf_files import write_gguf

CHECKPOINT = DEMO / "ropeway-demo"
LENGTH, SCORED = 768, 24
"""Three trained lengths; the last tokens are scored, one request each."""

TARGET = TARGETS["llama.cpp"]
ENCODINGS: list[Fields] = [
    {"method": "default"},
    {"method": "linear", "factor": 3.0},
    {"method": "ntk", "factor": 6.0},
    {"method": "yarn", "factor": 4.0},
    {"method": "yarn", "factor": 3.7, "beta_fast": 16.0, "beta_slow": 2.0, "original_max_position_embeddings": 208},
    {"method": "yarn", "factor": 4.0, "beta_fast": 1.0, "beta_slow": 1.0},
    {"method": "dynamic", "factor": 2.0},
    {"method": "dynamic_yarn"},
]

READ: dict[str, tuple[str, Any]] = {
    "--ctx-size": ("n_ctx", int),
    "--rope-scaling": (
        "rope_scaling_type",
        lambda kind: getattr(xllamacpp.llama_rope_scaling_type, f"LLAMA_ROPE_SCALING_TYPE_{kind.upper()}"),
    ),
    "--rope-freq-base": ("rope_freq_base", float),
    "--rope-scale": ("rope_freq_scale", lambda factor: 1.0 / float(factor)),
    "--yarn-orig-ctx": ("yarn_orig_ctx", int),
    "--yarn-beta-fast": ("yarn_beta_fast", float),
    "--yarn-beta-slow": ("yarn_beta_slow", float),
}
"""Fields by option, as ``common/arg.cpp`` sets them."""


@pytest.fixture(scope="module")
def patch() -> Iterator[Patched]:
    with patched(AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)) as patch:
        yield patch


@pytest.fixture(scope="module")
def file(patch: Patched, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the length that ``--override-kv`` sets: the library's Python interface lacks that option."""
    path = tmp_path_factory.mktemp("gguf") / "demo.gguf"
    write_gguf(path, patch.model, context_length=LENGTH)
    return path


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    text = next(iter(BUILT_IN.values()))()[:8000]
    ids: list[int] = AutoTokenizer.from_pretrained(CHECKPOINT)(text)["input_ids"]
    ids = [ids[0], *ids[201 : 200 + LENGTH]]  # behind BOS, a stretch on which all encodings differ
    assert len(ids) == LENGTH
    return ids


def options(patch: Patched, fields: Fields) -> list[str]:
    source = Source(patch.geometry, patch.model.config.rope_parameters, patch.model.config.model_type)
    return export(parse(fields), source, TARGET, LENGTH).arguments


def theirs(file: Path, arguments: list[str], tokens: list[int]) -> float:
    """Perplexity of the last tokens: each is the one after a prompt whose keys are cached but for the last."""
    parameters = xllamacpp.CommonParams()
    parameters.model.path, parameters.n_parallel, parameters.warmup = str(file), 1, False
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1  # more of them wait in a loop
    given = dict(zip(arguments[::2], arguments[1::2], strict=True))
    yarn = given["--rope-scaling"] == "yarn"
    assert given.pop("--override-kv", None) == (None if yarn else f"llama.context_length=int:{LENGTH}")
    for option, value in given.items():
        name, read = READ[option]
        setattr(parameters, name, read(value))
    server, nll = xllamacpp.Server(parameters), 0.0
    body = {"n_predict": 1, "n_probs": 2048, "cache_prompt": True, "temperature": 0.0}
    with httpx.Client(base_url=server.listening_address, timeout=60, trust_env=False) as client:
        for end in range(LENGTH - SCORED, LENGTH):
            answer = client.post("/completion", json={"prompt": tokens[:end], **body})
            assert answer.status_code == 200, answer.text
            top = answer.json()["completion_probabilities"][0]["top_logprobs"]
            nll -= next(entry["logprob"] for entry in top if entry["id"] == tokens[end])
    return math.exp(nll / SCORED)


def ours(patch: Patched, fields: Fields, tokens: list[int]) -> float:
    logits = logits_of(patch.model, torch.tensor([tokens]), slot_of(patch, fields, LENGTH))[0]
    scored = torch.tensor(tokens[-SCORED:])
    return float(torch.nn.functional.cross_entropy(logits[-SCORED - 1 : -1], scored).exp())


@pytest.mark.slow
def test_perplexities_are_ours(patch: Patched, file: Path, tokens: list[int]) -> None:
    found = {}
    for fields in ENCODINGS:
        expected = ours(patch, fields, tokens)
        assert theirs(file, options(patch, fields), tokens) == pytest.approx(expected, rel=0.01)
        found[str(fields)] = expected
    for one, other in pairwise(sorted(found.values())):
        assert other / one != pytest.approx(1.0, rel=0.001), "the options make no difference on this text"


def test_every_option_is_one_of_its_own(patch: Patched) -> None:
    """Self-Extend is an option of ``llama-completion``, whose sources are in the library too."""
    library = Path(str(importlib.util.find_spec("xllamacpp.xllamacpp").origin)).read_bytes()
    encodings = [*ENCODINGS, {"method": "self_extend", "group_size": 8}]
    printed = {argument for fields in encodings for argument in options(patch, fields) if argument.startswith("--")}
    assert printed == {*READ, "--override-kv", "--grp-attn-n", "--grp-attn-w"}
    assert [option for option in printed if option.encode() not in library] == []
