"""The ``pe`` of an answer, sent back: the same encoding, the same tokens and the same numbers, on every route."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from service.models import architecture
from tests.methods import OTHER_ROWS, RELATIVE_ROWS, Fields, rows
from tests.service.conftest import TEXT, tiny_checkpoint, tiny_tokenizer
from tests.service.serving import serving

PROMPT = TEXT[:260]
"""Longer than the models were trained for, so that what depends on the length is not at its start."""

NEW = 8
ROPE = {"rope_theta": 10_000.0, "original_max_position_embeddings": 64}
NATIVE: dict[str, Fields] = {
    "yarn": {"rope_type": "yarn", "factor": 4.0, **ROPE},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ROPE},
    "longrope": {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 4.0, **ROPE},
}
"""Scalings that a checkpoint ships."""

ON_A_SCALED_MODEL: list[Fields] = [
    {"method": "default"},
    {"method": "default", "attention_temperature": "log_n"},
    {"method": "default", "rope_theta": 20_000.0},
    {"method": "self_extend", "neighbor_window": 16},
    {"method": "self_extend", "neighbor_window": 16, "base": "default"},
    {"method": "yarn", "factor": 2.0, "attention_temperature": {"kind": "yarn", "factor": 2.0, "rotated_only": True}},
]
REQUESTS: dict[str, list[Fields]] = {
    "tiny": [request for row in rows(pairs=8, trained_length=64, heads=4) for request in row.requests],
    **dict.fromkeys(NATIVE, ON_A_SCALED_MODEL),
    **{
        family: [r for row in OTHER_ROWS if row.family == family for r in row.requests] + [{"method": "default"}]
        for family in ("learned", "sinusoidal")
    },
    **{row.name: [*row.requests, {"method": "default"}] for row in RELATIVE_ROWS},
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("echoed")
    tiny_checkpoint(folder / "tiny")
    for name, parameters in NATIVE.items():
        tiny_checkpoint(folder / name, rope_parameters=parameters)
    architecture.register()
    for family in ("learned", "sinusoidal", "shaw", "transformer_xl"):
        family_checkpoint(folder / family, family)
    limits = {"max_prompts": 128, "max_methods": 128, "cache_tokens": 1 << 15, "chat_template": "plain"}
    with serving(folder, **limits) as (url, _), httpx.Client(base_url=url, timeout=120) as client:
        yield client


def family_checkpoint(folder: Path, family: str) -> None:
    """A random model of 256 positions, large enough for the prompt."""
    tokenizer = tiny_tokenizer()
    torch.manual_seed(0)
    config = architecture.RopewayDemoConfig(
        position_family=family,
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        initializer_range=0.2,
        eos_token_id=1,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def post(client: httpx.Client, path: str, **body: Any) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def named_by_itself(pe: Fields) -> Fields:
    """The second answer's encoding: it was requested by the name of the encoding in effect."""
    return {**pe, "requested": pe["method"]}


@pytest.mark.parametrize("model", REQUESTS)
def test_generate(client: httpx.Client, model: str) -> None:
    def generate(encodings: list[Fields]) -> list[Any]:
        body = {"model": model, "prompt": PROMPT, "max_new_tokens": NEW, "logprobs": 0}
        return list(post(client, "/generate", pe=encodings, **body)["results"])

    first = generate(REQUESTS[model])
    again = generate([result["pe"] for result in first])
    for before, after in zip(first, again, strict=True):
        assert after["pe"] == named_by_itself(before["pe"])
        assert after["token_ids"] == before["token_ids"]
        logprobs = [[token["logprob"] for token in result["logprobs"]] for result in (before, after)]
        assert logprobs[1] == pytest.approx(logprobs[0], abs=1e-4), "up to how the batch was packed"


@pytest.mark.parametrize("model", REQUESTS)
def test_perplexity(client: httpx.Client, model: str) -> None:
    """Every fifth request, easy and hard in turn: ``/generate`` takes all of them."""

    def measure(encodings: list[Fields]) -> list[Any]:
        body = {"model": model, "input": TEXT[:560], "lengths": [32, 128], "protocol": "disjoint"}
        return list(post(client, "/perplexity", methods=encodings, **body)["methods"])

    first = measure(REQUESTS[model][::5])
    again = measure([method["pe"] for method in first])
    for before in first:  # an own encoding and its name are one when sent back, and measured once
        (after,) = [method for method in again if method["pe"] == named_by_itself(before["pe"])]
        assert after["frequency_hashes"] == before["frequency_hashes"]
        assert after["lengths"] == before["lengths"]


@pytest.mark.parametrize("model", ["tiny", "yarn", "learned", "shaw"])
def test_completions(client: httpx.Client, model: str) -> None:
    """Every seventh request, easy and hard in turn, of a model of each family."""

    def complete(encoding: Fields) -> Any:
        body = {"model": model, "prompt": PROMPT, "max_tokens": NEW, "temperature": 0, "logprobs": 1, "echo": True}
        return post(client, "/v1/completions", pe=encoding, **body)["choices"][0]

    for encoding in REQUESTS[model][::7]:
        before = complete(encoding)
        after = complete(before["pe"])
        logprobs = [answer.pop("logprobs") for answer in (before, after)]
        assert after == {**before, "pe": named_by_itself(before["pe"])}
        assert logprobs[1]["tokens"] == logprobs[0]["tokens"]
        first, again = (answer["token_logprobs"][1:] for answer in logprobs)
        assert again == pytest.approx(first, abs=1e-4), "up to rounding"


