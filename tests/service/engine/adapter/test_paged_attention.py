"""The engine on block tables: the tokens of every encoding, in mixed batches, are those of the other attention."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers.generation.continuous_batching.cache import PagedAttentionMemoryHandler

from patches import Method, PagedBatch, Patched, one_per_route, parse, patched
from patches.attention.paged import batch as paged_batch
from patches.attention.paged.step import Step
from service.engine.adapter.pages.cache import EncodingCache, Table
from service.engine.choice import CHOICES, Attention, AttentionUnavailable, EngineChoice, GraphsUnavailable, choices
from service.engine.limits import EngineLimits
from service.engine.request import EngineRequest, SamplingParams
from service.engine.verification import verify
from service.models.checkpoint.loading import ModelLoadError
from service.models.registry import ModelRegistry
from service.settings import Settings
from tests.methods import Fields, one_per_shape, rows
from tests.models import TRAINED_LENGTH, VOCAB_SIZE, by_tier, demo_model, tiny_model
from tests.service.serving import serving, token_ids

WINDOWED: list[Fields] = [
    {"method": "streaming", "sink_tokens": 5, "window": 11},
    {"method": "streaming", "sink_tokens": 0, "window": 9, "absolute_positions": True},
    {"method": "lm_infinite", "n_global": 3, "n_local": 9},
]
"""Encodings whose pages between the first keys and the window are evicted."""

EAGER, SEGMENTS = EngineChoice(attention="eager"), EngineChoice()
NEW = 4
LIMITS = EngineLimits(4096, 0, page_size=4, max_batch_tokens=48, max_requests_per_batch=64)

FAMILIES = ("llama", "gemma3", "gpt_oss", "deepseek_v3", "llama4", "bloom", "gpt2", "gemma2", "cohere2", "diffllama")
"""Plain; a rotary type of layers that slide; sinks; two widths; chunks and layers without rotation. A bias; added
positions; a soft limit; windows; two attentions in a layer."""


def every_encoding(patch: Patched) -> list[Method]:
    """One of every shape of recipe that the model takes."""
    geometry, fitting = patch.geometry, list[Fields]()
    for row in rows(geometry.rotary_dim // 2 or 8, TRAINED_LENGTH, geometry.num_attention_heads):
        for request in row.requests:
            try:
                patch.resolve(parse(request), TRAINED_LENGTH)
            except ValueError:
                continue
            fitting.append(request)
    return [parse(fields) for fields in one_per_shape(fitting, geometry, TRAINED_LENGTH)]


def requests_of(patch: Patched, methods: list[Method], prompts: list[list[int]]) -> list[EngineRequest]:
    requests = []
    for method, prompt in zip(methods, prompts, strict=True):
        resolved = patch.resolve(method, len(prompt) + NEW)
        slot = patch.slots.acquire(resolved)
        sampling, window = SamplingParams(logprobs=3), patch.sink_window(resolved)
        requests.append(EngineRequest(prompt, slot, (None, None, resolved), NEW, sampling, sink_window=window))
    return requests


def generated(
    patch: Patched, choice: EngineChoice, methods: list[Method], prompts: list[list[int]], limits: EngineLimits = LIMITS
) -> tuple[list[list[int]], torch.Tensor, list[EngineRequest]]:
    """Tokens and their log-probabilities [requests, NEW]."""
    requests = requests_of(patch, methods, prompts)
    tokens = choice.built(patch, limits).run_to_end(requests)
    for request in requests:
        patch.slots.release(request.slot)
    return tokens, torch.tensor([[step.logprob for step in request.logprobs] for request in requests]), requests


def prompts_for(methods: list[Method], longest: int, seed: int = 0) -> list[list[int]]:
    """Prompts of other lengths each, none of which begins like another."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, longest, (len(methods),), generator=generator).tolist()
    return [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


def queries_of(batch: PagedBatch) -> list[int]:
    """New tokens of each sequence."""
    step = batch.steps[0]
    assert isinstance(step, Step)
    return [sequence.queries for sequence in step.sequences]


@pytest.mark.parametrize("family", by_tier(FAMILIES))
def test_a_batch_of_every_encoding_has_the_same_tokens(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[PagedBatch] = []
    made = paged_batch.paged_batch

    def noted(*args: Any) -> PagedBatch:
        steps.append(made(*args))
        return steps[-1]

    monkeypatch.setattr("service.engine.adapter.inputs.paged_batch", noted)
    with patched(tiny_model(family)[1]) as patch:
        methods = every_encoding(patch)
        prompts = prompts_for(methods, 50 if patch.geometry.table_rows is None else 30)
        tokens, values, _ = generated(patch, EAGER, methods, prompts)
        ran = len(steps)
        expected, expected_values, _ = generated(patch, SEGMENTS, methods, prompts)
    assert tokens == expected
    assert torch.allclose(values, expected_values, atol=2e-4)
    queries = [queries_of(batch) for batch in steps]
    assert ran == len(steps) > NEW, "the other attention makes none"
    assert any(1 in step and max(step) > 1 for step in queries), "prefill beside decoding"
    assert any(len(step) > 1 and set(step) == {1} for step in queries), "decoding alone"


def test_pages_out_of_reach_leave_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    methods = [parse(fields) for fields in (*WINDOWED, {"method": "default"})]
    evicted: list[int] = []
    made = paged_batch.paged_batch

    def noted(groups: Any, *args: Any) -> PagedBatch:
        evicted.extend(sequence.evicted_pages for sequence in groups[0])
        return made(groups, *args)

    monkeypatch.setattr("service.engine.adapter.inputs.paged_batch", noted)
    with patched(tiny_model("llama")[1]) as patch:
        prompts = prompts_for(methods, 4, seed=3)
        prompts = [prompt * 30 for prompt in prompts]
        tokens, values, _ = generated(patch, EAGER, methods, prompts)
        expected, expected_values, _ = generated(patch, SEGMENTS, methods, prompts)
    assert max(evicted) > 5
    assert tokens == expected
    assert torch.allclose(values, expected_values, atol=2e-4)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_prefixes_are_shared_within_an_encoding(family: str) -> None:
    """A second model of layers that slide: on block tables they cache every key, so prefixes can be shared."""
    prompt = prompts_for([parse({"method": "default"})], 60, seed=1)[0] * 3
    methods = [
        parse({"method": "default"}),
        parse("string:shifted_offset=6,small_local_value=2"),
        parse({"method": "default"}),
    ]
    sizes = {"sliding_window": 10} if family == "mistral" else {}
    with patched(tiny_model(family, **sizes)[1]) as patch:
        requests = requests_of(patch, methods, [prompt] * 3)
        manager = EAGER.built(patch, replace(LIMITS, max_requests_per_batch=1))
        tokens = manager.run_to_end(requests)
        alone = [EAGER.built(patch, LIMITS).run_to_end(requests_of(patch, [method], [prompt]))[0] for method in methods]
    assert tokens == alone
    shared = (len(prompt) - 1) // LIMITS.page_size * LIMITS.page_size
    assert [request.cached_tokens for request in requests] == [0, 0, shared]


def test_a_step_that_runs_out_of_memory_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[int] = []
    attend = PagedBatch.attend

    def fails_once(self: PagedBatch, *args: Any) -> torch.Tensor:
        if len(queries_of(self)) == 3 and not failed:
            failed.append(max(queries_of(self)))
            raise torch.OutOfMemoryError("CUDA out of memory")
        return attend(self, *args)

    with patched(tiny_model("llama")[1]) as patch:
        methods = one_per_route(patch.geometry, 40)[:3]
        prompts = [prompt[:10] for prompt in prompts_for(methods, 30, seed=2)]
        _, expected, _ = generated(patch, EAGER, methods, prompts)
        monkeypatch.setattr(PagedBatch, "attend", fails_once)
        requests = requests_of(patch, methods, prompts)
        with pytest.raises(RuntimeError, match="memory"):
            EAGER.built(patch, LIMITS).run_to_end(requests)
    assert len(failed) == 1
    assert sum(request.failure is not None for request in requests) == 1
    for request, values in zip(requests, expected, strict=True):
        if request.failure is None:
            assert torch.allclose(torch.tensor([step.logprob for step in request.logprobs]), values, atol=1e-5)


# The choice


def test_the_choice_of_attention() -> None:
    cpu = torch.device("cpu")
    assert choices("segments", cpu) == CHOICES
    assert choices("eager", cpu) == (EAGER, *CHOICES)
    if not paged_batch.runs_triton(cpu):
        with pytest.raises(AttentionUnavailable, match=r"needs a CUDA device and the package triton.* 'eager'"):
            choices("triton", cpu)


def test_cuda_takes_the_kernel_where_triton_is(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    monkeypatch.setattr("patches.attention.paged.batch.find_spec", lambda name: None)
    with pytest.raises(AttentionUnavailable):
        choices("triton", cuda)
    monkeypatch.setattr("patches.attention.paged.batch.find_spec", lambda name: name)
    kernel = EngineChoice(attention="triton")
    captured = replace(kernel, graphs=True)
    others = CHOICES[1:]  # steps are recorded on a CPU only
    assert choices("triton", cuda) == choices("triton", cuda, True) == (captured, kernel, *others)
    assert choices("triton", cuda, False) == (kernel, *others)
    assert (str(captured), str(kernel)) == (
        "paged engine (triton attention, CUDA graphs)",
        "paged engine (triton attention)",
    )


@pytest.mark.parametrize(("attention", "device"), [("segments", "cuda"), ("eager", "cuda"), ("segments", "cpu")])
def test_graphs_need_the_kernel_and_a_card(attention: Attention, device: str) -> None:
    match = f"CUDA graphs need a CUDA device and the attention 'triton', and they are {device} and '{attention}'"
    with pytest.raises(GraphsUnavailable, match=match):
        choices(attention, torch.device(device), True)
    assert not any(choice.graphs for choice in choices(attention, torch.device(device)))


@pytest.mark.parametrize("family", ["shaw", "transformer_xl"])
def test_an_encoding_without_a_row_keeps_the_other_attention_and_says_why(family: str) -> None:
    with patched(demo_model(family)) as patch:
        choice = verify(patch, "eager")
    assert (choice.kind, choice.attention) == ("paged", "segments")
    assert "(eager attention) fails on it: scores by distance that read the weights of each layer" in str(choice.reason)


# At start


@pytest.mark.slow
def test_a_server_says_which_attention_it_runs(checkpoints: Path, server: str) -> None:
    encodings: list[Fields] = [{"method": "default"}, {"method": "self_extend", "group_size": 4, "neighbor_window": 8}]
    body = {"prompt": "the quick brown fox " * 4, "max_new_tokens": 8, "temperature": 0}
    with serving(checkpoints, attention="eager") as (url, _):
        attentions = {info["attention"] for info in httpx.get(f"{url}/models").json()["models"]}
        graphs = {info["cuda_graphs"] for info in httpx.get(f"{url}/models").json()["models"]}
        tokens = [token_ids(url, **body, pe=pe) for pe in encodings]
        metrics = httpx.get(f"{url}/metrics").text.splitlines()
    lines = [line for line in metrics if line.startswith("ropeway_engine_info")]
    steps = [line for line in metrics if line.startswith("ropeway_engine_steps_total")]
    assert (attentions, graphs) == ({"eager"}, {False})
    assert len(steps) == 1
    assert 'graph="none"' in steps[0]
    assert 'variant="none"' in steps[0]
    assert float(steps[0].split()[-1]) >= 16
    assert lines
    assert all('attention="eager",cuda_graphs="false",engine="paged"' in line for line in lines)
    assert all(line.endswith(" 1.0") for line in lines)
    assert tokens == [token_ids(server, **body, pe=pe) for pe in encodings]


def test_a_server_refuses_an_attention_that_the_machine_cannot_run(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("patches.attention.paged.batch.find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match="ROPEWAY_ATTENTION: attention 'triton' needs a CUDA device"):
        ModelRegistry(Settings(_env_file=None, model=str(checkpoints), device="cpu", attention="triton"))


def test_a_server_refuses_graphs_that_the_machine_cannot_run(checkpoints: Path) -> None:
    with pytest.raises(ModelLoadError, match="ROPEWAY_CUDA_GRAPHS: CUDA graphs need a CUDA device"):
        ModelRegistry(Settings(_env_file=None, model=str(checkpoints), device="cpu", cuda_graphs=True))


def test_only_our_limits_size_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers counts masks and copies of keys, and would refuse a cache for most of a card's memory."""

    def little(self: PagedAttentionMemoryHandler) -> int:
        return 1

    monkeypatch.setattr(PagedAttentionMemoryHandler, "get_available_memory", little)
    with patched(tiny_model("llama")[1]) as patch:
        methods = [parse({"method": "default"})]
        assert SEGMENTS.built(patch, LIMITS).run_to_end(requests_of(patch, methods, [[5, 9, 7]]))
    assert PagedAttentionMemoryHandler.get_available_memory is little


def test_pages_are_those_of_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when equal prefixes become the same blocks: then a request gets others, and as many as before."""
    last: dict[str, tuple[int, ...]] = {}
    swapped = 0
    remembered = EncodingCache.pages_of

    def checked(self: EncodingCache, request_id: str) -> list[Table]:
        nonlocal swapped
        found = remembered(self, request_id)
        (table,), before = found, last.get(request_id, ())
        swapped += table.pages[: len(before)] != before
        last[request_id] = table.pages
        kept = self.tables.pop((request_id, 0))
        assert found == remembered(self, request_id)
        self.tables[request_id, 0] = kept
        return found

    monkeypatch.setattr(EncodingCache, "pages_of", checked)
    with patched(tiny_model("llama")[1]) as patch:
        methods = [parse({"method": "default"})] * 3
        prompts = [list(range(3, 40))] * 2 + [list(range(5, 50))]
        tokens = EAGER.built(patch, LIMITS).run_to_end(requests_of(patch, methods, prompts))
    assert tokens[0] == tokens[1]
    assert swapped > 0
