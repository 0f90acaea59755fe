"""The manager: it starts and runs the generation thread, and builds its parts as this service needs them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.continuous_batching.continuous_api import (
    BackgroundThreadStatus,
    ContinuousBatchingManager,
    ContinuousBatchProcessor,
)
from transformers.generation.continuous_batching.requests import RequestState
from typing_extensions import override

from patches import PagedBackend, Patched
from service.engine import THREAD_NAME
from service.engine.adapter.cards.decode_rows import DecodeRows
from service.engine.adapter.cards.graphs import DecodeGraphs
from service.engine.adapter.cards.processor import StepProcessor
from service.engine.adapter.cards.streams import own_stream
from service.engine.adapter.compatibility import adopt, check_overrides, check_scheduling
from service.engine.adapter.configuration import (
    AsCached,
    batching_config,
    is_whole_on_cpu,
    sectors_of,
)
from service.engine.adapter.inputs import SlottedInputs, on_host
from service.engine.adapter.pages.adoption import adopt_cache, sized_by_us
from service.engine.adapter.pages.cache import EncodingCache
from service.engine.adapter.runner import OnStep, RequestRunner, recordings
from service.engine.adapter.scheduler import FairScheduler
from service.engine.failures import EngineStopping
from service.engine.limits import EngineLimits
from service.engine.request import EngineRequest
from service.engine.thread.cpu import Wake, generation_thread
from service.engine.thread.fairness import PREFILL_BESIDE_OTHERS, interleave
from service.engine.thread.interleave import Interleaved
from service.engine.thread.out_of_memory import OutOfMemory, give_back, give_back_after, is_out_of_memory, whole_card
from service.engine.window import max_cached_len
from service.sharing.turns import Turns


def pages_of_rank(patch: Patched, limits: EngineLimits, backend: PagedBackend | None) -> EncodingCache:
    """The pages of a rank that follows, for its own heads."""
    cache: EncodingCache = EncodingManager(patch, limits, backend)._create_batch_processor().cache  # type: ignore[assignment]
    return cache


class Unheard(queue.Queue[Any]):
    """Outputs of cancelled requests: nobody reads them, so they need not stay."""

    @override
    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Nothing."""


