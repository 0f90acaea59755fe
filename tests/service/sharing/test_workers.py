"""Work beside the model: bounded, shared, stopped when no client waits for it any more."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest

from service import context
from service.context import RequestContext
from service.sharing import child, workers
from service.sharing.admission import QueueFull
from service.sharing.child import Child, ChildFailed
from service.sharing.stopping import SLICE_S, Stopped, check_wanted, outside_python
from service.sharing.workers import Workers
from tests.service.waiting import until


@pytest.fixture
async def pool() -> AsyncIterator[Workers]:
    made = Workers(shared=True, threads=2, processes=1)
    yield made
    made.close()


def _has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it may end at any moment, so nothing asks beforehand whether it exists
        return True


def acting(tenant: str) -> None:
    context.enter(RequestContext("", tenant=tenant))


async def test_cancelled_work_on_a_thread_stops_and_gives_back_its_place(pool: Workers) -> None:
    acting("anna")
    began, ended = threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        try:
            while True:
                check_wanted()
                time.sleep(0.001)
        except Stopped:
            ended.set()
            raise

    task = asyncio.create_task(pool.run(work))
    await until(began.is_set)
    task.cancel()
    await until(ended.is_set)
    assert await pool.run(lambda: 7) == 7
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_place_is_taken_until_the_thread_is_really_free(pool: Workers) -> None:
    """Work that does not look whether it is wanted holds its place: the bound holds whatever callers do."""
    acting("anna")
    release, running = threading.Event(), []

    def work() -> None:
        running.append(1)
        release.wait(20)

    tasks = [asyncio.create_task(pool.run(work)) for _ in range(5)]
    await until(lambda: running)
    for task in tasks:
        task.cancel()
    more = asyncio.create_task(pool.run(work))
    await asyncio.sleep(0.1)
    assert len(running) == 1  # of two threads, one tenant has one
    release.set()
    await more
    assert len(running) == 2


async def test_one_tenant_leaves_a_thread_to_the_next_and_its_queue_ends(
    pool: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()

    def work() -> bool:
        while not release.wait(0.002):
            check_wanted()
        return True

    acting("anna")
    waiting = [asyncio.create_task(pool.run(work)) for _ in range(workers.MAX_WAITING + 1)]
    await asyncio.sleep(0.05)
    with pytest.raises(QueueFull, match="waiting for a thread"):
        await pool.run(int)
    acting("berta")
    assert await pool.run(lambda: "berta") == "berta"
    release.set()
    assert all(await asyncio.gather(*waiting))


async def test_threads_compute_by_turns(pool: Workers) -> None:
    """Two at once would make every step of a generation wait for both."""
    computing, together = 0, 0

    def work() -> int:
        nonlocal computing, together
        turns = 0
        for _ in range(20):
            computing += 1
            together = max(together, computing)
            time.sleep(2 * SLICE_S)
            computing -= 1
            check_wanted()
            turns += 1
        return turns

    async def of(tenant: str) -> int:
        acting(tenant)
        return await pool.run(work)

    began = time.monotonic()
    assert await asyncio.gather(*(asyncio.create_task(of(tenant)) for tenant in ("anna", "berta"))) == [20, 20]
    assert together == 1
    assert time.monotonic() - began > 40 * 2 * SLICE_S


async def test_a_thread_that_waits_leaves_its_turn_to_others(pool: Workers) -> None:
    release = threading.Event()

    def waits() -> bool:
        with outside_python():
            return release.wait(20)

    acting("anna")
    waiting = asyncio.create_task(pool.run(waits))
    await asyncio.sleep(0.05)
    acting("berta")
    assert await pool.run(lambda: "berta") == "berta"
    release.set()
    assert await waiting


def _pid_and_niceness() -> tuple[int, int]:
    return os.getpid(), os.nice(0)


def _fails() -> None:
    raise ValueError("a reason")


def _sleeps(path: Path) -> None:
    path.write_text(str(os.getpid()))
    time.sleep(60)


def _fills_memory() -> int:
    return len(bytearray(child.MEMORY_BYTES + (1 << 20)))


async def test_a_child_is_a_process_of_its_own_that_yields(pool: Workers) -> None:
    pid, niceness = await pool.render(_pid_and_niceness)
    assert pid != os.getpid()
    assert niceness > os.nice(0)
    assert not psutil.pid_exists(pid)
    assert await pool.render(gc.get_freeze_count) > 0


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="no fork server on this system")
def test_a_child_outlives_the_death_of_the_fork_server() -> None:
    Child(_pid_and_niceness).run()
    kept: Any = forkserver._forkserver
    server = kept._forkserver_pid
    os.kill(server, signal.SIGSTOP)  # it takes the call, and dies with it
    threading.Timer(0.5, os.kill, (server, signal.SIGKILL)).start()
    pid, _ = Child(_pid_and_niceness).run()
    assert pid not in (os.getpid(), server)


def test_children_of_several_threads_leave_the_main_module() -> None:
    main = sys.modules["__main__"]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: Child(_pid_and_niceness).run(), range(24)))
    assert sys.modules["__main__"] is main


def test_a_child_that_dies_in_the_middle_of_its_answer_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(connection: Connection) -> bytes:
        raise OSError("got end of file during message")

    monkeypatch.setattr(Connection, "recv_bytes", cut)
    child = Child(_pid_and_niceness)
    with pytest.raises(ChildFailed, match="was killed"):
        child.run()


async def test_what_a_child_raises_is_told(pool: Workers) -> None:
    with pytest.raises(ChildFailed, match="ValueError: a reason"):
        await pool.render(_fails)


async def test_a_child_that_is_not_wanted_is_killed(pool: Workers, tmp_path: Path) -> None:
    path = tmp_path / "pid"
    task = asyncio.create_task(pool.render(_sleeps, path))
    await until(lambda: path.exists() and path.stat().st_size)
    pid = int(path.read_text())
    child = psutil.Process(pid)
    task.cancel()
    await until(lambda: _has_ended(child))
    assert (await pool.render(_pid_and_niceness))[0] != pid


@pytest.mark.skipif(not hasattr(os, "fork"), reason="memory of a process is limited on POSIX only")
async def test_a_child_has_a_limit_of_memory(pool: Workers) -> None:
    with pytest.raises(ChildFailed, match="memory"):
        await pool.render(_fills_memory)


async def test_closing_stops_what_runs() -> None:
    pool = Workers(shared=False, threads=1, processes=1)
    stopped = threading.Event()

    def work() -> None:
        try:
            while True:
                check_wanted()
                time.sleep(0.001)
        finally:
            stopped.set()

    task = asyncio.create_task(pool.run(work))
    await asyncio.sleep(0.05)
    pool.close()
    await until(stopped.is_set)
    with pytest.raises(Stopped):
        await task
