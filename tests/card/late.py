"""Cards that begin their work as late as they may: a host that writes too soon is seen."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import torch
from typing_extensions import override

from tests.card.card import Card
from tests.card.kernels import on_host
from tests.card.streams import Stream
from tests.recording import leaves


class LateCard(Card):
    """Work of every stream but the first begins when the host or another stream waits for it.

    The first stream works at once. Until then, memory keeps its numbers, and a new tensor is computed from them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._work: dict[Stream, list[Callable[[], object]]] = defaultdict(list)
        self._begun: Counter[Stream] = Counter()
        self._waited = self._ends = False

    def is_late(self, stream: Stream) -> bool:
        """True for streams that work as late as they may; the others work at once."""
        return stream is not self.first

    @override
    def wait(self, kind: str) -> None:
        super().wait(kind)
        self._waited = True
        self.end(self.current)

    @override
    def launch(self, call: Callable[[], object]) -> None:
        self._waited = False
        if self._ends or not self.is_late(self.current):
            super().launch(call)
        else:
            self._work[self.current].append(call)

    @override
    def compute(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        waited, self._waited = self._waited, False
        later = self._work[self.current]
        if self._ends or not self.is_late(self.current) or (waited and not later):
            return func(*args, **kwargs)
        if isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable:
            later.append(lambda: func(*args, **kwargs))
            return args[0]
        try:
            result = func(*args, **kwargs)
            made = [each for each in leaves(result) if isinstance(each, torch.Tensor)]
        except (IndexError, RuntimeError):  # by numbers from before
            made = []
        if not made:  # or a number for Python
            self.end(self.current)
            return func(*args, **kwargs)
        taken = {_memory(each) for each in leaves((args, kwargs)) if isinstance(each, torch.Tensor)}
        if any(_memory(each) not in taken for each in made):
            later.append(lambda: _again(made, func(*args, **kwargs)))
        return result

    @override
    def end(self, stream: Stream, count: int | None = None) -> None:
        if self._ends:
            return
        self._ends = True
        try:
            with on_host():
                while self._work[stream] and (count is None or self._begun[stream] < count):
                    self._begun[stream] += 1
                    self._work[stream].pop(0)()
        finally:
            self._ends = False

    @override
    def begun(self, stream: Stream) -> int:
        return self._begun[stream] + len(self._work[stream])


class LateUploads(LateCard):
    """As ``LateCard``, but the first stream alone is late: it has the inputs and the tables of encodings."""

    @override
    def is_late(self, stream: Stream) -> bool:
        return stream is self.first


def _again(made: list[torch.Tensor], result: Any) -> None:
    found = [each for each in leaves(result) if isinstance(each, torch.Tensor)]
    for old, new in zip(made, found, strict=True):
        old.copy_(new)


def _memory(one: torch.Tensor) -> int:
    return one.untyped_storage()._cdata