def test_every_other_evaluation(client: httpx.Client) -> None:
    fields: Fields = {"input": TEXT[:3000], "methods": ["dynamic", "yarn:4"]}
    grid: Fields = {"lengths": [256, 320], "samples": 1, "max_new_tokens": 2}
    for path, body in {
        "/long_perplexity": {"lengths": [64, 128], "long_context": 64, "short_context": 16, "stride": 16},
        "/probe": {"lengths": [32, 128], "distances": [16], "queries": 4, "samples": 1, "segment": 8},
        "/passkey": {**grid, "depths": [0.5], "digits": 2, "input": None},
        "/sweep": {"evaluations": [{"evaluation": "perplexity", "input": TEXT[:3000]}], "lengths": [64, 128, 256]}
        | {"target": {"length": 128}, "input": ...},
    }.items():
        given = {name: value for name, value in (fields | body).items() if value is not ...}
        first = post(client, path, **given)
        sent = [method["pe"] for method in first["methods"]]
        again = post(client, path, **{**given, "methods": sent})
        names = [named_by_itself(pe) for pe in sent]
        # A sweep measures the checkpoint's own encoding as well, before those that were asked for.
        assert [method["pe"] for method in again["methods"]][-len(names) :] == names, path


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"frequency_hash": "0123456789ab"}, "frequency_hash: '0123456789ab' was sent and "),
        ({"factor": 8.0}, "attention_factor: "),
        ({"layers": {"slots": 40}}, "layers: {'slots': 40} was sent and {'slots': 2} is true here"),
    ],
    ids=["hash", "factor", "layers"],
)
def test_what_does_not_follow_is_refused_on_every_route(client: httpx.Client, change: Fields, says: str) -> None:
    whole = post(client, "/generate", model="tiny", prompt=[5, 6, 7], pe="yarn:4", max_new_tokens=1)
    pe = whole["results"][0]["pe"] | change
    for path, body, param in (
        ("/generate", {"prompt": [5], "pe": pe, "max_new_tokens": 1}, "pe"),
        ("/generate", {"prompt": [5], "pe": ["default", pe], "max_new_tokens": 1}, "pe.1"),
        ("/v1/completions", {"prompt": [5], "pe": pe, "max_tokens": 1}, "pe"),
        ("/perplexity", {"input": TEXT[:500], "methods": [pe], "lengths": [32]}, "methods.0"),
        ("/jobs", {"evaluation": "perplexity", "input": TEXT[:500], "methods": [pe], "lengths": [32]}, "methods.0"),
        ("/sweep", {"methods": [pe], "lengths": [64]}, "methods"),
    ):
        answer = client.post(path, json={"model": "tiny", **body})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param), path
        assert says in error["message"], path


def test_another_length_is_refused_where_it_changes_the_encoding(client: httpx.Client) -> None:
    def generate(tokens: int, pe: Any) -> httpx.Response:
        body = {"model": "tiny", "prompt": [5] * tokens, "pe": pe, "max_new_tokens": 10}
        return client.post("/generate", json=body)

    pe = generate(20, "dynamic").json()["results"][0]["pe"]
    assert pe["reserved_length"] == 30
    within = generate(54, pe)
    assert within.status_code == 200
    assert within.json()["results"][0]["pe"]["frequency_hash"] == pe["frequency_hash"]
    refused = generate(90, pe)
    assert refused.status_code == 400
    assert "reserved_length: 30 was sent and 100 is true here" in refused.json()["error"]["message"]


def test_a_factor_of_a_sweep_does_not_change_an_answers_encoding(client: httpx.Client) -> None:
    pe = post(client, "/generate", model="tiny", prompt=[5], pe="yarn:4", max_new_tokens=1)["results"][0]["pe"]
    refused = client.post("/sweep", json={"model": "tiny", "methods": [pe], "factors": [2, 4], "lengths": [64]})
    assert refused.status_code == 400
    assert "has its factor already" in refused.json()["error"]["message"]


def test_a_job_keeps_what_must_follow(client: httpx.Client) -> None:
    pe = post(client, "/generate", model="tiny", prompt=[5], pe="yarn:4", max_new_tokens=1)["results"][0]["pe"]
    body = {"evaluation": "perplexity", "model": "tiny", "input": TEXT[:500], "methods": [pe], "lengths": [32]}
    job = client.post("/jobs", json=body)
    assert job.status_code == 202, job.text
    assert client.get(f"/jobs/{job.json()['id']}").json()["request"]["methods"] == [pe]


def test_an_alias_and_its_own_answer(client: httpx.Client) -> None:
    def complete(**body: Any) -> httpx.Response:
        return client.post("/v1/completions", json={"prompt": [5, 6], "max_tokens": 2, "temperature": 0, **body})

    pe = complete(model="tiny@yarn:4").json()["choices"][0]["pe"]
    assert complete(model="tiny@yarn:4", pe=pe).json()["choices"][0]["pe"] == pe
    refused = complete(model="tiny@yarn:8", pe=pe)
    assert refused.status_code == 400
    assert "already names an encoding" in refused.json()["error"]["message"]


@pytest.mark.parametrize("pe", ["default", "auto"])
def test_a_chat_without_max_tokens_ends_with_the_table(client: httpx.Client, pe: str) -> None:
    chat = {"model": "learned", "messages": [{"role": "user", "content": "Hi"}], "ignore_eos": True}
    answer = post(client, "/v1/chat/completions", **chat, pe=pe)
    assert answer["usage"]["total_tokens"] == 256
    assert answer["choices"][0]["finish_reason"] == "length"
    longer = client.post("/v1/chat/completions", json={**chat, "pe": pe, "max_tokens": 256})
    assert (longer.status_code, longer.json()["error"]["param"]) == (400, "pe")
    other = client.post("/v1/chat/completions", json={**chat, "pe": "yarn:4"})
    assert (other.status_code, other.json()["error"]["param"]) == (400, "pe")
