"""CUDA graphs of decode steps: captured once for each size of a batch, and replayed over the same tensors.

A replay runs no Python. A step is written into static tensors before it, and tokens are drawn behind it. Steps with
prompt tokens run as ever, and so do sizes whose capture failed. Each failure is logged, and the steps are counted. Only
captures that had no memory are tried again.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, Protocol
from weakref import WeakSet

import structlog
import torch

from patches import DecodeStep, DecodeSteps, Patched, decode_batch
from service.engine.adapter.cards.decode_rows import DecodeRows
from service.engine.adapter.pages.cache import EncodingCache
from service.engine.thread.out_of_memory import give_back, is_out_of_memory, whole_card

log = structlog.get_logger()

GraphUse = Literal["replayed", "captured", "failed", "recorded", "list", "none"]
"""The part of a graph in a step, or that of a list of its calls (``patches.Recordings``). A size whose capture failed
has no graph, and neither has a step with prompts."""

MOST_GRAPHS = 128
"""Captured sizes; the one that was used longest ago makes room for another."""

STEPS_WITHOUT_MEMORY = 1000
"""Steps of a size that run without a graph before a capture without memory is tried again, each time.

They take some seconds. Others, such as a scoring step, may give memory back by then, and a try takes little of it.
"""


class Graph(Protocol):
    """Captured operations."""

    def replay(self) -> None: ...


Capture = Callable[[Callable[[], None]], Graph]
"""Captures the operations of a function."""


class CudaCapture:
    """Captures on the current stream. Graphs share their memory: nothing in it is read after a replay.

    torch captures one graph at a time in a process, and every model has its thread.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._sharing: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
        self._lost: list[torch.cuda.CUDAGraph] = []

    def __call__(self, run: Callable[[], None]) -> Graph:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        # Other threads may use the card during the capture: only this one must not.
        capturing = torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local")
        try:
            with whole_card, _without_collection(), capturing:
                run()
        except Exception:
            self._leave(graph, stream.device)
            raise
        self._sharing.add(graph)
        return graph

    def _leave(self, graph: torch.cuda.CUDAGraph, device: torch.device) -> None:
        """Take the allocator out of a capture that failed, and give back the memory that it took.

        Before pytorch issue 180395, torch may leave the allocator in the capture for ever, with a reference to the
        graph. Other captures would fail, and memory would no longer be given back. Such a graph is kept. Without
        memory, a capture ends in order: its memory is free behind ``reset``, and other graphs go on sharing the pool.
        """
        try:
            torch._C._cuda_endAllocateToPool(device.index, self._pool)
        except RuntimeError:  # torch has left it already
            graph.reset()
            if self._sharing:
                return
        else:
            self._lost.append(graph)
        self._pool = torch.cuda.graph_pool_handle()  # no graph may begin in a pool that none holds


