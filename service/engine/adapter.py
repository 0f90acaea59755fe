"""The one adapter around transformers' continuous batching. Every reach into its insides is in this file.

Written against transformers 5.23. It adds four things to the manager: slots in ``position_ids``,
a prefix cache that never crosses encodings, sampling from each request's own noise, and long work
interleaved between steps.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.continuous_api import (
    ContinuousBatchingManager,
    ContinuousBatchProcessor,
)
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.continuous_batching.requests import RequestState

from patches import Batch, Patched, encode, packed_batch
from service.engine.interleave import Interleaved
from service.engine.request import EngineRequest
from service.engine.sampling import sample


class EncodingManager(ContinuousBatchingManager):
    """Continuous batching in which every request brings its slot.

    ``requests`` maps request ids to what the event loop knows of them; it must hold a request before
    ``add_request`` is called for it and until its last output.
    """

    def __init__(
        self,
        patch: Patched,
        *,
        cache_tokens: int,
        page_size: int,
        max_batch_tokens: int,
        max_requests_per_batch: int,
        prefix_sharing: bool,
    ) -> None:
        self.patch = patch
        self.requests: dict[str, EngineRequest] = {}
        self.interleaved = Interleaved()
        config = ContinuousBatchingConfig(
            page_size=page_size,
            num_blocks=-(-cache_tokens // page_size),
            max_batch_tokens=max_batch_tokens,
            max_requests_per_batch=max_requests_per_batch,
            max_memory_percent=1.0,  # the budget is ours: num_blocks is already measured against free memory
            allow_block_sharing=prefix_sharing,
            safety_margin=0.0,  # admission reserves a request's whole length, so decoding never runs out
            auto_switch_to_flash=False,
            # CUDA graphs replay without running Python, and so would replay one batch's segments for another.
            use_cuda_graph=False,
            use_async_batching=False,
        )
        # do_sample stays off in the manager: it draws all rows from one shared generator.
        generation_config = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=1)
        super().__init__(patch.model, generation_config, config)  # type: ignore[arg-type]

    def switch_to_cb_friendly_attn(self, model: Any, auto_switch_to_flash: bool = True) -> None:
        """The model already runs our attention, which the manager's list of names does not know."""

    def _create_batch_processor(self) -> ContinuousBatchProcessor:
        processor = super()._create_batch_processor()
        # The manager builds these itself and takes no classes, hence the change of class after the fact.
        _adopt(processor.inputs_and_outputs, _SlottedInputs, requests=self.requests)
        _adopt(processor.model_runner, _RequestRunner, requests=self.requests, patch=self.patch)
        vocab_size = int(self.model.config.get_text_config().vocab_size)
        token_bits = (vocab_size - 1).bit_length()
        _adopt(processor.cache, _EncodingCache, requests=self.requests, salts={}, token_bits=token_bits)
        return processor

    def _generation_loop_body(self, batch_processor: ContinuousBatchProcessor, bootstrapping: bool) -> bool:
        if self.interleaved.advance():
            self._wake_up_loop.set()  # with work left, an idle manager must not sleep
        return super()._generation_loop_body(batch_processor, bootstrapping)

    def submit(self, request: EngineRequest) -> None:
        """Hand one request to the generation thread; its outputs go to the registered handler."""
        self.add_request(
            request.prompt_ids,
            request_id=request.request_id,
            max_new_tokens=request.max_new_tokens,
            streaming=True,
            eos_token_id=list(request.eos_token_ids) or -1,
        )

    def wake(self) -> None:
        """Make an idle generation thread look for work now."""
        self._wake_up_loop.set()

    def fatal_error(self) -> Exception | None:
        """What killed the generation thread, or None."""
        return self.background_thread_status.fatal_error

    def discard_handler(self, request_id: str) -> None:
        """Forget a request that will not be heard of again (cancelled before its last output)."""
        with self.output_router._lock:
            self.output_router.result_handlers.pop(request_id, None)
        self.requests.pop(request_id, None)

    def tokens_in_cache(self) -> tuple[int, int]:
        """(tokens in use, tokens the cache holds), by pages."""
        processor = self.batch_processor
        if processor is None:
            return 0, 0
        total = processor.cache.num_blocks * self.continuous_batching_config.page_size
        return round((1.0 - processor.cache.compute_free_capacity()) * total), total

    def load(self) -> tuple[int, int]:
        """(running, waiting) requests."""
        processor = self.batch_processor
        if processor is None:
            return 0, self.input_queue.qsize()
        scheduler = processor.scheduler
        return len(scheduler.active_requests), len(scheduler.waiting_requests) + self.input_queue.qsize()


