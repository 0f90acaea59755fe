"""The one adapter around transformers' continuous batching. Every reach into its insides is in this file.

Written against transformers 5.23. It adds to the manager: slots in ``position_ids``, a prefix cache that never
crosses encodings or tenants, pages given back once no later query reaches them, sampling from each request's own
noise, long work interleaved between steps, a heartbeat, and steps in which running out of memory costs one request.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.cache_allocators import FULL_ATTENTION, FullAttentionCacheAllocator
from transformers.generation.continuous_batching.continuous_api import (
    BackgroundThreadStatus,
    ContinuousBatchingManager,
    ContinuousBatchProcessor,
)
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.continuous_batching.requests import FutureRequestState, RequestState, RequestStatus
from transformers.generation.continuous_batching.scheduler import FIFOScheduler

from patches import Batch, Patched, encode, packed_batch
from service.engine import THREAD_NAME
from service.engine.interleave import Interleaved
from service.engine.memory import OutOfMemory, give_back, is_out_of_memory
from service.engine.request import EngineRequest
from service.engine.sampling import sample
from service.engine.window import Window


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
        self.interleaved = Interleaved(others_hold_memory=lambda: self.load()[0] > 0)
        self.heartbeat = time.monotonic()
        self._abandoned = False
        self._step_tokens = max_batch_tokens
        config = ContinuousBatchingConfig(
            page_size=page_size,
            num_blocks=-(-cache_tokens // page_size),
            max_batch_tokens=max_batch_tokens,
            max_requests_per_batch=max_requests_per_batch,
            max_memory_percent=1.0,  # the budget is ours: num_blocks is already measured against free memory
            allow_block_sharing=prefix_sharing,
            safety_margin=0.0,  # admission reserves all that a request ever holds, so decoding never runs out
            auto_switch_to_flash=False,
            # CUDA graphs replay without running Python, and so would replay one batch's segments for another.
            use_cuda_graph=False,
            use_async_batching=False,
        )
        # do_sample stays off in the manager: it draws all rows from one shared generator.
        generation_config = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=1)
        with _configured_as_cached(patch):
            super().__init__(patch.model, generation_config, config)  # type: ignore[arg-type]

    def switch_to_cb_friendly_attn(self, model: Any, auto_switch_to_flash: bool = True) -> None:
        """The model already runs our attention, which the manager's list of names does not know."""

    def _create_batch_processor(self) -> ContinuousBatchProcessor:
        with _configured_as_cached(self.patch):
            processor = super()._create_batch_processor()
        # The manager builds these itself and takes no classes, hence the change of class after the fact.
        _adopt(processor.inputs_and_outputs, _SlottedInputs, requests=self.requests)
        _adopt(processor.model_runner, _RequestRunner, requests=self.requests, patch=self.patch)
        vocab_size = int(self.model.config.get_text_config().vocab_size)
        token_bits = (vocab_size - 1).bit_length()
        _adopt(processor.cache, _EncodingCache, requests=self.requests, numbers={}, holders={}, token_bits=token_bits)
        _adopt(processor.scheduler, _WindowedScheduler)
        whole = processor.cache.cache_allocators.get(FULL_ATTENTION)
        if whole is not None:
            _adopt(whole, _WindowedAllocator, requests=self.requests, windows={}, dropped={}, turns=iter(()))
        return processor

    def start(self) -> None:
        """As the base class, on a daemon thread: one that stalls for good must not keep the process alive."""
        self.background_thread_status.clear()
        thread = threading.Thread(target=self._run_generation_loop, name=THREAD_NAME, daemon=True)
        self._generation_thread: Any = thread
        thread.start()

    def abandon(self, error: Exception) -> None:
        """Give up on a thread that is dead or stalls: fail the work queued beside its requests, and let it end
        by itself, without another step, if it ever comes back."""
        self._abandoned = True
        self.background_thread_status.request_stop(
            BackgroundThreadStatus.HARD_STOP, self.distributed_helper.global_rank
        )
        self.interleaved.close(error)

    def _generation_loop_body(self, batch_processor: ContinuousBatchProcessor, bootstrapping: bool) -> bool:
        self.heartbeat = time.monotonic()
        if self.interleaved.advance():
            self._wake_up_loop.set()  # with work left, an idle manager must not sleep
            self.heartbeat = time.monotonic()
        return not self._abandoned and super()._generation_loop_body(batch_processor, bootstrapping)

    def _generation_step(self) -> None:
        """One step. Running out of memory in it fails the largest request of the batch; the others repeat it."""
        processor = self.batch_processor
        assert processor is not None
        inputs: _SlottedInputs = processor.inputs_and_outputs  # type: ignore[assignment]
        while inputs.requests_in_batch and self._runs_out_of_memory():
            give_back()
            blamed = inputs.undo_step()
            others = len(processor.scheduler.active_requests) > 1 or len(self.interleaved) > 0
            error = OutOfMemory("decoding" if blamed.state.generated_tokens else "prefill", alone=not others)
            request = self.requests.get(blamed.state.request_id)
            if request is not None:
                request.failure = error
            processor._handle_request_error(error, blamed.state)
            processor.scheduler.finish_request(blamed.state.request_id)
            inputs.prepare_again(without=blamed)
            self.heartbeat = time.monotonic()
        for future in inputs.requests_in_batch:
            request = self.requests.get(future.state.request_id)
            if request is not None and request.on_prefill is not None and not future.has_new_token:
                request.on_prefill(future.state.position_offset)

    def _runs_out_of_memory(self) -> bool:
        try:
            super()._generation_step()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return True
        return False

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

    def tokens_held(self, kept: tuple[int, int] | None, length: int) -> int:
        """The most tokens of cache that a generation of ``length`` tokens ever holds, by pages, when queries reach
        the ``kept`` (first, last) keys only; None reaches all."""
        if kept is None:
            return length
        window = Window(*kept, self.continuous_batching_config.page_size)
        held = window.tokens_held(length, self._step_tokens)
        sliding = getattr(self.model.config.get_text_config(), "sliding_window", None) or 0
        return max(held, min(length, sliding))  # layers that slide by themselves keep their own window

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


