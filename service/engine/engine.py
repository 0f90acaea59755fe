"""One model's engine: memory and slots reserved on the event loop, tokens computed on the generation thread.

A generation reserves all that it will ever hold, takes a slot, and streams tokens. Leaving the stream early cancels
the generation. Scoring runs on the same thread in short steps.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_right
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Hashable, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any

from patches import MAX_POSITION, Patched, ResolvedRecipe
from service import context
from service.engine.choice import PAGED, CannotGenerate, EngineChoice
from service.engine.encodings import EncodingsInUse
from service.engine.generation import Generation
from service.engine.limits import EngineLimits
from service.engine.metrics import EngineMetrics
from service.engine.request import EngineRequest, SamplingParams
from service.engine.thread.generation_thread import GenerationThread, threadsafe
from service.engine.thread.interleave import Work
from service.metrics import Metrics
from service.sharing.admission import Admission, Ticket

MOST_S = 60.0
"""Seconds that a start waits for the pages of a cache."""


class Engine:
    """Serves one patched model. Create, use and stop it from one event loop."""

    def __init__(
        self,
        patch: Patched,
        limits: EngineLimits,
        eos_token_ids: tuple[int, ...],
        metrics: EngineMetrics | None = None,
        choice: EngineChoice = PAGED,
    ) -> None:
        self.patch, self.limits, self.eos_token_ids = patch, limits, eos_token_ids
        self._metrics = metrics or EngineMetrics(Metrics(), "")
        self._metrics.serves(choice.kind, choice.attention, patch.ranks.size, graphs=choice.graphs)
        waiting, waiting_tokens, shared = limits.max_queue, limits.max_queue_tokens, limits.shared
        self.generations = Admission(limits.cache_tokens, waiting, limits.page_size, waiting_tokens, shared=shared)
        self.scores = Admission(limits.score_tokens, waiting, 1, waiting_tokens, shared=shared)
        self.encodings = EncodingsInUse(patch.slots, shared=shared)
        self.thread = GenerationThread(patch, limits, self._metrics, choice)

    @property
    def choice(self) -> EngineChoice:
        """The engine in use."""
        return self.thread.choice

    def has_pages(self) -> bool:
        """True if a cache of pages is allocated. Other caches grow with use.

        It waits until the generation thread has allocated it, or has ended.
        """
        manager, end = self.thread.manager, time.monotonic() + MOST_S
        while self.choice.kind == "paged" and not manager.tokens_in_cache()[1]:
            if not manager.is_running() or time.monotonic() > end:
                return False
            time.sleep(0.01)
        return self.choice.kind == "paged"

    def load(self) -> dict[str, int]:
        """Requests running and waiting, scoring work, tokens of cache that requests hold and in total."""
        manager = self.thread.manager
        running, waiting = manager.load()
        used, total = manager.tokens_in_cache()
        return {
            "running": running,
            "waiting": waiting + self.generations.waiting,
            "scoring": len(manager.interleaved),
            "cache_tokens_used": used,
            "cache_tokens": total,
            "slots_in_use": self.patch.slots.in_use(),
        }

    async def generate(  # noqa: PLR0913 - a generation has four inputs and four options
        self,
        prompt_ids: list[int],
        resolved: ResolvedRecipe,
        sampling: SamplingParams,
        max_new_tokens: int,
        *,
        pe_method: str,
        ticket: Ticket | None = None,
        cache_salt: Hashable = None,
        on_prefill: Callable[[int], object] | None = None,
    ) -> AsyncGenerator[Generation]:
        """Stream of the same ``Generation``, once per step, until ``finish_reason`` is set.

        ``resolved`` is the encoding for the reserved length, prompt and new tokens; ``pe_method`` is its label in
        metrics. Without a ``ticket`` the request enters the queue here. Prefixes are shared within the current
        tenant, the encoding and ``cache_salt``. ``on_prefill`` is called on the event loop with the prompt tokens
        done, between the chunks of a long prompt.

        Raises:
            TooLarge: when the request never fits; QueueFull when there is no room now.
            OutOfMemory: when a step of this request needs more memory than there is.
            GrammarFailed: when its answer cannot go on by its grammar.
            EngineFailed: when the generation thread dies or stalls.
            CannotGenerate: without an engine.
        """
        if not self.choice.generates:
            raise CannotGenerate(self.choice.reason or "")
        created = time.perf_counter()
        generation, reason = Generation(), "error"
        tenant = context.current().tenant
        try:
            tokens = self.max_cached_len(resolved, len(prompt_ids) + max_new_tokens)
            async with _granted(self.generations, tokens, ticket), self.encodings.slot(resolved) as slot:
                request = EngineRequest(
                    prompt_ids,
                    slot,
                    (tenant, cache_salt, resolved),
                    max_new_tokens,
                    sampling,
                    eos_token_ids=self.eos_token_ids,
                    on_prefill=None if on_prefill is None else threadsafe(on_prefill),
                    tenant=tenant,
                    sink_window=self.patch.sink_window(resolved),
                )
                async with aclosing(self.thread.generate(request)) as outputs:
                    async for output in outputs:
                        self._update(generation, request, output, created, pe_method)
                        yield generation
            reason = generation.finish_reason or "error"
        except (GeneratorExit, asyncio.CancelledError):
            reason = generation.finish_reason or "abort"  # the caller may have found a stop string
            raise
        finally:
            self._metrics.finished(pe_method, generation, reason, time.perf_counter() - created)

    @property
    def longest(self) -> int:
        """The most tokens of a generation, prompt included, that fits into the cache under most encodings."""

        return bisect_right(range(1, MAX_POSITION + 2), self.generations.most, key=self.reserved)

    def reserved(self, length: int) -> int:
        """Tokens of cache that a generation of ``length`` tokens takes under most encodings."""
        return self.generations.rounded(self.thread.manager.max_cached_len(None, length))

    def max_cached_len(self, resolved: ResolvedRecipe, length: int) -> int:
        """The most tokens of cache that a generation of ``length`` tokens ever holds."""
        return self.thread.manager.max_cached_len(self.patch.sink_window(resolved), length)

    def _update(
        self, generation: Generation, request: EngineRequest, output: Any, created: float, pe_method: str
    ) -> None:
        is_first, before, tokens = generation.first_token_s is None, generation.elapsed_s, len(generation.token_ids)
        generation.update(request, output, created, time.perf_counter())
        if is_first:
            self._metrics.first_token(pe_method, generation, len(request.prompt_ids))
        else:
            self._metrics.next_token(pe_method, generation.elapsed_s - before)
        self._metrics.generated(pe_method, len(generation.token_ids) - tokens)

    async def score(
        self,
        work: Work,
        tokens: int,
        on_progress: Callable[[Any], None],
        *,
        scored: Mapping[str, int],
        ticket: Ticket | None = None,
    ) -> Any:
        """Run ``work`` between generation steps and return its value. Cancelling the caller ends it.

        ``tokens`` is the size of its separate cache, ``scored`` the tokens that its passes read, by method;
        ``on_progress`` is called on the event loop.

        Raises:
            TooLarge, QueueFull: from admission; OutOfMemory when a step needs more memory than there is.
            EngineFailed: when the generation thread dies or stalls.
        """
        async with _granted(self.scores, tokens, ticket), self.encodings.one():
            value = await self.thread.interleave(work, on_progress)
        self._metrics.scored(scored)
        return value


@asynccontextmanager
async def _granted(admission: Admission, tokens: int, ticket: Ticket | None) -> AsyncIterator[None]:
    """Memory for ``tokens``, in the place of ``ticket`` or at the end of the queue.

    Raises:
        TooLarge: when they never fit; QueueFull when there is no room and no place to wait.
    """
    if ticket is None:
        admission.check(tokens)
        (ticket,) = admission.enter([tokens])
    with ticket:
        ticket.resize(tokens)
        await ticket.granted.wait()
        yield