def _adopt(built: object, kind: type, **attributes: object) -> None:
    built.__class__ = kind
    vars(built).update(attributes)


class _SlottedInputs(ContinuousBatchingIOs):
    """Writes each request's slot above its positions, and describes the packed row to our attention."""

    requests: dict[str, EngineRequest]
    batch: Batch

    def prepare_batch_tensors(self, requests_in_batch: list[Any], *args: Any, **kwargs: Any) -> None:
        sequences = []
        for future in requests_in_batch:
            request = self.requests.get(future.state.request_id)
            slot = 0 if request is None else request.slot  # cancelled meanwhile: its result is dropped
            sequences.append((slot, future.state.position_offset, future.query_length))
        super().prepare_batch_tensors(requests_in_batch, *args, **kwargs)
        self.batch = packed_batch(sequences)
        tokens = self.total_seqlen_q
        slots = torch.tensor([s for s, _, n in sequences for _ in range(n)], dtype=torch.int32, device=self.device)
        self.position_ids[:tokens] = encode(self.position_ids[:tokens], slots)


class _EncodingCache(PagedAttentionCache):
    """Prefix sharing keyed by tokens and encoding: keys made under one recipe are wrong under another.

    Blocks are found by a hash over int32 token ids. The bits above the vocabulary carry a number that
    stands for the request's cache key, so no two keys can meet. Once those bits are used up, new keys
    go without sharing.
    """

    requests: dict[str, EngineRequest]
    salts: dict[object, int]
    token_bits: int

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        salted = self._salted(request_id, prompt_ids)
        return 0 if salted is None else super().search_prefix_match(request_id, salted)

    def mark_complete_blocks(self, state: RequestState, complete_blocks: dict[str, int]) -> None:
        if not complete_blocks:
            return
        salted = self._salted(state.request_id, state.initial_tokens + state.generated_tokens)
        if salted is not None:
            super().mark_complete_blocks(_TokensOf(state, salted), complete_blocks)  # type: ignore[arg-type]

    def _salted(self, request_id: str, tokens: list[int]) -> list[int] | None:
        request = self.requests.get(request_id)
        if request is None:
            return None
        salt = self.salts.setdefault(request.cache_key, len(self.salts) + 1) << self.token_bits
        return [token | salt for token in tokens] if salt < 1 << 31 else None


class _TokensOf:
    """A request state whose tokens read salted; what else the cache reads of it is passed on."""

    def __init__(self, state: RequestState, tokens: list[int]) -> None:
        self.request_id, self.status = state.request_id, state.status
        self.initial_tokens, self.generated_tokens = tokens, []  # type: ignore[var-annotated]


class _RequestRunner(ModelRunner):
    """Runs the packed row under our attention, and draws each request from its own parameters and noise."""

    patch: Patched
    requests: dict[str, EngineRequest]
    inputs_and_outputs: _SlottedInputs

    def _forward_process_and_sample(self, model: Any, batch_data: dict[str, Any], *args: Any) -> None:
        with self.patch.packed(self.inputs_and_outputs.batch, batch_data):
            super()._forward_process_and_sample(model, batch_data, *args)

    def _sample(self, scores: torch.Tensor, output_ids: torch.Tensor) -> None:
        rows = [
            self.requests.get(future.state.request_id)
            for future in self.inputs_and_outputs.requests_in_batch
            if future.has_new_token
        ]
        if rows:
            tokens = sample(scores[0, : len(rows)], rows)
            output_ids[0, : len(rows)].copy_(tokens)