class _AsCached:
    """A configuration read through: only what the cache is sized by differs."""

    def __init__(self, config: Any, heads: int, width: int) -> None:
        self._config = config
        self.num_key_value_heads, self.head_dim = heads, width
        kinds, whole = getattr(config, "layer_types", None), "full_attention"
        self.layer_types = kinds and [whole if kind == "chunked_attention" else kind for kind in kinds]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


@contextmanager
def _configured_as_cached(patch: Patched) -> Iterator[None]:
    """Within it, the model's configuration tells of what is cached, which the manager sizes its cache by.

    Heads and width are those that reach the attention (latent attention caches less by itself). A layer that
    attends within chunks, which the manager does not know, keeps everything: our attention leaves out the rest.
    """
    config = patch.model.config
    sizes = _AsCached(config.get_text_config(), *patch.cached)
    vars(config)["get_text_config"] = lambda *_, **__: sizes
    try:
        yield
    finally:
        del vars(config)["get_text_config"]


def _adopt(built: object, kind: type, **attributes: object) -> None:
    built.__class__ = kind
    vars(built).update(attributes)


class _SlottedInputs(ContinuousBatchingIOs):
    """Writes each request's slot above its positions, and describes the packed row to our attention."""

    requests: dict[str, EngineRequest]
    batch: Batch
    arguments: dict[str, Any]
    tokens_in_batch: list[list[int]]

    def prepare_batch_tensors(self, requests_in_batch: list[Any], **arguments: Any) -> None:  # type: ignore[override]
        sequences = []
        for future in requests_in_batch:
            request = self.requests.get(future.state.request_id)
            slot = 0 if request is None else request.slot  # cancelled meanwhile: its result is dropped
            sequences.append((slot, future.state.position_offset, future.query_length))
        self.arguments = arguments
        self.tokens_in_batch = [future.state.tokens_to_process for future in requests_in_batch]
        windowed = _windowed(self.cache)
        if windowed is not None:
            windowed.turns = iter([future.state.request_id for future in requests_in_batch])
        super().prepare_batch_tensors(requests_in_batch, **arguments)
        self.batch = packed_batch(sequences)
        tokens = self.total_seqlen_q
        slots = torch.tensor([s for s, _, n in sequences for _ in range(n)], dtype=torch.int32, device=self.device)
        self.position_ids[:tokens] = encode(self.position_ids[:tokens], slots)

    def undo_step(self) -> FutureRequestState:
        """Put the requests of the batch back to where they were before it was prepared; returns the one to blame:
        the most new tokens, then the longest."""
        for future, tokens in zip(self.requests_in_batch, self.tokens_in_batch, strict=True):
            future.state.position_offset -= future.query_length
            future.state.tokens_to_process = tokens
        return max(self.requests_in_batch, key=lambda future: (future.query_length, future.state.position_offset))

    def prepare_again(self, without: FutureRequestState) -> None:
        """The same batch without one request; nothing if that leaves none."""
        rest = [future for future in self.requests_in_batch if future is not without]
        if rest:
            arguments = self.arguments | {"num_q_tokens": sum(future.query_length for future in rest)}
            self.prepare_batch_tensors(rest, **arguments)
        else:
            self.requests_in_batch, self.num_request_in_batch = [], 0


