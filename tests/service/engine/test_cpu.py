"""Generation threads on a CPU: OpenMP threads end without work, if others have some. Denormal numbers are zero."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import torch

from patches import patched
from service.engine.choice import PAGED, EngineChoice
from service.engine.thread import cpu
from service.engine.thread.cpu import Wake
from service.machine import heap
from tests.models import tiny_model
from tests.service.engine.generating import finished
from tests.service.engine.padded.test_padded import LIMITS, TOGETHER, prompt, running
from tests.service.serving import wait_for

TASKS = Path("/proc/self/task")


@pytest.fixture(autouse=True)
def _no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """No generation thread of another test counts."""
    monkeypatch.setattr(cpu, "_every", set())


@pytest.fixture
def _two_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("_two_threads")
@pytest.mark.parametrize("others", [0, 1])
def test_waiting_in_vain_ends_the_threads_of_a_thread(others: int) -> None:
    if not TASKS.is_dir() or cpu._libgomp() is None:
        pytest.skip("needs Linux, and torch's libgomp")
    wake = Wake()
    cpu._every.update(Wake() for _ in range(others))
    found: list[tuple[set[str], bool]] = []
    ended = threading.Event()

    def compute() -> None:
        before = set(os.listdir(TASKS))
        torch.ones(1 << 18).add(1)
        own = set(os.listdir(TASKS)) - before
        wake.set()
        assert wake.wait(0.01)
        is_kept_while_woken = own <= set(os.listdir(TASKS))
        wake.clear()
        wake.works()
        assert not wake.wait(0.01)
        found.append((own, is_kept_while_woken))
        ended.wait(30)

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        wait_for(lambda: bool(found) or not thread.is_alive())
        ((own, is_kept_while_woken),) = found
        assert len(own) == 1
        assert is_kept_while_woken
        if others:
            wait_for(lambda: not own & set(os.listdir(TASKS)))
        else:
            assert own <= set(os.listdir(TASKS))
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize("choice", [PAGED, TOGETHER], ids=str)
async def test_of_several_models_one_without_work_keeps_its_threads(
    choice: EngineChoice, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier, ended = threading.enumerate(), list[threading.Thread]()

    def end() -> None:
        if (thread := threading.current_thread()) not in earlier:  # a server of other tests has some
            ended.append(thread)

    monkeypatch.setattr(cpu, "end_openmp_threads", end)

    async def one_has_ended(times: int) -> None:
        """So often at least, and one thread keeps its own."""
        async with asyncio.timeout(30):
            while len(ended) < times or sum(wake.keeps for wake in cpu._every) != 1:
                await asyncio.sleep(0.02)
        count = len(ended)
        await asyncio.sleep(0.3)
        assert len(ended) == count

    with patched(tiny_model("llama")[1]) as patch:
        never_started = choice.built(patch, LIMITS)
    async with running(choice) as first:
        await finished(first, prompt(9), 2)
        await one_has_ended(0)
        assert ended == []
        async with running(choice) as other:
            await one_has_ended(1)
            await asyncio.gather(*(finished(engine, prompt(9), 2) for engine in (first, other)))
            await one_has_ended(2)
        assert len(cpu._every) == 1
    assert len(cpu._every) == 0
    assert not never_started.is_running()


@pytest.mark.usefixtures("_two_threads")
@pytest.mark.parametrize("choice", [PAGED, TOGETHER], ids=str)
async def test_generation_threads_compute_without_denormal_numbers(choice: EngineChoice) -> None:
    if not torch.set_flush_denormal(False):
        pytest.skip("this processor computes with denormal numbers always")
    smallest = torch.full((1 << 17,), 1e-38)

    def work() -> Generator[None, None, int]:
        yield
        return int((smallest * 0.1).count_nonzero())  # a product of two threads

    async with running(choice) as engine:
        assert await engine.thread.interleave(work(), lambda _: None) == 0
    assert int((smallest * 0.1).count_nonzero()) == len(smallest), "other threads compute with them"


def test_a_thread_without_work_gives_free_memory_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
    trimmed = list[int]()
    monkeypatch.setattr(heap, "trim", lambda: trimmed.append(1))
    wake = Wake()
    wake.works()
    assert not wake.wait(0.001)
    assert not trimmed, "it has just worked"
    monkeypatch.setattr(cpu, "TRIM_AFTER_S", 0.0)
    for _ in range(3):
        assert not wake.wait(0.001)
    assert len(trimmed) == 1
    wake.works()
    assert not wake.wait(0.001)
    assert len(trimmed) == 2
