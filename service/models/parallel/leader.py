"""The rank that serves: it starts the others, sends them what it does, and notices when one is lost."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import structlog
import torch
from typing_extensions import override

from patches import AttentionMass, Patched, Ranks
from service.models.parallel import LOST, RankLost
from service.models.parallel.follower import follow
from service.models.parallel.group import joined
from service.models.parallel.messages import Apply, Collect, Forward, Message, Names, packed
from service.settings import Settings

log = structlog.get_logger()
T = TypeVar("T")

AGREE_S = 5.0
"""Seconds in which every rank has to fail at a forward that fails on one. Otherwise the group is lost."""

REASON = "a rank of the tensor-parallel group was lost"

END_S = 5.0
"""Seconds that ranks have to end when the leader does."""


@contextmanager
def leading(settings: Settings) -> Iterator[Leader]:
    """Within it, this process is rank 0 of a group, and the others load the same models.

    Raises:
        ModelLoadError: when the ranks do not find each other.
    """
    context, leader = multiprocessing.get_context("spawn"), Leader(settings.tensor_parallel)
    with ExitStack() as stack:
        store = Path(stack.enter_context(TemporaryDirectory(prefix="ropeway-"))) / "store"
        stack.callback(leader.close)
        for rank in range(1, settings.tensor_parallel):
            here, there = context.Pipe()
            process = context.Process(
                target=follow, args=(settings, rank, store, there), name=f"rank-{rank}", daemon=True
            )
            process.start()
            there.close()
            leader.add(process, here)
        stack.enter_context(joined(settings, 0, store))
        leader.watch()
        yield leader


class Leader(Ranks):
    """Every rank repeats the forwards of rank 0, and its changes of caches. One thread at a time."""

    def __init__(self, size: int) -> None:
        self.size, self._names = size, Names()
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._slots: dict[int, list[Any]] = {}
        self._lock, self._closing = threading.RLock(), False

    def add(self, process: Any, pipe: Connection) -> None:
        self._processes.append(process)
        self._pipes.append(pipe)

    def lead(self, patch: Patched) -> None:
        """From now on, the other ranks do what this one does with ``patch``. They have run the same forwards so far."""
        self._names.of_model(patch)
        self._slots[id(patch)] = list(patch.slots.recipes)
        own = patch.model.forward

        @wraps(own)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._forward(patch, own, args, kwargs)

        patch.model.forward = forward
        patch.ranks = self

    def _forward(self, patch: Patched, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._lock:
            returns = self._names.next()
            self._name_observer(patch)
            carried, slots = patch.carried, self._changed_slots(patch)
            inference = torch.is_inference_mode_enabled()
            self._send(Forward(patch, args, kwargs, carried, slots, inference, returns))
            with self._together():
                output = own(*args, **kwargs)
            cache = getattr(output, "cache", None)
            if cache is not None:
                self._names.give(returns, cache)
            return output

    def _name_observer(self, patch: Patched) -> None:
        mass = getattr(patch.carried.get("observer"), "__self__", None)
        if isinstance(mass, AttentionMass) and not self._names.has(mass):
            number = self._names.next()
            self._send(Apply(AttentionMass, (mass.first, mass.stop), number))
            self._names.give(number, mass)

    def _changed_slots(self, patch: Patched) -> dict[int, Any]:
        known = self._slots[id(patch)]
        changed = {
            slot: recipe for slot, recipe in enumerate(patch.slots.recipes) if recipe is not known[slot] and recipe
        }
        for slot, recipe in changed.items():
            known[slot] = recipe
        return changed

    @override
    def apply(self, function: Callable[..., T], *args: Any) -> T:
        with self._lock:
            returns = self._names.next()
            self._send(Apply(function, args, returns))
            with self._together():
                result = function(*args)
            if result is not None:
                self._names.give(returns, result)
            return result

    @override
    def created(self, cache: object, build: Callable[..., object], *args: Any) -> None:
        with self._lock:
            returns = self._names.next()
            self._send(Apply(build, args, returns))
            self._names.give(returns, cache)

    @override
    def complete(self, mass: AttentionMass) -> AttentionMass:
        with self._lock:
            self._send(Collect(mass))
            return mass.with_heads_of([self._answer(pipe) for pipe in self._pipes])

    def _send(self, message: Message) -> None:
        """Raises:
        RankLost: when a rank is lost, or has failed where this one did not.
        """
        if LOST.is_set():
            raise RankLost(REASON)
        data = packed(message, self._names)
        for number, pipe in enumerate(self._pipes, 1):
            try:
                if pipe.poll():
                    raise self._lost(f"rank {number} failed alone: {_received(pipe)}")
                pipe.send_bytes(data)
            except (OSError, EOFError) as error:
                raise self._lost(f"rank {number} has ended") from error

    @contextmanager
    def _together(self) -> Iterator[None]:
        """A failure inside has to happen on every rank.

        Raises:
            RankLost: when it does not.
        """
        try:
            yield
        except Exception as error:
            stop = time.monotonic() + AGREE_S
            for number, pipe in enumerate(self._pipes, 1):
                try:
                    if LOST.is_set() or not pipe.poll(max(0.0, stop - time.monotonic())):
                        raise self._lost(f"rank 0 failed and rank {number} did not: {error}") from error
                    _received(pipe)
                except (OSError, EOFError):
                    raise self._lost(f"rank {number} has ended") from error
            raise

    def _answer(self, pipe: Connection) -> AttentionMass:
        try:
            answer = _received(pipe)
        except (OSError, EOFError) as error:
            raise self._lost("a rank has ended") from error
        if isinstance(answer, Exception):
            raise self._lost(f"a rank failed alone: {answer}")
        mass: AttentionMass = answer
        return mass

    def _lost(self, reason: str) -> RankLost:
        """End this process, as SIGTERM does: what runs fails, and readiness is 503."""
        if not LOST.is_set() and not self._closing:
            LOST.set()
            log.critical("rank_lost", error=reason)
            self._end_ranks(0.0)
            os.kill(os.getpid(), signal.SIGTERM)
        return RankLost(REASON)

    def watch(self) -> None:
        """Notice a rank that ends."""

        def watch() -> None:
            ready = wait([process.sentinel for process in self._processes])
            ended = next(process for process in self._processes if process.sentinel in ready)
            if not self._closing:
                ended.join(END_S)  # its sentinel is ready before its exit code
                self._lost(f"{ended.name} has ended with exit code {ended.exitcode}")

        threading.Thread(target=watch, name="ranks", daemon=True).start()

    def close(self) -> None:
        """End the other ranks. Blocks; safe to repeat."""
        self._closing = True
        self._end_ranks(END_S)

    def _end_ranks(self, within_s: float) -> None:
        for pipe in self._pipes:
            pipe.close()  # they end at the end of their pipe
        stop = time.monotonic() + within_s
        for process in self._processes:
            process.join(max(0.0, stop - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()


def _received(pipe: Connection) -> Any:
    return pickle.loads(pipe.recv_bytes())