class _EncodingCache(PagedAttentionCache):
    """Prefix sharing keyed by tokens and by the request's cache key (tenant, salt, encoding): keys made under one
    recipe are wrong under another, and one tenant must not learn what another sent.

    Blocks are found by a hash over int32 token ids. The bits above the vocabulary carry a number that stands for
    the cache key, so no two keys can meet. When the numbers run out, what no live request holds is forgotten and
    its numbers are given out again.
    """

    requests: dict[str, EngineRequest]
    numbers: dict[object, int]
    holders: dict[str, object]
    token_bits: int

    def can_store_request_tokens(self, state: RequestState, request_len: int, dry_run: bool = False) -> bool:
        windowed = _windowed(self)
        if windowed is not None:
            windowed.drop(state.request_id, state.current_len())
        return super().can_store_request_tokens(state, request_len, dry_run)

    def most_read(self, state: RequestState) -> int | None:
        """Most tokens that the next step of one request reads, per layer; None where that is all of them."""
        windowed = _windowed(self)
        window = None if windowed is None else windowed.window_of(state.request_id)
        if window is None:
            return self._infer_read_cache_limit()
        past = state.current_len()
        sliding = [a.get_seqlen_k(past, 0) for a in self.cache_allocators.values() if a is not windowed]
        return max(window.tokens_read(past), *sliding, 0)

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        salted = self._salted(request_id, prompt_ids)
        found = 0 if salted is None else super().search_prefix_match(request_id, salted)
        request = self.requests.get(request_id)
        if request is not None:
            request.cached_tokens = found
        return found

    def mark_complete_blocks(self, state: RequestState, complete_blocks: dict[str, int]) -> None:
        windowed = _windowed(self)
        if not complete_blocks or (windowed is not None and windowed.dropped.get(state.request_id)):
            return  # a hash stands for every token before it: after a gap there is none
        salted = self._salted(state.request_id, state.initial_tokens + state.generated_tokens)
        if salted is not None:
            super().mark_complete_blocks(_TokensOf(state, salted), complete_blocks)  # type: ignore[arg-type]

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        super().free_blocks(request_id, no_cache)
        self.holders.pop(request_id, None)

    def _salted(self, request_id: str, tokens: list[int]) -> list[int] | None:
        request = self.requests.get(request_id)
        number = None if request is None else self._number(request)
        return None if number is None else [token | (number << self.token_bits) for token in tokens]

    def _number(self, request: EngineRequest) -> int | None:
        """The number of the request's cache key, or None while live requests hold them all."""
        number = self.numbers.get(request.cache_key)
        if number is None:
            most = (1 << (31 - self.token_bits)) - 1
            if len(self.numbers) >= most:
                self.evict_cached_blocks()
                held = set(self.holders.values())
                self.numbers = {key: number for key, number in self.numbers.items() if key in held}
            if len(self.numbers) >= most:
                return None
            taken = set(self.numbers.values())
            number = next(n for n in range(len(taken) + 1, 0, -1) if n not in taken)
            self.numbers[request.cache_key] = number
        self.holders[request.request_id] = request.cache_key
        return number


def _windowed(cache: PagedAttentionCache) -> _WindowedAllocator | None:
    """The allocator of the layers that attend to everything, if the model has such layers."""
    return cache.cache_allocators.get(FULL_ATTENTION)  # type: ignore[return-value]


