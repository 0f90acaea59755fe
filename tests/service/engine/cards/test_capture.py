"""A capture that fails gives its memory back; graphs that share a pool go on sharing it. Torch's are imitated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from service.engine.adapter.cards.graphs import CudaCapture


class Imitation:
    """Pools by number. ``stays``: the allocator stays in a capture that failed, as before pytorch issue 180395."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, stays: bool) -> None:
        self.stays, self.pools, self.begun, self.reset = stays, 0, list[int](), list[object]()
        card = self

        class Graph:
            def reset(self) -> None:
                card.reset.append(self)

        stream = SimpleNamespace(device=SimpleNamespace(index=0))
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "graph", self.capturing)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", self.handle)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self.end, raising=False)

    def handle(self) -> int:
        self.pools += 1
        return self.pools

    @contextmanager
    def capturing(self, _graph: object, *, pool: int, **_: object) -> Iterator[None]:
        self.begun.append(pool)
        yield

    def end(self, _device: int, _pool: int) -> None:
        if not self.stays:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")


def full() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def failed(capture: Callable[[Callable[[], None]], object]) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        capture(full)


def test_without_memory_its_memory_comes_back_and_the_pool_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Imitation(monkeypatch, stays=False)
    capture = CudaCapture()
    kept = capture(lambda: None)
    failed(capture)
    assert (len(card.reset), capture._lost) == (1, [])
    capture(lambda: None)
    assert card.begun == [1, 1, 1]
    assert kept not in card.reset


def test_a_pool_that_no_graph_holds_is_never_begun_again(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Imitation(monkeypatch, stays=False)
    capture = CudaCapture()
    failed(capture)
    failed(capture)
    del (kept := [capture(lambda: None)])[:]  # the graph makes room for another one
    failed(capture)
    capture(lambda: None)
    assert not kept
    assert card.begun == [1, 2, 3, 3, 4]


def test_a_graph_whose_capture_the_allocator_never_left_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Imitation(monkeypatch, stays=True)
    capture = CudaCapture()
    kept = capture(lambda: None)
    failed(capture)
    assert (card.reset, len(capture._lost)) == ([], 1)
    capture(lambda: None)
    assert card.begun == [1, 1, 2]
    assert kept not in capture._lost
