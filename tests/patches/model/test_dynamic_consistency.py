"""Dynamic NTK: one base for the whole request, and what a cache of keys with other bases does instead."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel

from benchmarks.quality.dynamic_consistency import growing_base
from patches import Patched, encode, parse, patched
from tests.methods import Fields
from tests.models import TRAINED_LENGTH, tiny_model, tiny_tokens
from tests.patches.forward import chunked_logits, logits_of, relative, slot_of

TOLERANCE = 2e-5
DYNAMIC: Fields = {"method": "dynamic", "factor": 2.0}


def theirs() -> PreTrainedModel:
    """A fresh model with transformers' own dynamic scaling, which keeps the longest length it has seen."""
    return tiny_model("llama", {"rope_type": "dynamic", "factor": 2.0}, attn_implementation="sdpa")[1]


def ours() -> PreTrainedModel:
    return tiny_model("llama", attn_implementation="sdpa")[1]


@torch.no_grad()
def step_by_step(model: PreTrainedModel, tokens: torch.Tensor, prompt: int) -> torch.Tensor:
    """Logits of a prompt and then token by token, as a server decodes; no slots."""
    cache, parts = DynamicCache(config=model.config), []
    for start, stop in [(0, prompt), *((n, n + 1) for n in range(prompt, tokens.shape[1]))]:
        parts.append(model(tokens[:, start:stop], cache=cache, use_cache=True).logits)
    return torch.cat(parts, dim=1)


def frozen(patch: Patched, tokens: torch.Tensor, chunks: Sequence[int]) -> torch.Tensor:
    """Logits under a base fixed for all tokens, fed in chunks of these sizes."""
    length = tokens.shape[1]
    slot = slot_of(patch, DYNAMIC, length)
    encoded = encode(torch.arange(length)[None], slot)
    cache = DynamicCache(config=patch.model.config)
    mask = torch.ones_like(tokens)
    result = chunked_logits(patch.model, tokens, mask, encoded, cache=cache, chunks=chunks)
    patch.slots.release(slot)
    return result


@settings(max_examples=15)
@given(st.integers(1, 3 * TRAINED_LENGTH), st.integers(0, 40))
def test_fixed_at_admission_is_one_pass_of_the_whole_request(prompt: int, new: int) -> None:
    """Decoding after any prompt gives what transformers computes of all tokens at once."""
    tokens = tiny_tokens(1, prompt + new, seed=prompt)
    with torch.no_grad():
        expected = theirs()(tokens, use_cache=False).logits
    with patched(ours()) as patch:
        assert relative(frozen(patch, tokens, [prompt] + [1] * new), expected) < TOLERANCE


@pytest.mark.parametrize("prompt", [1, 30, TRAINED_LENGTH])
def test_the_simulation_is_what_transformers_decodes(prompt: int) -> None:
    """Keys under the base of the moment they were written: one pass of ours, token by token there."""
    tokens = tiny_tokens(1, 3 * TRAINED_LENGTH, seed=prompt)
    expected = step_by_step(theirs(), tokens, prompt)
    with patched(ours()) as patch, growing_base(patch, parse(DYNAMIC)):
        at_once = logits_of(patch.model, tokens)
        assert relative(at_once, expected) < TOLERANCE
        assert relative(step_by_step(patch.model, tokens, 50), expected) < TOLERANCE
    with patched(ours()) as patch:
        assert relative(at_once[:, :TRAINED_LENGTH], logits_of(patch.model, tokens[:, :TRAINED_LENGTH])) < TOLERANCE


def test_the_simulation_ends_with_its_context() -> None:
    tokens = tiny_tokens(1, 2 * TRAINED_LENGTH)
    with patched(ours()) as patch:
        before = logits_of(patch.model, tokens)
        with growing_base(patch, parse(DYNAMIC)):
            assert relative(logits_of(patch.model, tokens), before) > 0.01
        assert torch.equal(logits_of(patch.model, tokens), before)


def test_cached_keys_of_other_bases_are_another_distribution() -> None:
    """Kullback-Leibler divergence of the last token's distribution from that of one pass, in nats."""
    tokens = tiny_tokens(1, 3 * TRAINED_LENGTH)
    with torch.no_grad():
        whole = theirs()(tokens, use_cache=False).logits[0, -1].log_softmax(-1)
    mixed = step_by_step(theirs(), tokens, TRAINED_LENGTH)[0, -1].log_softmax(-1)
    with patched(ours()) as patch:
        fixed = frozen(patch, tokens, [TRAINED_LENGTH] + [1] * (2 * TRAINED_LENGTH))[0, -1].log_softmax(-1)
    divergence = {name: float((whole.exp() * (whole - other)).sum()) for name, other in
                  (("mixed", mixed), ("fixed", fixed))}  # fmt: skip
    assert abs(divergence["fixed"]) < 1e-5
    assert divergence["mixed"] > 0.01


@pytest.mark.slow
def test_a_real_model_loses_by_it_what_dynamic_scaling_gains(shared: Path) -> None:
    """stories260K, trained at 512 tokens: mean loss in nats of the last 128 of 768 and of 2048."""
    folder, stories = shared / "data" / "models" / "stories260K", shared / "data" / "corpora" / "tinystories.txt"
    if not folder.is_dir() or not stories.is_file():
        pytest.skip(f"needs {folder.name} and {stories.name} beside the repository")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(folder)(stories.read_text(encoding="utf-8")[:60_000])["input_ids"]
    method: Fields = {"method": "dynamic"}
    with patched(model) as patch:
        for length in (768, 2048):
            windows = torch.tensor([ids[start : start + length] for start in range(0, 2 * 2048, 2048)])
            slot = slot_of(patch, method, length)
            consistent, plain = tail_loss(model, windows, slot), tail_loss(model, windows, 0)
            with growing_base(patch, parse(method)):
                mixed = tail_loss(model, windows, 0)
            assert mixed > consistent + 0.5, (length, mixed, consistent)
            assert mixed > plain, "worse than no scaling at all"


def tail_loss(model: PreTrainedModel, windows: torch.Tensor, slot: int) -> float:
    """Mean over the last 128 tokens of every window [windows, tokens]."""
    logprobs = logits_of(model, windows, slot)[:, -129:-1].log_softmax(-1)
    return float(-logprobs.gather(-1, windows[:, -128:, None]).mean())