class _WindowedAllocator(FullAttentionCacheAllocator):
    """Gives back pages from the middle of a request's cache: those that no later query reaches.

    A block table then holds the pages of the first tokens, and behind them those of the last. To the base class
    the sequence is ``dropped`` pages shorter, everything behind the first tokens standing that much earlier.
    """

    requests: dict[str, EngineRequest]
    windows: dict[str, Window]
    dropped: dict[str, int]
    turns: Iterator[str]

    def window_of(self, request_id: str) -> Window | None:
        """What the request keeps, or None for everything. Remembered until its blocks are free: it may be
        cancelled in the middle of a step."""
        request = self.requests.get(request_id)
        if request_id not in self.windows and request is not None and request.kept is not None:
            self.windows[request_id] = Window(*request.kept, self.tokens_per_page)
        return self.windows.get(request_id)

    def drop(self, request_id: str, position: int) -> None:
        """Give back what no query from ``position`` on reaches. Blocks that were hashed stay for prefix sharing."""
        window = self.window_of(request_id)
        if window is None:
            return
        dropped, table = window.dropped(position), self.block_table.get(request_id, [])
        gap = slice(window.head_pages, window.head_pages + dropped - self.dropped.get(request_id, 0))
        self.pool.free_blocks(self.index, [block for block in table[gap] if self.ledger.release(block)])
        del table[gap]
        self.dropped[request_id] = dropped

    def _place(self, request_id: str, position: int) -> int:
        return position - self.dropped.get(request_id, 0) * self.tokens_per_page

    def needs_new_blocks(self, request_id: str, past_length: int, query_length: int) -> int:
        return super().needs_new_blocks(request_id, self._place(request_id, past_length), query_length)

    def allocate_cache_to_request(self, request_id: str, past_length: int, query_length: int) -> None:
        super().allocate_cache_to_request(request_id, self._place(request_id, past_length), query_length)

    def get_write_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        return super().get_write_indices(request_id, self._place(request_id, past_length), query_length)

    def get_read_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        indices = super().get_read_indices(request_id, self._place(request_id, past_length), query_length)
        if self.dropped.get(request_id):
            window = self.windows[request_id]
            del indices[window.first : window.head_pages * self.tokens_per_page]  # their page stays, they are not read
        return indices

    def get_seqlen_k(self, past_length: int, query_length: int) -> int:
        """Asked for once per request of a batch, in its order and without its name: ``turns`` has the names."""
        window = self.windows.get(next(self.turns, ""))
        return query_length + (past_length if window is None else window.tokens_read(past_length))

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        super().free_blocks(request_id, no_cache)
        self.windows.pop(request_id, None)
        self.dropped.pop(request_id, None)


class _WindowedScheduler(FIFOScheduler):
    """Counts what a step reads of a request's cache, and not all that the request has ever seen: that may be
    more than the cache holds, and the request would never be scheduled again."""

    cache: _EncodingCache

    def _infer_request_tokens(self, state: RequestState, *args: Any) -> list[int]:
        tokens = super()._infer_request_tokens(state, *args)
        self.cache.read_cache_limit = self.cache.most_read(state)  # read right after this, for this request
        return tokens


class _TokensOf:
    """A request state whose tokens read salted; what else the cache reads of it is passed on."""

    def __init__(self, state: RequestState, tokens: list[int]) -> None:
        self.request_id = state.request_id
        # The cache skips finished requests, whose blocks are gone in asynchronous batching. Ours still hold theirs,
        # and a request for a single token would leave nothing to share.
        self.status = RequestStatus.DECODING
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
            noise = [None if r is None or r.generator is None else r.generator.get_state() for r in rows]
            drawn = [0 if r is None else len(r.logprobs) for r in rows]
            try:
                tokens = sample(scores[0, : len(rows)], rows)
            except Exception:
                _undo_draws(rows, noise, drawn)  # the step may be repeated
                raise
            output_ids[0, : len(rows)].copy_(tokens)


def _undo_draws(rows: list[EngineRequest | None], noise: list[torch.Tensor | None], drawn: list[int]) -> None:
    for request, state, length in zip(rows, noise, drawn, strict=True):
        if request is not None:
            del request.logprobs[length:]
            if request.generator is not None and state is not None:
                request.generator.set_state(state)