class DecodeGraphs:
    """The graphs of one engine, for up to ``rows`` sequences. ``failures`` gets the reason of each failed capture."""

    def __init__(self, patch: Patched, cache: EncodingCache, rows: int, failures: list[str]) -> None:
        self._patch, self._rows, self._failures = patch, rows, failures
        self._capture: Capture = CudaCapture()
        self._steps = DecodeSteps(rows, cache.most_pages, cache.page_size, cache.spare_page, patch.model.device)
        self._graphs: dict[Hashable, Graph] = {}
        self._failed: set[Hashable] = set()
        self._waiting: dict[Hashable, int] = {}
        """Steps before another try, of sizes whose capture had no memory."""
        self._logits: torch.Tensor | None = None
        self._running: DecodeStep | None = None

    def logits(self, arguments: dict[str, Any]) -> tuple[GraphUse, torch.Tensor | None]:
        """(what the step had of a graph, float32 logits [rows, vocabulary] or None for the ordinary forward).

        The step is the one that ``replayed`` has found no graph of. ``arguments`` are those of the model for it. The
        logits hold until the next step.
        """
        step = self._steps.last
        assert step is not None, "`replayed` has filled it"
        key = self._key(step)
        if key in self._failed:
            return "failed", None
        if self._waiting.get(key):
            self._waiting[key] -= 1
            return "failed", None
        return self._captured(key, lambda: self._forward(arguments, step))

    def replayed(self, rows: DecodeRows) -> tuple[Mapping[int, int], torch.Tensor] | None:
        """(the most tokens of each slot, logits) of a step whose graph there is, or None. It needs no more inputs."""
        step = self._steps.of(rows.numbers, rows.pages, rows.tokens)
        if not self._replayed(self._key(step)):
            return None
        self._running = step
        assert self._logits is not None, "the capture has left some"
        return step.longest, self._logits

    def replayed_ahead(self, tokens: torch.Tensor) -> tuple[Mapping[int, int], torch.Tensor] | None:
        """As ``replayed``, of the step that was expected. ``tokens`` int64 [n] are those that the running step draws.

        None without a graph of it, and where its keys begin another page.
        """
        step = self._running
        longest = None if step is None else step.expected
        if step is None or longest is None:
            return None
        key = step.size, self._patch.prepare(longest)
        if key not in self._graphs:
            return None
        step.advance(tokens)
        self._replayed(key)
        assert self._logits is not None, "the capture has left some"
        return longest, self._logits

    def expect(self) -> None:
        """While a replay runs: prepare for the same sequences with one token more."""
        if self._running is not None:
            self._running.expect()

    def _key(self, step: DecodeStep) -> Hashable:
        return step.size, self._patch.prepare(step.longest)

    def _replayed(self, key: Hashable) -> bool:
        graph = self._graphs.pop(key, None)
        if graph is None:
            return False
        self._graphs[key] = graph
        graph.replay()
        return True

    def _forward(self, arguments: dict[str, Any], step: DecodeStep) -> None:
        """One forward of ``step``, up to logits at their address."""
        given = arguments | {"input_ids": step.input_ids, "position_ids": step.position_ids}
        for name in ("logits_indices", "logits_to_keep"):  # every row has a new token
            given.pop(name, None)
        with self._patch.packed(decode_batch(step), given):
            logits = self._patch.model(**given).logits[0]
        if self._logits is None:
            self._logits = torch.empty(self._rows, logits.shape[-1], device=logits.device)
        self._logits[: len(logits)].copy_(logits)

    def _captured(self, key: Hashable, forward: Callable[[], None]) -> tuple[GraphUse, torch.Tensor | None]:
        """Run the step once, which also compiles its kernels, and capture it for the next ones of its size.

        Raises:
            Exception: when the step itself fails for another reason than memory.
        """
        has_run, had_memory, failure = False, True, None
        try:
            forward()
            has_run = True
            graph = self._capture(forward)
        except Exception as error:
            if not (has_run or is_out_of_memory(error)):
                raise
            failure, had_memory = _reason(error)
        if failure is None:
            while len(self._graphs) >= MOST_GRAPHS:
                del self._graphs[next(iter(self._graphs))]
            self._graphs[key] = graph
            self._waiting.pop(key, None)
            return "captured", self._logits
        give_back()
        if not has_run:  # the step itself had no memory; the next one of its size may have it
            log.warning("graph_without_memory", error=failure, key=str(key))
            return "failed", None
        if key not in self._waiting:
            self._failures.append(failure)
        if had_memory:
            self._failed.add(key)
        else:
            self._waiting[key] = STEPS_WITHOUT_MEMORY
        log.warning("graph_failed", error=failure, key=str(key))
        return "failed", self._logits


@contextmanager
def _without_collection() -> Iterator[None]:
    """Inside, Python collects no garbage: what transformers leaves behind empties the card's cache, which a capture
    forbids."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _reason(error: Exception) -> tuple[str, bool]:
    """The first of several errors, and False if it was for memory.

    A capture that fails inside fails again at its end.
    """
    while isinstance(error.__context__, Exception):
        error = error.__context__
    return f"{type(error).__name__}: {error}", not is_out_of_memory(error)
