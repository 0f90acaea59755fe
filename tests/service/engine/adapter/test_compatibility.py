"""A transformers whose private parts differ is refused at start-up, by both versions and the difference."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import transformers
from transformers.generation.continuous_batching import continuous_api
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.cache_allocators import FullAttentionCacheAllocator
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.continuous_batching.scheduler import FIFOScheduler

from patches import UnsupportedModel, patched
from service.engine.adapter.compatibility import ATTRIBUTES, EXPECTED, IncompatibleTransformers
from service.engine.verification import verify
from tests.models import tiny_model

Double = Callable[[pytest.MonkeyPatch], None]


def another_class(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(continuous_api, "ModelRunner", type("GraphRunner", (ModelRunner,), {}))


def missing_attribute(patch: pytest.MonkeyPatch) -> None:
    patch.delattr(FIFOScheduler.__bases__[0], "_get_waiting_candidates")


def missing_method(patch: pytest.MonkeyPatch) -> None:
    patch.delattr(ModelRunner, "_sample")


def taken_name(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PagedAttentionCache, "numbers", {}, raising=False)


def other_parameters(patch: pytest.MonkeyPatch) -> None:
    def free_blocks(self: Any, request_id: str, keep: bool = True) -> None:
        raise AssertionError("never called")

    patch.setattr(PagedAttentionCache, "free_blocks", free_blocks)


def loop_with_other_parameters(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(continuous_api.ContinuousBatchingManager, "_generation_loop_body", lambda self, processor: True)


def requests_in_another_order(patch: pytest.MonkeyPatch) -> None:
    prepare = ContinuousBatchingIOs.prepare_batch_tensors

    def reversed_requests(  # noqa: PLR0913 -- the parameters are those of transformers
        self: ContinuousBatchingIOs,
        requests_in_batch: list[Any],
        logits_processors: Any,
        use_decode_fast_path: bool,
        num_q_tokens: int,
        max_kv_read: int,
        use_padding: bool,
    ) -> None:
        arguments = (logits_processors, use_decode_fast_path, num_q_tokens, max_kv_read, use_padding)
        prepare(self, requests_in_batch[::-1], *arguments)

    patch.setattr(ContinuousBatchingIOs, "prepare_batch_tensors", reversed_requests)


def asked_twice(patch: pytest.MonkeyPatch) -> None:
    extend = PagedAttentionCache.extend_read_and_write_indices

    def asks_again(
        self: Any, request_id: str, past_length: int, query_length: int, read_index: Any, write_index: Any
    ) -> Any:
        for allocator in self.cache_allocators.values():
            allocator.get_seqlen_k(past_length, query_length)
        return extend(self, request_id, past_length, query_length, read_index, write_index)

    patch.setattr(PagedAttentionCache, "extend_read_and_write_indices", asks_again)


def never_asked(patch: pytest.MonkeyPatch) -> None:
    def prepares_nothing(  # noqa: PLR0913 -- the parameters are those of transformers
        self: ContinuousBatchingIOs,
        requests_in_batch: list[Any],
        logits_processors: Any,
        use_decode_fast_path: bool,
        num_q_tokens: int,
        max_kv_read: int,
        use_padding: bool,
    ) -> None:
        pass

    patch.setattr(ContinuousBatchingIOs, "prepare_batch_tensors", prepares_nothing)


def limit_read_first(patch: pytest.MonkeyPatch) -> None:
    process = FIFOScheduler._process_candidates

    def reads_the_limit_first(self: Any, candidates: Any, *arguments: Any) -> Any:
        limit = self.cache.read_cache_limit
        tokens = [self._infer_request_tokens(state, set()) for state in candidates]
        fits = self.cache.can_store_request_tokens(candidates[0], min(limit, len(tokens)))
        return process(self, candidates, *arguments) if fits else None

    patch.setattr(FIFOScheduler, "_process_candidates", reads_the_limit_first)


BROKEN: dict[str, tuple[Double, str]] = {
    "another class": (another_class, "builds GraphRunner in place of ModelRunner"),
    "an attribute is missing": (missing_attribute, "FIFOScheduler has no _get_waiting_candidates"),
    "a method is missing": (missing_method, "ModelRunner has no _sample"),
    "a name is taken": (taken_name, "PagedAttentionCache already uses the name numbers"),
    "other parameters": (other_parameters, r"PagedAttentionCache.free_blocks takes \(self, request_id, keep\)"),
    "a loop with other parameters": (
        loop_with_other_parameters,
        r"ContinuousBatchingManager._generation_loop_body takes \(self, processor\)",
    ),
    "requests in another order": (requests_in_another_order, "get_seqlen_k is not called once per request"),
    "lengths asked twice": (asked_twice, "get_seqlen_k is not called once per request"),
    "lengths never asked": (never_asked, "get_seqlen_k is not called for every request"),
    "the limit is read first": (limit_read_first, "does not use _infer_request_tokens, read_cache_limit"),
}


@pytest.mark.parametrize(("double", "difference"), BROKEN.values(), ids=BROKEN)
def test_a_difference_is_named_with_both_versions(
    double: Double, difference: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    double(monkeypatch)
    versions = f"written for transformers {EXPECTED}, and {transformers.__version__} is installed: "
    with patched(tiny_model("llama")[1]) as patch, pytest.raises(UnsupportedModel, match=versions) as refused:
        verify(patch)
    assert isinstance(refused.value, IncompatibleTransformers)
    refused.match(difference)


def test_the_installed_version_is_the_one_expected() -> None:
    assert transformers.__version__.startswith(f"{EXPECTED}.")
    with patched(tiny_model("llama")[1]) as patch:
        verify(patch)


def test_every_adopted_part_has_its_attributes_listed() -> None:
    assert FullAttentionCacheAllocator in ATTRIBUTES
    assert all(inspect.isclass(part) and names for part, names in ATTRIBUTES.items())
