"""Captured graphs without a card: operations on tensors are recorded once, and executed again on the same tensors.

As on CUDA, a replay runs no Python. A number that Python knew at the capture stays, and what the host reads is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

Call = Callable[[], object]

HOST_READS = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "unique_dim"}
"""Operations that wait for numbers of the device."""


ATTENTION = ("attention", "merge", "write")
"""The Triton kernels of paged attention."""


class NotCapturable(RuntimeError):
    """The operation waits for the device, or reads the host's memory."""


class Recorded:
    """A list of calls. ``replays`` counts how often it was executed again, by ``launch``."""

    def __init__(self, launch: Callable[[Call], None] = lambda replay: replay()) -> None:
        self.calls: list[Call] = []
        self.replays = 0
        self._launch = launch

    def replay(self) -> None:
        self.replays += 1
        self._launch(self._run)

    def _run(self) -> None:
        with torch._C._AutoDispatchBelowADInplaceOrView():  # of tensors from inside and outside of inference mode
            for call in self.calls:
                call()


class Recorder:
    """In place of ``CudaCapture``. ``graphs`` has everything that was captured."""

    def __init__(self) -> None:
        self.graphs: list[Recorded] = []
        self._calls: list[Call] | None = None

    def __call__(self, run: Callable[[], None]) -> Recorded:
        recorded = Recorded(self.launch)
        self._calls = recorded.calls
        try:
            with _seen_as_capturing(), _kernels_recorded(recorded.calls), _Operations(self, recorded.calls):
                run()
        finally:
            self._calls = None
        self.graphs.append(recorded)
        return recorded

    def launch(self, replay: Call) -> None:
        """A replay, in its turn."""
        replay()

    def operation(self, func: Any, args: Any, kwargs: Any, result: Any) -> tuple[Any, Any, Any, Any]:
        """An operation and its result as a replay has them: on tensors with numbers."""
        return func, args, kwargs, result

    def call(self, function: Call) -> None:
        """Call ``function`` in place of a kernel: recorded as one call, without its operations."""
        with _disable_current_modes():
            function()
        if self._calls is not None:
            self._calls.append(function)


class _Operations(TorchDispatchMode):
    """Appends each operation on tensors, with its own tensors, to ``calls``."""

    def __init__(self, recorder: Recorder, calls: list[Call]) -> None:
        super().__init__()
        self._recorder, self._calls = recorder, calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        _refuse(func, args)
        result = func(*args, **kwargs)
        if call := _again(*self._recorder.operation(func, args, kwargs, result)):
            self._calls.append(call)
        return result


def _again(func: Any, args: Any, kwargs: Any, result: Any) -> Call | None:
    """A call that repeats an operation. None for a view, which stays what it is."""
    taken = {_memory(each) for each in leaves((args, kwargs)) if isinstance(each, torch.Tensor)}
    made = [(place, each) for place, each in enumerate(leaves(result)) if isinstance(each, torch.Tensor)]
    outputs = [(place, each) for place, each in made if _memory(each) not in taken]
    is_view = made and not outputs
    if is_view and isinstance(func, torch._ops.OpOverload) and not func._schema.is_mutable:
        return None

    def again() -> None:
        found = leaves(func(*args, **kwargs))
        for place, output in outputs:
            output.copy_(found[place])

    return again


def leaves(tree: Any) -> list[Any]:
    """As torch's ``tree_leaves``, which costs more than most operations; those take and return plain containers."""
    if isinstance(tree, dict):
        inner: Iterable[Any] = tree.values()
    elif isinstance(tree, list | tuple):
        inner = tree
    else:
        return [tree]
    return [leaf for each in inner for leaf in leaves(each)]


def _memory(tensor: torch.Tensor) -> int:
    """The memory of a tensor: a view has that of another."""
    return tensor.untyped_storage()._cdata


def _refuse(func: Any, args: Any) -> None:
    name = func.overloadpacket.__name__
    if name in HOST_READS:
        raise NotCapturable(f"operation not permitted when stream is capturing: {name}")
    if name == "lift_fresh" and args[0].ndim:
        raise NotCapturable(f"a capture cannot copy numbers of Python: {args[0]}")
    indices = args[1] if name in ("index", "index_put", "index_put_") else []
    if any(each is not None and each.dtype == torch.bool for each in indices):
        raise NotCapturable(f"operation not permitted when stream is capturing: {name} by a mask")


@contextmanager
def _seen_as_capturing() -> Iterator[None]:
    """transformers asks whether its stream is captured, and reads nothing back then."""
    with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True):
        yield


@contextmanager
def _kernels_recorded(calls: list[Call]) -> Iterator[None]:
    """Launches of the Triton kernels are recorded as such, where Triton is."""
    with ExitStack() as undo:
        if find_spec("triton") is not None:
            from patches.attention.paged.triton import kernel
            from patches.model.fusion import kernels

            fused = ("rms_norm", "rotate", "gated")
            for module, name in [*((kernel, each) for each in ATTENTION), *((kernels, each) for each in fused)]:
                launches = _Launches(getattr(module, name), calls)
                undo.enter_context(mock.patch.object(module, name, launches))
        yield


class _Launches:
    def __init__(self, function: Any, calls: list[Call]) -> None:
        self._function, self._calls = function, calls

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **constants: Any) -> None:
            def again() -> None:
                self._function[grid](*args, **constants)

            with _disable_current_modes():  # the interpreter itself computes with tensors
                again()
            self._calls.append(again)

        return launch
