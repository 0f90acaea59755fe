"""A card without a card: tensors that say they are on ``cuda:0``, and compute on the CPU.

As on CUDA, an operation that mixes both devices fails, and what makes the host wait is counted. Of kernels that only
CUDA has, those that our code calls by name run in plain operations. It is no test of speed or of Triton.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.card.kernels import check_kernel, on_host
from tests.card.streams import CARD, Stream
from tests.card.tensors import CardTensor, is_card, mapped, names_card, of_host, on_card
from tests.recording import HOST_READS, leaves

ATEN = torch.ops.aten
FOLDER = str(Path(__file__).parent)

READS = {"tolist", "item", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__"}
"""Methods of tensors that give numbers to Python."""

GUARDED: dict[str, Callable[..., Any]] = {
    "__invert__": ATEN.bitwise_not,
    "contiguous": lambda one: one if one.host.is_contiguous() else one.clone(memory_format=torch.contiguous_format),
    "copy_": lambda one, other, non_blocking=False: ATEN.copy_(one, other, non_blocking),
    "is_contiguous": lambda one: one.host.is_contiguous(),
    "nonzero": ATEN.nonzero,
}
"""Methods for which torch asks for a device before it looks at the type of a tensor, and ways around."""


class WrongDevice(RuntimeError):
    """An operation has tensors of both devices."""


class Wait(NamedTuple):
    """The host waits for the card. ``place`` is the innermost line outside torch."""

    kind: str
    place: str


class Card:
    """``waits`` has every wait of the host so far, in their order."""

    def __init__(self) -> None:
        self.current = self.first = Stream(self)
        self.waits: list[Wait] = []
        self._pinned: dict[int, torch.Tensor] = {}

    def pin(self, one: torch.Tensor) -> torch.Tensor:
        """``one``, from which the card copies by itself from now on."""
        self._pinned[_memory(one)] = one
        return one

    def is_pinned(self, one: torch.Tensor) -> bool:
        return _memory(one) in self._pinned

    def wait(self, kind: str) -> None:
        frame: Any = sys._getframe()
        while _is_below(frame.f_code.co_filename):
            frame = frame.f_back
        self.waits.append(Wait(kind, f"{frame.f_code.co_filename}:{frame.f_lineno}"))

    def compute(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The result of an operation on tensors of the host. Their memory is the card's."""
        return func(*args, **kwargs)

    def launch(self, call: Callable[[], object]) -> None:
        """``call`` on tensors of the host, in place of a kernel or a graph."""
        with on_host():
            call()

    def end(self, stream: Stream, count: int | None = None) -> None:
        """End the work of a stream, the first ``count`` operations or all: here, work ends at once."""

    def begun(self, stream: Stream) -> int:
        """Operations of a stream so far."""
        return 0

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operation of torch, on the numbers of its tensors."""
        taken = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        ours = [tensor for tensor in taken if isinstance(tensor, CardTensor)]
        device = kwargs.get("device")
        target = None if device is None else torch.device(device)
        if not (ours or target == CARD):
            return func(*args, **kwargs)
        if ours:
            self._check(func, func.overloadpacket.__name__, args, kwargs, taken)
        result = self.compute(*of_host(func, args, kwargs))
        if target is not None and target.type == "cpu":
            return result
        known = {id(tensor.host): tensor for tensor in ours}
        return mapped(lambda each: known[id(each)] if id(each) in known else on_card(each), result)

    def _check(self, func: Any, name: str, args: Any, kwargs: Any, taken: list[torch.Tensor]) -> None:
        from_host = [tensor for tensor in taken if not isinstance(tensor, CardTensor)]
        if name == "copy_":
            asked = (*args[2:], kwargs.get("non_blocking"))[0]
            if from_host and not (asked and self.is_pinned(from_host[0])):
                self.wait("copy")
        elif name == "_to_copy":
            if kwargs.get("device") is not None:
                self.wait("copy")
        elif any(tensor.ndim for tensor in from_host):
            raise WrongDevice(f"{func} has tensors of both devices")
        elif name in HOST_READS or func is ATEN.repeat_interleave.Tensor:
            self.wait("read")

    def index(self, name: str, one: Any, index: Any, *value: Any) -> Any:
        """``one[index]`` or ``one[index] = value``, in operations that torch dispatches."""
        if not isinstance(one, CardTensor):
            raise WrongDevice("a tensor of the host by an index of the card")
        view, places = self._viewed(one, index if isinstance(index, tuple) else (index,))
        if name == "__getitem__":
            return ATEN.index(view, places) if places else view
        new = value[0]
        if isinstance(new, torch.Tensor) and new.ndim and not isinstance(new, CardTensor):
            new = self._moved(new)
        if not places:
            ATEN.copy_(view, new) if isinstance(new, torch.Tensor) and new.ndim else ATEN.fill_(view, new)
        else:
            number = new if isinstance(new, torch.Tensor) else on_card(torch.full((), new, dtype=one.dtype))
            ATEN.index_put_(view, places, number)
        return None

    def _viewed(self, one: torch.Tensor, index: tuple[Any, ...]) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        """(``one`` by the slices of ``index``, the tensors of ``index`` by dimension)."""
        places: list[torch.Tensor | None] = []
        dims, dim = one.ndim - sum(_taken_dims(part) for part in index), 0
        for part in index:
            if part is Ellipsis:
                dim += dims
            elif part is None:
                one, dim = ATEN.unsqueeze(one, dim), dim + 1
            elif isinstance(part, slice):
                one, dim = ATEN.slice(one, dim, part.start, part.stop, part.step or 1), dim + 1
            elif isinstance(part, torch.Tensor | list):
                part = torch.tensor(part) if isinstance(part, list) else part
                if part.dtype == torch.bool:
                    self.wait("read")
                places += [None] * (dim - len(places)) + [part if isinstance(part, CardTensor) else self._moved(part)]
                dim += 1
            else:
                one = ATEN.select(one, dim, part)
        return one, places

    def _moved(self, one: torch.Tensor) -> torch.Tensor:
        """``one`` of the host on the card."""
        if one.ndim:
            self.wait("copy")
        moved: torch.Tensor = on_card(self.compute(lambda host: host.detach().clone(), (one,), {}))
        return moved

    def made(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """A new tensor of the card, from numbers of Python or of the host."""
        if name in ("to", "cuda"):
            one = args[0]
            others = [each for each in args[1:] if not names_card(each)]
            own = {key: each for key, each in kwargs.items() if key not in ("device", "non_blocking")}
            if isinstance(one, CardTensor):
                return ATEN.to(one, *others, **own) if others or own else one
            if not (kwargs.get("non_blocking") and self.is_pinned(one)):
                self.wait("copy")
            return on_card(self.compute(lambda one: one.to(*others, **own).detach().clone(), (one,), {}))
        if name in ("tensor", "as_tensor", "new_tensor"):
            self.wait("copy")
        return on_card(func(*args, **kwargs | {"device": "cpu"}))


class _Operations(TorchDispatchMode):
    def __init__(self, card: Card) -> None:
        super().__init__()
        self._card = card

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing here is compiled: torch 2.13 would wrap each call below against that, for a tenth of its time."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._card.run(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """Takes over from C++ whatever torch does there before it looks at types: devices, indices and reads."""

    def __init__(self, card: Card) -> None:
        super().__init__()
        self._card = card

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__" or isinstance(func, torch._ops.OpOverload):  # a property, or nothing but an operation
            return func(*args, **kwargs)
        return self._called(name, func, args, kwargs)

    def _called(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        is_ours = any(isinstance(each, CardTensor) for each in leaves(list(args[:2])))
        if kwargs.get("pin_memory"):
            return self._card.pin(func(*args, **kwargs | {"pin_memory": False}))
        if name == "pin_memory":
            return self._card.pin(args[0].clone())
        if name in ("__getitem__", "__setitem__") and is_ours:
            with torch._C._AutoDispatchBelowADInplaceOrView():  # a view of a tensor from outside of inference mode
                return self._card.index(name, *args)
        if name in READS and is_ours:
            self._card.wait("read")
            return func(args[0].host, *args[1:], **kwargs)
        if name == "scaled_dot_product_attention" and is_ours:
            check_kernel(*args[:4], **kwargs)
        if name in GUARDED and is_ours:
            return GUARDED[name](*args, **kwargs)
        if is_card(kwargs.get("device")) or (name in ("to", "cuda") and any(map(names_card, args[1:]))):
            return self._card.made(name, func, args, kwargs)
        if name == "new_tensor" and is_ours:
            return self._card.made(name, func, (args[0].host, *args[1:]), kwargs)
        return func(*args, **kwargs)


@contextmanager
def card(kind: Callable[[], Card] = Card) -> Iterator[Card]:
    """Inside, there is a card, of another ``kind`` perhaps. For one thread."""
    made = kind()
    with ExitStack() as undo:
        for name, replacement in _of_cuda(made).items():
            undo.enter_context(mock.patch.object(torch.cuda, name, replacement))
        undo.enter_context(mock.patch.object(torch, "get_device_module", return_value=torch.cuda))
        undo.enter_context(_Operations(made))
        undo.enter_context(_Functions(made))
        undo.callback(_present.pop)
        _present.append(made)
        yield made


_present: list[Card] = []


def launch(call: Callable[[], object]) -> None:
    """Have the card ``call`` in its turn, on tensors of the host."""
    _present[-1].launch(call)


def _of_cuda(made: Card) -> dict[str, Any]:
    """Functions of ``torch.cuda`` that need no tensor."""

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        before, made.current = made.current, stream
        try:
            yield
        finally:
            made.current = before

    return {
        "Stream": lambda *_, **__: Stream(made),
        "stream": on,
        "device_of": nullcontext,
        "current_stream": lambda *_: made.current,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "is_available": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "synchronize": lambda *_: made.wait("synchronize"),
        "empty_cache": lambda: None,
        "get_device_capability": lambda *_: (9, 0),
        "mem_get_info": lambda *_: (64 << 30, 80 << 30),
        "memory_reserved": lambda *_: 0,
        "memory_allocated": lambda *_: 0,
    }


def _taken_dims(part: object) -> int:
    """Dimensions of a tensor that a part of an index takes."""
    if part is None or part is Ellipsis:
        return 0
    return part.ndim if isinstance(part, torch.Tensor) and part.dtype == torch.bool else 1


def _memory(one: torch.Tensor) -> int:
    return one.untyped_storage().data_ptr()


def _is_below(filename: str) -> bool:
    return filename.startswith(FOLDER) or "/torch/" in filename
