"""Hybrids in the padded engine: recurrent layers beside attention, each kind against its own ``generate``."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from structlog.testing import CapturingLogger
from transformers import PreTrainedModel

from patches import Patched, one_per_route, patched
from service import context
from service.context import RequestContext
from service.engine.choice import EngineChoice
from service.engine.engine import Engine
from service.engine.limits import EngineLimits
from service.engine.thread.out_of_memory import OutOfMemory
from service.engine.verification import verify
from service.evaluation.scoring.token_scores import Reading, token_nll
from tests.field.configurations import VOCAB_SIZE, tiny_model
from tests.service.conftest import tiny_tokenizer
from tests.service.engine.generating import finished
from tests.service.engine.padded.test_padded import run_out_of_memory_once, until_idle
from tests.service.evaluation.prompting import finish
from tests.service.serving import SHORT, events, idle, token_ids, wait_for
from tests.service.serving import serving as server

HYBRIDS = (
    "bailing_hybrid",
    "bamba",
    "falcon_h1",
    "glm5_next",
    "granitemoehybrid",
    "inkling_text",
    "inkling2_text",
    "jamba",
    "kimi_linear",
    "lfm2",
    "lfm2_moe",
    "lfm3",
    "minimax",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_5_text",
    "qwen3_next",
    "zamba",
    "zamba2",
)
INDEXED = ("deepseek_v32", "hy_v4", "qwen4_exp_text")
"""Three of the kinds that choose keys by the scores of an indexer. The indexer's own keys are in the cache too."""

APART = ("deepseek_v4", "minimax_m3_vl_text")
"""Kinds whose keys depend on their column in the cache, so that padding would change them."""

DROP_STATES = {"jamba", "zamba"}
"""Kinds that read a prompt in one forward: their layers drop the state at a second chunk."""

TEXT = "The ropes of the ways are long, and no longer. " * 20
EVALUATIONS: dict[str, dict[str, Any]] = {
    "perplexity": {"input": TEXT, "methods": ["default", "streaming:window=16"], "lengths": [64]},
    "passkey": {"methods": ["default"], "lengths": [220]},
    "probe": {"input": TEXT, "segment": 8, "methods": ["default"], "lengths": [64]},
}
NEW = 8
LIMITS = EngineLimits(cache_tokens=4096, score_tokens=64, max_batch_tokens=32)


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(3, VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def own(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    """Token ids of transformers' own greedy generation."""
    endless: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
    output = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)).long(), **endless)
    return [int(token) for token in output[0, len(prompt) :]]


@asynccontextmanager
async def serving(patch: Patched, limits: EngineLimits = LIMITS) -> AsyncIterator[Engine]:
    engine = Engine(patch, limits, eos_token_ids=(), choice=verify(patch))
    try:
        yield engine
    finally:
        engine.thread.stop(grace_s=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*HYBRIDS, *INDEXED, *APART])
async def test_tokens_are_those_of_generate_alone_and_among_others(kind: str) -> None:
    model, prompt = tiny_model(kind), tokens(40)
    expected = own(model, prompt)
    with patched(model) as patch:
        routes = one_per_route(patch.geometry, NEW)
        others = [(tokens(7 * n + 1, n), n + 4, routes[n % len(routes)]) for n in (0, 2, 3)]
        async with serving(patch) as engine:
            assert (engine.choice.kind, engine.choice.together) == ("padded", kind not in APART)
            assert patch.continues == (kind not in DROP_STATES)
            assert (await finished(engine, prompt, NEW)).token_ids == expected
            alone = [await finished(engine, *other) for other in others]
            left = asyncio.create_task(finished(engine, tokens(30), NEW, routes[-1]))
            among = asyncio.gather(finished(engine, prompt, NEW), *(finished(engine, *other) for other in others))
            await asyncio.sleep(0.05)
            left.cancel()
            generations = await among
            await until_idle(engine)
            assert engine.load()["cache_tokens_used"] == 0
    assert generations[0].token_ids == expected
    assert [each.token_ids for each in generations[1:]] == [each.token_ids for each in alone]