class EncodingManager(ContinuousBatchingManager):
    """Continuous batching in which every request brings its slot.

    ``requests`` maps ids to requests of the event loop. A request must be in it before ``add_request`` is called, and
    until its last output.
    """

    _wake_up_loop: Wake  # an Event in transformers

    def __init__(
        self,
        patch: Patched,
        limits: EngineLimits,
        backend: PagedBackend | None = None,
        *,
        graphs: bool = False,
        recorded: bool = False,
        on_step: OnStep = lambda use, variant: None,
    ) -> None:
        """``backend`` computes paged attention; without one, attention goes sequence by sequence.

        With ``graphs``, decode steps are captured, and with ``recorded`` they run from lists of their calls.
        ``failures`` has the reasons of those that cannot.

        Raises:
            UnsupportedModel: when pages cannot cache its layers, or transformers has other private parts than expected.
        """
        check_overrides(type(self))
        check_scheduling()
        self.patch, self.backend, self._limits = patch, backend, limits
        self._captures, self._on_step, self.failures = graphs, on_step, list[str]()
        self._recordings = recordings(self.failures) if recorded else None
        self._reads_in_place = backend is None and is_whole_on_cpu(patch.model) and patch.cached.alike
        self.requests: dict[str, EngineRequest] = {}
        self.interleaved = Interleaved(lambda: self.load()[0] > 0, self._let_steps_end)
        self._runner: RequestRunner | None = None
        self._stepping: ContinuousBatchProcessor | None = None
        self.turns = Turns()
        self.heartbeat, self._abandoned = time.monotonic(), False
        self._step_tokens = limits.max_batch_tokens
        self._sectors = sectors_of(patch, limits.page_size)
        config = batching_config(limits, divided=self._sectors is not None)
        # do_sample stays off in the manager: it draws all rows from one shared generator.
        generation_config = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=1)
        self._as_cached: Any = AsCached(patch)
        with whole_card:  # another model's may be in ``sized_by_us``
            super().__init__(self._as_cached, generation_config, config)  # type: ignore[arg-type]
        self.model = patch.model
        self._wake_up_loop = Wake()
        if backend is not None:
            # transformers forbids block tables to an attention whose name has no "flash". Our tables are elsewhere.
            self.continuous_batching_config.max_blocks_per_request = 1

    @override
    def switch_to_cb_friendly_attn(self, model: Any, auto_switch_to_flash: bool = True) -> None:
        """The model already runs our attention, which the manager's list of names does not know."""

    @override
    def _create_batch_processor(self) -> ContinuousBatchProcessor:
        with sized_by_us():
            self.model = self._as_cached
            try:
                processor = super()._create_batch_processor()
            finally:
                self.model = self.patch.model
        on_card = self.model.device.type == "cuda"
        staged = on_host(processor) if on_card and self.backend is not None else None
        kept = DecodeRows(processor.cache, self.requests) if self._captures else None  # type: ignore[arg-type]
        written = {"backend": self.backend, "staged": staged, "rows": kept, "is_brief": False}
        adopt(processor.inputs_and_outputs, SlottedInputs, requests=self.requests, **written)
        if on_card:
            processor.inputs_and_outputs.compute_stream = own_stream(processor, self.model.device)
        rows = self.patch.model.get_input_embeddings().weight.shape[0]  # prompts may have tokens without a logit
        token_bits = (max(rows, self.patch.num_logits) - 1).bit_length()
        adopt_cache(processor.cache, self.requests, token_bits, self._limits, self._sectors, runs=self._reads_in_place)
        if self._sectors is not None and self.backend is None:
            processor.inputs_and_outputs.make_room()  # type: ignore[union-attr]
        rows, cache = self._limits.max_requests_per_batch, processor.cache
        graphs = DecodeGraphs(self.patch, cache, rows, self.failures) if self._captures else None  # type: ignore[arg-type]
        own = {"patch": self.patch, "graphs": graphs, "recordings": self._recordings, "on_step": self._on_step}
        own |= {"drawn": None, "ahead": None}
        adopt(processor.model_runner, RequestRunner, requests=self.requests, **own)
        self._runner = processor.model_runner  # type: ignore[assignment]
        adopt(
            processor.scheduler,
            FairScheduler,
            requests=self.requests,
            turns=self.turns,
            others=set(),
            prefill_beside_others=PREFILL_BESIDE_OTHERS if self.model.device.type == "cpu" else None,
        )
        self.patch.ranks.created(processor.cache, pages_of_rank, self.patch, self._limits, self.backend)
        adopt(processor, StepProcessor, requests=self.requests, held=[], tokens=[])
        return processor

    @override
    def _run_generation_loop(self, use_inference_mode: bool = False) -> None:
        with generation_thread(self._wake_up_loop):
            try:
                super()._run_generation_loop(use_inference_mode)
            finally:  # a step in vain may still write into the cache
                self._end_steps()

    @override
    def start(self) -> None:
        """As the base class, on a daemon thread: one that stalls for good must not keep the process alive."""
        self.background_thread_status.clear()
        self.output_router.output_queue = Unheard()
        thread = threading.Thread(target=self._run_generation_loop, name=THREAD_NAME, daemon=True)
        self._generation_thread: Any = thread
        thread.start()

    def abandon(self, error: Exception) -> None:
        """Give up on a thread that is dead or stalls, and fail the interleaved work.

        If the thread ever continues, it ends without another step. A dead one leaves its cache: the next one needs
        the memory.
        """
        self._abandoned = True
        self.background_thread_status.request_stop(
            BackgroundThreadStatus.HARD_STOP, self.distributed_helper.global_rank
        )
        self.interleaved.close(error)
        if not self.is_running():
            self.batch_processor = self._runner = self._stepping = None
            give_back_after(self.fatal_error())

    @override
    def _generation_loop_body(self, batch_processor: ContinuousBatchProcessor, bootstrapping: bool) -> bool:
        # ``stop`` of the base class forgets ``batch_processor``, also under a thread that outlives the stop's timeout.
        self._stepping, self.heartbeat = batch_processor, time.monotonic()
        scheduler: FairScheduler = batch_processor.scheduler  # type: ignore[assignment]
        if len(self.interleaved):  # whose step may be long
            batch_processor.hand_out()  # type: ignore[attr-defined]
        scheduler.others = self._advance_interleaved(scheduler)
        return not self._abandoned and super()._generation_loop_body(batch_processor, bootstrapping)

    def _advance_interleaved(self, scheduler: FairScheduler) -> set[str]:
        """One step of long work, if the tenant whose turn it is has some; returns the tenants with such work."""
        if len(self.interleaved):
            self._wake_up_loop.works()
        tenants = interleave(
            self.interleaved, self.turns, lambda: {scheduler.tenant_of(state) for state in self._states(scheduler)}
        )
        if tenants:
            self.heartbeat = time.monotonic()
            self._wake_up_loop.set()  # with work left, an idle manager must not sleep
        return tenants

    def _let_steps_end(self) -> None:
        """Before other work on the card, which may write tables that a step in flight reads."""
        if self._runner is not None:
            self._runner.let_steps_end()

    def _end_steps(self) -> None:
        """Wait for a step in flight, and keep the memory of none."""
        runner, self._runner, self._stepping = self._runner, None, None
        if runner is not None:
            runner.drop_ahead()

    def _states(self, scheduler: FairScheduler) -> list[RequestState]:
        """Every request of the scheduler, and those in its input queue."""
        coming = list(self.input_queue.queue)
        return [*scheduler.active_requests.values(), *scheduler.waiting_requests.values(), *coming]

    @override
    def _generation_step(self) -> None:
        """One step. Running out of memory in it fails the largest request of the batch; the others repeat it."""
        processor = self._stepping
        assert processor is not None
        inputs: SlottedInputs = processor.inputs_and_outputs  # type: ignore[assignment]
        self._wake_up_loop.works()
        began = time.perf_counter()
        while inputs.requests_in_batch and self._runs_out_of_memory(processor):
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
        read = dict[str, int]()
        for future in inputs.requests_in_batch:
            request = self.requests.get(future.state.request_id)
            tenant = "" if request is None else request.tenant
            read[tenant] = read.get(tenant, 0) + future.query_length
            if request is not None and request.on_prefill is not None and not future.has_new_token:
                request.on_prefill(future.state.position_offset)
        self.turns.charge(time.perf_counter() - began, read.items())

    def _runs_out_of_memory(self, processor: ContinuousBatchProcessor) -> bool:
        try:
            processor._generation_step(self.model)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return True
        return False

    def submit(self, request: EngineRequest) -> None:
        """Hand one request to the generation thread; its outputs go to the registered handler.

        Raises:
            EngineStopping: when the thread takes no more requests.
        """
        taken = self.add_request(
            request.prompt_ids,
            request_id=request.request_id,
            max_new_tokens=request.max_new_tokens,
            streaming=True,
            eos_token_id=list(request.ends_at) or -1,
        )
        if taken is None:
            raise EngineStopping

    def run_to_end(self, requests: Sequence[EngineRequest]) -> list[list[int]]:
        """Generated token ids of ``requests``, run on this thread. For a manager that was not started.

        Raises:
            RuntimeError: when a request fails or is never scheduled; whatever a step raises.
        """
        with torch.cuda.device_of(next(self.model.parameters())):
            self.batch_processor, self.current_batch = self._create_batch_processor(), 0
            for request in requests:
                self.requests[request.request_id] = request
                self.submit(request)
            steps = sum(len(request.prompt_ids) + request.max_new_tokens for request in requests)
            for _ in range(steps):  # each takes one token at least
                if not self.batch_processor.has_pending_requests() and self.input_queue.empty():
                    break
                self._generation_loop_body(self.batch_processor, bootstrapping=False)
            self.batch_processor.hand_out()  # type: ignore[attr-defined]
            self._end_steps()
            self.batch_processor = None
        outputs = {}
        while not self.output_router.output_queue.empty():
            output = self.output_router.output_queue.get()
            if output.error is not None:
                raise RuntimeError(output.error)
            outputs[output.request_id] = list(output.generated_tokens)
        if any(len(outputs.get(request.request_id, ())) < request.max_new_tokens for request in requests):
            raise RuntimeError("a request was not scheduled to its end")
        return [outputs[request.request_id] for request in requests]

    def wake(self) -> None:
        """Make an idle generation thread look for work now."""
        self._wake_up_loop.set()

    def fatal_error(self) -> Exception | None:
        """The error that ended the generation thread, or None."""
        return self.background_thread_status.fatal_error

    def discard_handler(self, request_id: str) -> None:
        """Forget a request without further outputs (cancelled before its last output)."""
        with self.output_router._lock:
            self.output_router.result_handlers.pop(request_id, None)
        self.requests.pop(request_id, None)

    def max_cached_len(self, sink_window: tuple[int, int] | None, length: int) -> int:
        """Most tokens that the cache contains of a generation of ``length`` tokens, by pages.

        ``sink_window`` counts the first and the last keys that its queries reach, None for all.
        """
        if self._sectors is not None:
            return self._sectors.max_cached_len(sink_window, length, self._step_tokens)
        return max_cached_len(sink_window, length, self.continuous_batching_config.page_size, self._step_tokens)

    def tokens_in_cache(self) -> tuple[int, int]:
        """(tokens that requests hold, capacity of the cache in tokens), by pages."""
        processor = self.batch_processor
        if processor is None:
            return 0, 0
        cache: EncodingCache = processor.cache  # type: ignore[assignment]
        total = cache.num_blocks * self.continuous_batching_config.page_size
        return round(cache.share_held() * total), total

    def load(self) -> tuple[int, int]:
        """(running, waiting) requests."""
        processor = self.batch_processor
        if processor is None:
            return 0, self.input_queue.qsize()
        scheduler = processor.scheduler
        return len(scheduler.active_requests), len(scheduler.waiting_requests) + self.input_queue.qsize()
