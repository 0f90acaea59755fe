"""Per-token NLL: against plain transformers, chunked against whole, and over the API by every protocol."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from patches import parse, patched
from service.evaluation.documents import from_text, from_token_ids
from service.evaluation.scoring import chunks
from service.evaluation.scoring.chunks import chunk_length, in_parts, shortened
from service.evaluation.scoring.token_scores import Nll, token_nll
from tests.models import tiny_model
from tests.service.conftest import TEXT, tiny_tokenizer


def plain_nll(folder: Path, ids: list[int], rope: dict[str, Any] | None) -> Nll:
    """No cache, no chunks, native rope_parameters: the loop anyone would write."""
    overrides = {"rope_parameters": {"rope_theta": 10000.0, **rope}} if rope else {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **overrides).eval()
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
    return F.cross_entropy(logits[:-1].double(), torch.tensor(ids[1:]), reduction="none").numpy()


def our_nll(folder: Path, ids: list[int], request: dict[str, Any], chunk: int) -> Nll:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with patched(model) as patch:
        slot = patch.slots.acquire(patch.resolve(parse(request), len(ids)))
        work = token_nll(patch, ids, slot, chunk)
        try:
            while True:
                next(work)
        except StopIteration as stop:
            return stop.value


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stories260K", "llama3-1m-atto"])
@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_real_models_score_as_plain_transformers_does(
    shared: Path, name: str, rope: dict[str, Any], times: int
) -> None:
    folder = shared / "data" / "models" / name
    text = (shared / "data" / "corpora" / "tinystories.txt").read_text()[:20000]
    ids = AutoTokenizer.from_pretrained(folder)(text)["input_ids"][: 512 * times]
    ours, plain = our_nll(folder, ids, rope, 512), plain_nll(folder, ids, rope)
    assert np.exp(ours.mean()) == pytest.approx(np.exp(plain.mean()), rel=1e-4)
    assert np.abs(ours - plain).max() < 2e-3


@pytest.mark.parametrize(
    "request_fields",
    [
        {"method": "default"},
        {"method": "alibi"},
        {"method": "self_extend", "neighbor_window": 16, "attention_temperature": "log_n"},
    ],
    ids=lambda fields: fields["method"],
)
def test_chunks_change_nothing(checkpoints: Path, request_fields: dict[str, Any]) -> None:
    ids = tiny_tokenizer()(TEXT)["input_ids"][:500]
    whole = our_nll(checkpoints / "tiny", ids, request_fields, 1024)
    for chunk in (16, 61, 499):
        np.testing.assert_allclose(
            our_nll(checkpoints / "tiny", ids, request_fields, chunk), whole, rtol=3e-6, atol=1e-5
        )


def patch_of(num_logits: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Any:
    model = SimpleNamespace(device=torch.device(device), dtype=dtype)
    return SimpleNamespace(model=model, num_logits=num_logits)


def test_chunks_shrink_with_the_vocabulary() -> None:
    assert chunk_length(512, patch_of(32_000)) == 512
    assert chunk_length(512, patch_of(1_000_000)) * 1_000_000 * 4 <= 64 << 20
    assert chunk_length(8, patch_of(100)) == 16


def test_chunks_of_a_card_are_longer() -> None:
    assert chunk_length(None, patch_of(32_000)) == 512
    assert chunk_length(None, patch_of(128_256, "cuda", torch.bfloat16)) == 2048
    assert chunk_length(None, patch_of(256_000, "cuda", torch.bfloat16)) == (1 << 20) // 1000
    assert chunk_length(700, patch_of(32_000, "cuda")) == 700


def test_logits_become_float32_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "LOGITS_BYTES", 3 * 4 * 8)
    logits = torch.randn(10, 8).bfloat16()
    parts = list(in_parts(logits))
    assert [part for part, _ in parts] == [slice(0, 3), slice(3, 6), slice(6, 9), slice(9, 10)]
    assert torch.equal(torch.cat([numbers for _, numbers in parts]), logits.float())


def test_chunks_shorten_with_the_context_and_less_in_a_wide_model() -> None:
    contexts = (0, 1024, 4096, 8192, 16_384, 131_072)
    lengths = []
    for wide in ({}, {"intermediate_size": 4096}):
        with patched(tiny_model("llama", **wide)[1]) as patch:
            lengths.append([shortened(patch, 512, context) for context in contexts])
            assert shortened(patch, 16, 131_072) == 16
    for each in lengths:
        assert each[:2] == [512, 512]
        assert each == sorted(each, reverse=True)
        assert each[-1] == 32
    assert lengths[0][2] < lengths[1][2] < 512


def test_the_cache_stays_transformers_own(checkpoints: Path) -> None:
    """A guard on the assumption behind chunking: a fresh forward hands back a growing cache."""
    model = AutoModelForCausalLM.from_pretrained(checkpoints / "tiny")
    output = model(torch.tensor([[2, 3, 4]]), use_cache=True)
    assert isinstance(output.cache, DynamicCache)


def score(client: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = client.post("/perplexity", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_curve_answers_every_length_from_one_pass(client: httpx.Client, checkpoints: Path) -> None:
    result = score(client, input=TEXT, methods=[{"method": "yarn", "factor": 4}], lengths=[64, 100, 256])
    method = result["methods"][0]
    assert method["passes"] == 1
    assert result["bos"] is True
    ids = [0, *tiny_tokenizer()(TEXT, add_special_tokens=False)["input_ids"]]
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    for length in method["lengths"]:
        plain = plain_nll(checkpoints / "tiny", ids[: length["length"]], rope)
        assert length["nll_mean"] == pytest.approx(plain.mean(), rel=1e-4)
        assert length["perplexity"] == pytest.approx(math.exp(plain.mean()), rel=1e-3)
        assert length["tokens_scored"] == length["length"] - 1
        text = tiny_tokenizer().decode(ids[1 : length["length"]])
        assert length["bytes_scored"] == len(text.encode())
        assert length["bits_per_byte"] == pytest.approx(plain.sum() / math.log(2) / len(text.encode()), rel=1e-4)


def test_a_length_dependent_method_takes_a_pass_per_length(client: httpx.Client, checkpoints: Path) -> None:
    result = score(client, input=TEXT, methods=[{"method": "dynamic", "factor": 2}], lengths=[64, 256])
    method = result["methods"][0]
    assert method["passes"] == 2
    assert len(set(method["frequency_hashes"].values())) == 2
    ids = [0, *tiny_tokenizer()(TEXT, add_special_tokens=False)["input_ids"]]
    for length in method["lengths"]:
        plain = plain_nll(checkpoints / "tiny", ids[: length["length"]], {"rope_type": "dynamic", "factor": 2.0})
        assert length["nll_mean"] == pytest.approx(plain.mean(), rel=1e-4)


@pytest.mark.parametrize("stride", [16, 32, 63])
def test_sliding_equals_a_loop_written_from_the_description(
    client: httpx.Client, checkpoints: Path, stride: int
) -> None:
    text = TEXT[:1500]
    result = score(client, input=text, lengths=[64], protocol="sliding", stride=stride)
    got = result["methods"][0]["lengths"][0]
    ids = tiny_tokenizer()(text, add_special_tokens=False)["input_ids"]
    window_means, nll_sum, scored, previous_end = [], 0.0, 0, 0
    for begin in range(0, len(ids), stride):
        end = min(begin + 63, len(ids))  # the BOS takes one of the 64
        target = end - previous_end
        nll = plain_nll(checkpoints / "tiny", [0, *ids[begin:end]], None)[-target:]
        window_means.append(nll.mean())
        nll_sum, scored, previous_end = nll_sum + nll.sum(), scored + target, end
        if end == len(ids):
            break
    assert got["tokens_scored"] == scored == len(ids)
    assert got["windows"] == len(window_means)
    assert got["perplexity"] == pytest.approx(math.exp(nll_sum / scored), rel=1e-4)
    assert got["perplexity_window_mean"] == pytest.approx(math.exp(np.mean(window_means)), rel=1e-4)


def test_disjoint_and_tail_over_documents_and_token_ids(client: httpx.Client, checkpoints: Path) -> None:
    tokenizer = tiny_tokenizer()
    documents = [tokenizer(TEXT[:1400], add_special_tokens=False)["input_ids"], TEXT[500:2500]]
    for protocol, extra in (("disjoint", {}), ("tail", {"tail": 16, "stride": 40})):
        result = score(client, input=documents, lengths=[32, 64], protocol=protocol, bos="never", **extra)
        assert [d["name"] for d in result["documents"]] == ["input[0]", "input[1]"]
        for length in result["methods"][0]["lengths"]:
            size, total, count = length["length"], 0.0, 0
            for document in documents:
                ids = (
                    tokenizer(document, add_special_tokens=False)["input_ids"]
                    if isinstance(document, str)
                    else document
                )
                stops = range(64, len(ids) + 1, 40) if protocol == "tail" else range(size, len(ids) + 1, size)
                for stop in stops:
                    nll = plain_nll(checkpoints / "tiny", ids[stop - size : stop], None)
                    nll = nll[-16:] if protocol == "tail" else nll
                    total, count = total + nll.sum(), count + len(nll)
            assert length["tokens_scored"] == count
            assert length["nll_sum"] == pytest.approx(total, rel=1e-4)
            assert length["documents"] == 2


def test_lengths_default_to_doubling_from_the_trained_length(client: httpx.Client) -> None:
    assert score(client, input=TEXT[:2000])["lengths"][:3] == [64, 128, 256]
    ranged = score(client, input=TEXT, lengths={"start": 64, "stop": 160, "step": 48})
    assert ranged["lengths"] == [64, 112, 160]


def test_the_trained_variant_is_measured_and_named(client: httpx.Client) -> None:
    result = score(client, input=TEXT, methods=[{"method": "default"}, {"method": "alibi"}], lengths=[128])
    assert [m["model"] for m in result["methods"]] == ["tiny", "tiny-alibi"]
    direct = score(client, input=TEXT, model="tiny-alibi", lengths=[128])
    assert direct["methods"][0]["lengths"] == result["methods"][1]["lengths"]


@pytest.mark.parametrize(
    ("change", "param", "says"),
    [
        ({"lengths": [64, 999_999]}, "lengths", "at most"),
        ({"lengths": []}, "lengths", "at least 1"),
        ({"lengths": [1]}, "lengths.0", "must be at least 2, not 1"),
        ({"lengths": {"start": 9, "stop": 8, "step": 1}}, "lengths", "stop must be at least start"),
        ({"methods": []}, "methods", "at least 1"),
        ({"methods": [{"method": "yarn", "factor": 0}]}, "methods.0.factor", "must be at least 1, not 0"),
        ({"methods": [{"method": "default"}] * 65}, "methods", "at most 64"),
        ({"methods": [{"method": "yarn", "factor": 2}], "model": "tiny-alibi"}, "methods.0", "without rotary"),
        ({"protocol": "curvy"}, "protocol", "sliding"),
        ({"stride": 5}, "stride", "stride has no meaning for protocol curve: use sliding or tail"),
        ({"tail": 5}, "tail", "tail has no meaning for protocol curve"),
        ({"windows": 5}, "windows", "windows has no meaning for protocol curve"),
        ({"background": True, "stream": True}, "background", "background excludes stream"),
        ({"lengths": 64}, "lengths", "must be a list of whole numbers, or an object with start, stop and step, not 64"),
        ({"protocol": "sliding", "stride": 500, "lengths": [64]}, "stride", "at most"),
        ({"protocol": "tail", "tail": 64, "lengths": [64]}, "tail", "below"),
        ({"input": ""}, "input", "at least 1"),
        ({"input": [5], "bos": "never"}, "input", "at least 2"),
        ({"input": [5, 99999]}, "input", "0..383"),
        ({"protocol": "sliding", "stride": 1, "lengths": [64]}, "lengths", "100000 a request"),
        ({"model": "nobody"}, "model", "tiny"),
    ],
)
def test_refusals(client: httpx.Client, change: dict[str, Any], param: str, says: str) -> None:
    answer = client.post("/perplexity", json={"input": TEXT, **change})
    error = answer.json()["error"]
    assert answer.status_code == (404 if param == "model" else 400), error
    assert error["param"] == param
    assert says in error["message"]


def test_byte_counts_of_text_and_of_token_ids_agree() -> None:
    tokenizer = tiny_tokenizer()
    text = "naïve café — 東京 🙂 plain"
    document = from_text("d", text, tokenizer)
    assert document.total_bytes == len(text.encode())
    assert document.bytes_between(0, 0) == 0
    assert from_token_ids("d", document.token_ids, tokenizer).total_bytes == len(text.encode())
    parts = [document.bytes_between(i, i + 1) for i in range(len(document.token_ids))]
    assert sum(parts) == len(text.encode())