def test_the_check_joins_rows_and_finds_keys_that_depend_on_their_column() -> None:
    """The published sizes of DeepSeek-V4: a window of 128 tokens, and keys of 4 and of 128."""
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
    sizes = {"sliding_window": 128, "compress_rates": rates, "max_position_embeddings": 1024}
    with patched(tiny_model("deepseek_v4", **sizes)) as patch:
        choice = verify(patch)
    assert (choice.kind, choice.together) == ("padded", False)
    assert "the padded engine fails on it: a state of its cache, buffer_kv, grows" in str(choice.reason)


async def test_rows_that_do_not_join_in_service_have_a_forward_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a check that missed it. Every request is served; listings have the reason, and the log has it once."""
    log = CapturingLogger()
    monkeypatch.setattr("service.engine.padded.loop.log", log)
    model, prompts = tiny_model("deepseek_v4"), [tokens(count, count) for count in (40, 30, 17)]
    expected = [own(model, prompt) for prompt in prompts]
    with patched(model) as patch:
        engine = Engine(patch, LIMITS, eos_token_ids=(), choice=EngineChoice("padded", reason="no pages"))
        try:
            for _ in range(2):
                found = await asyncio.gather(*(finished(engine, prompt, NEW) for prompt in prompts))
                assert [each.token_ids for each in found] == expected
        finally:
            engine.thread.stop(grace_s=1.0)
    assert engine.thread.restarts == 0
    assert [call.args for call in log.calls] == [("rows_run_apart",)]
    assert not engine.choice.together
    assert re.fullmatch(
        "no pages; the padded engine fails on it in service: a state of its cache, .*", str(engine.choice.reason)
    )


def test_a_model_that_returns_no_cache_is_scored_only() -> None:
    model, ids = tiny_model("recurrent_gemma"), tokens(60)
    with torch.no_grad():
        logprobs = model(torch.tensor([ids]), use_cache=False).logits[0].double().log_softmax(-1)
    answered = logprobs[39:59].gather(-1, torch.tensor(ids[40:])[:, None])[:, 0].numpy()
    with patched(model) as patch:
        choice = verify(patch)
        assert not choice.generates
        assert "the padded engine fails on it: its forward returns no cache" in str(choice.reason)
        assert not patch.returns_cache
        reading = Reading(patch, 0)
        last = finish(reading.prefill(ids[:40], 16))
        for _ in range(2):
            scores = finish(reading.answer(last, ids[40:], 16))
            assert abs(scores.logprobs - answered).max() < 1e-5
            assert reading.length == 40
        greedy = finish(reading.decode(last, 3, ())).tolist()
    row = torch.tensor([ids[:40]])
    for token in greedy:
        assert int(model(row, use_cache=False).logits[0, -1].argmax()) == token
        row = torch.cat([row, torch.tensor([[token]])], 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", HYBRIDS)
def test_scores_are_those_of_the_plain_forward(kind: str) -> None:
    model, ids = tiny_model(kind), tokens(60)
    with torch.no_grad():
        logprobs = model(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
    expected = -logprobs[:-1].gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
    with patched(model) as patch:
        nll = finish(token_nll(patch, ids, 0, 16))
    assert torch.allclose(torch.tensor(nll).float(), expected, atol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*HYBRIDS, *INDEXED, *APART])
def test_an_answer_is_forgotten_after_it_is_scored(kind: str) -> None:
    with patched(tiny_model(kind)) as patch:
        untouched, asked = Reading(patch, 0), Reading(patch, 0)
        last = finish(untouched.prefill(tokens(30), 16))
        finish(asked.prefill(tokens(30), 16))
        first, again = (finish(asked.answer(last, tokens(9, seed=1), 16)) for _ in range(2))
        expected, found = (finish(reading.decode(last, 12, ())) for reading in (untouched, asked))
    assert (first.logprobs == again.logprobs).all()
    assert (expected == found).all()


@pytest.mark.slow
async def test_states_leave_room_for_one_request_of_any_tenant() -> None:
    """A state is larger than half of all keys and values: the second tenant waits, and has its turn."""
    model = tiny_model("olmo_hybrid", linear_key_head_dim=64, linear_value_head_dim=64)

    async def of(tenant: str, seed: int) -> list[int]:
        context.enter(RequestContext("", tenant=tenant))
        return (await finished(engine, tokens(60, seed), 20)).token_ids

    with patched(model) as patch:
        async with serving(patch, EngineLimits(cache_tokens=256, score_tokens=64, max_batch_tokens=32)) as engine:
            expected = [await of("anna", seed) for seed in range(3)]
            work = asyncio.gather(*(of(tenant, seed) for seed, tenant in enumerate(("anna", "anna", "ben"))))
            running = set()
            while not work.done():
                running.add(engine.load()["running"])
                await asyncio.sleep(0.001)
            assert max(running) == 1
            assert await work == expected


async def test_a_row_that_lost_its_state_computes_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("qwen3_5_text")
    with patched(model) as patch:
        async with serving(patch) as engine:
            expected = [(await finished(engine, tokens(20 + n, n), 12)).token_ids for n in range(3)]
            run_out_of_memory_once(monkeypatch, patch.model, rows=4)
            rest = [asyncio.create_task(finished(engine, tokens(20 + n, n), 12)) for n in range(3)]
            with pytest.raises(OutOfMemory, match="decoding"):
                await finished(engine, tokens(30), 40)
            assert [(await task).token_ids for task in rest] == expected


@pytest.mark.slow
def test_a_model_without_an_engine_is_scored_and_generates_nothing(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    ends = {"bos_token_id": 0, "eos_token_id": 1, "vocab_size": len(tokenizer)}
    tiny_model("recurrent_gemma", **ends).save_pretrained(tmp_path / "recurrent")
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "recurrent")
    with server(tmp_path / "recurrent") as (url, _):
        (listed,) = httpx.get(f"{url}/models").json()["models"]
        assert listed["engine"] == "none"
        assert "returns no cache" in listed["engine_reason"]
        for evaluation, body in EVALUATIONS.items():
            answer = httpx.post(f"{url}/{evaluation}", json=body, timeout=60)
            assert answer.status_code == 200, answer.text
        asked: dict[str, dict[str, Any]] = {
            "generate": {"prompt": "a"},
            "v1/completions": {"prompt": "a", "max_tokens": 4},
            "v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
        }
        for route, body in asked.items():
            refused = httpx.post(f"{url}/{route}", json=body)
            assert refused.status_code == 400, refused.text
            error = refused.json()["error"]
            assert (error["code"], error["param"]) == ("cannot_generate", "model")
            assert "model 'recurrent' is scored only" in error["message"]
            assert "returns no cache" in error["message"]
        echoed = {"prompt": TEXT, "max_tokens": 0, "echo": True, "logprobs": 1}
        scored = httpx.post(f"{url}/v1/completions", json=echoed)
        assert scored.status_code == 200, scored.text


@pytest.mark.slow
def test_a_hybrid_is_served(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    ends = {"bos_token_id": 0, "eos_token_id": 1, "vocab_size": len(tokenizer)}
    tiny_model("olmo_hybrid", **ends).save_pretrained(tmp_path / "hybrid")
    tokenizer.save_pretrained(tmp_path / "hybrid")
    with server(tmp_path / "hybrid") as (url, app):
        (listed,) = httpx.get(f"{url}/models").json()["models"]
        assert listed["engine"] == "padded"
        assert "layers of the types linear_attention" in listed["engine_reason"]
        assert len(token_ids(url)) == 12
        assert token_ids(url, cache_salt="a") == token_ids(url)
        streamed = events(url, **SHORT, pe={"method": "yarn", "factor": 2})
        assert sum(len(data["token_ids"]) for name, data in streamed if "text" in data) == 12
        for evaluation, body in EVALUATIONS.items():
            answer = httpx.post(f"{url}/{evaluation}", json=body, timeout=60)
            assert answer.status_code == 200, answer.text
        wait_for(lambda: idle(app))
