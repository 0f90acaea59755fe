"""A card that begins its work as late as it may: a host that writes too soon is seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from typing_extensions import override

from tests.card.card import Card, Stream
from tests.card.kernels import on_host
from tests.recording import leaves


class LateCard(Card):
    """Work of every stream but the first begins when the host or the first stream waits for it.

    The first stream works at once. Until then, memory keeps its numbers, and a new tensor is computed from them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._work: list[Callable[[], object]] = []
        self._begun = 0
        self._waited = self._ends = False

    @override
    def wait(self, kind: str) -> None:
        super().wait(kind)
        self._waited = True
        if self.current is not self.first:
            self.end(self.current)

    @override
    def launch(self, call: Callable[[], object]) -> None:
        if self.current is self.first or self._ends:
            call()
        else:
            self._later(call)

    @override
    def compute(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        waited, self._waited = self._waited, False
        if self.current is self.first or self._ends or (waited and not self._work):
            return func(*args, **kwargs)
        if isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable:
            self._later(lambda: func(*args, **kwargs))
            return args[0]
        try:
            result = func(*args, **kwargs)
        except (IndexError, RuntimeError):  # by numbers from before
            self.end(self.current)
            return func(*args, **kwargs)
        taken = {_memory(each) for each in leaves((args, kwargs)) if isinstance(each, torch.Tensor)}
        made = [each for each in leaves(result) if isinstance(each, torch.Tensor)]
        if any(_memory(each) not in taken for each in made):
            self._later(lambda: _again(made, func(*args, **kwargs)))
        return result

    @override
    def end(self, stream: Stream, count: int | None = None) -> None:
        if stream is self.first or self._ends:
            return
        self._ends = True
        try:
            with on_host():
                while self._work and (count is None or self._begun < count):
                    self._begun += 1
                    self._work.pop(0)()
        finally:
            self._ends = False

    @override
    def begun(self, stream: Stream) -> int:
        return self._begun + len(self._work)

    def _later(self, call: Callable[[], object]) -> None:
        self._work.append(call)


def _again(made: list[torch.Tensor], result: Any) -> None:
    found = [each for each in leaves(result) if isinstance(each, torch.Tensor)]
    for old, new in zip(made, found, strict=True):
        old.copy_(new)


def _memory(one: torch.Tensor) -> int:
    return one.untyped_storage()._cdata
