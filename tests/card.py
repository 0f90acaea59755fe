"""A card without a card: tensors that say they are on ``cuda:0``, and compute on the CPU.

As on CUDA, an operation that mixes both devices fails, and what makes the host wait is counted. Of kernels that only
CUDA has, those that our code calls by name run in plain operations. It is no test of speed, of streams or of Triton.
"""

from __future__ import annotations

import copy
import itertools
import math
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

from patches.attention.log_sum_exp import eager_with_lse
from tests.recording import HOST_READS, leaves

CARD = torch.device("cuda:0")

READS = {"tolist", "item", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__"}
"""Methods of tensors that give numbers to Python."""

GUARDED: dict[str, Callable[..., Any]] = {
    "__invert__": torch.ops.aten.bitwise_not,
    "contiguous": lambda one: one if one.host.is_contiguous() else one.clone(memory_format=torch.contiguous_format),
    "copy_": lambda one, other, non_blocking=False: torch.ops.aten.copy_(one, other, non_blocking),
    "is_contiguous": lambda one: one.host.is_contiguous(),
    "nonzero": torch.ops.aten.nonzero,
}
"""Methods for which torch asks for a device before it looks at the type of a tensor, and ways around."""


class WrongDevice(RuntimeError):
    """An operation has tensors of both devices."""


class Wait(NamedTuple):
    """The host waits for the card. ``place`` is the innermost line outside torch."""

    kind: str
    place: str


class CardTensor(torch.Tensor):
    """A tensor of the card; its numbers are in ``host``."""

    host: torch.Tensor

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> CardTensor:
        made: CardTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, host.shape, strides=host.stride(), storage_offset=host.storage_offset(), dtype=host.dtype, device=CARD
        )
        made.host = host
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("tensors of the card are for use inside of `card`")


class Card:
    """``waits`` has every wait of the host so far, in their order."""

    def __init__(self) -> None:
        self.waits: list[Wait] = []
        self._pinned: dict[int, torch.Tensor] = {}

    def pin(self, one: torch.Tensor) -> torch.Tensor:
        """``one``, from which the card copies by itself from now on."""
        self._pinned[_memory(one)] = one
        return one

    def is_pinned(self, one: torch.Tensor) -> bool:
        return _memory(one) in self._pinned

    def wait(self, kind: str) -> None:
        frames = [frame for frame in traceback.extract_stack() if not _is_below(frame.filename)]
        self.waits.append(Wait(kind, f"{frames[-1].filename}:{frames[-1].lineno}"))

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operation of torch, on the numbers of its tensors."""
        name = func.overloadpacket.__name__
        taken = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        ours = [tensor for tensor in taken if isinstance(tensor, CardTensor)]
        target = None if kwargs.get("device") is None else torch.device(kwargs["device"])
        if ours:
            self._check(func, name, args, kwargs, taken)
        numbers = tree_map(_host, kwargs)
        if target is not None:
            numbers["device"] = torch.device("cpu")
        result = KERNELS.get(name, func)(*tree_map(_host, args), **numbers)
        to_host = target is not None and target.type == "cpu"
        if to_host or not (ours or target == CARD):
            return result
        known = {id(tensor.host): tensor for tensor in ours}
        return tree_map(lambda each: known[id(each)] if id(each) in known else _on_card(each), result)

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
        elif name in HOST_READS or func is torch.ops.aten.repeat_interleave.Tensor:
            self.wait("read")

    def index(self, name: str, one: Any, index: Any, *value: Any) -> Any:
        """``one[index]`` or ``one[index] = value``."""
        for part in leaves(list(index) if isinstance(index, tuple) else [index]):
            if isinstance(part, torch.Tensor) and part.ndim and not isinstance(part, CardTensor):
                self.wait("copy")
            if isinstance(part, torch.Tensor) and part.dtype == torch.bool:
                self.wait("read")
        if not isinstance(one, CardTensor):
            raise WrongDevice("a tensor of the host by an index of the card")
        if name == "__getitem__":
            return _on_card(one.host[tree_map(_host, index)])
        if isinstance(value[0], torch.Tensor) and value[0].ndim and not isinstance(value[0], CardTensor):
            self.wait("copy")
        one.host[tree_map(_host, index)] = _host(value[0])
        return None

    def made(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """A new tensor of the card, from numbers of Python or of the host."""
        if name in ("to", "cuda"):
            one = args[0]
            others = [each for each in args[1:] if not _names_card(each)]
            own = {key: each for key, each in kwargs.items() if key not in ("device", "non_blocking")}
            if isinstance(one, CardTensor):
                return torch.ops.aten.to(one, *others, **own) if others or own else one
            if not (kwargs.get("non_blocking") and self.is_pinned(one)):
                self.wait("copy")
            return _on_card(one.to(*others, **own).detach().clone())
        if name in ("tensor", "as_tensor", "new_tensor"):
            self.wait("copy")
        return _on_card(func(*args, **kwargs | {"device": "cpu"}))


class _Operations(TorchDispatchMode):
    def __init__(self, card: Card) -> None:
        super().__init__()
        self._card = card

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._card.run(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """Takes over from C++ whatever torch does there before it looks at types: devices, indices and reads."""

    def __init__(self, card: Card) -> None:
        super().__init__()
        self._card = card

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        is_ours = any(isinstance(each, CardTensor) for each in leaves(list(args[:2])))
        if kwargs.pop("pin_memory", False):
            return self._card.pin(func(*args, **kwargs))
        if name == "pin_memory":
            return self._card.pin(args[0].clone())
        if name in ("__getitem__", "__setitem__") and is_ours:
            return self._card.index(name, *args)
        if name in READS and is_ours:
            self._card.wait("read")
            return func(args[0].host, *args[1:], **kwargs)
        if name == "scaled_dot_product_attention" and is_ours:
            _check_kernel(*args[:4], **kwargs)
        if name in GUARDED and is_ours:
            return GUARDED[name](*args, **kwargs)
        if _is_card(kwargs.get("device")) or (name in ("to", "cuda") and any(map(_names_card, args[1:]))):
            return self._card.made(name, func, args, kwargs)
        if name == "new_tensor" and is_ours:
            return self._card.made(name, func, (args[0].host, *args[1:]), kwargs)
        return func(*args, **kwargs)


@contextmanager
def card() -> Iterator[Card]:
    """Inside, there is a card. For one thread."""
    made = Card()
    with ExitStack() as undo:
        for name, replacement in _of_cuda(made).items():
            undo.enter_context(mock.patch.object(torch.cuda, name, replacement))
        undo.enter_context(_Operations(made))
        undo.enter_context(_Functions(made))
        yield made


def upload(model: torch.nn.Module) -> None:
    """Move a model to the card, in place."""
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                moved = _on_card(weight.detach())
                module._parameters[name] = torch.nn.Parameter(moved, requires_grad=False)
        for name, buffer in module._buffers.items():
            module._buffers[name] = _on_card(buffer)


def download(value: Any) -> Any:
    """``value`` with the numbers of the card on the host: tensors, and objects that have some."""
    if isinstance(value, CardTensor):
        return value.host
    if isinstance(value, list | tuple | dict):
        return tree_map(download, value)
    if type(value).__module__.startswith("patches.") and hasattr(value, "__dict__"):
        moved = copy.copy(value)
        moved.__dict__.update({name: download(each) for name, each in vars(value).items()})
        return moved
    return value


@contextmanager
def on_host() -> Iterator[None]:
    """Inside, operations are ordinary ones of the CPU."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def _of_cuda(made: Card) -> dict[str, Any]:
    """Functions of ``torch.cuda`` that need no tensor."""

    class Stream:
        device = CARD
        numbers = itertools.count(1)

        def __init__(self, *_: object, **__: object) -> None:
            self.cuda_stream = next(self.numbers)

        def wait_stream(self, stream: Stream) -> None:
            """Nothing: work is done in its order."""

        def synchronize(self) -> None:
            made.wait("synchronize")

        def record_event(self) -> Stream:
            return self

    current = Stream()
    return {
        "Stream": Stream,
        "stream": nullcontext,
        "device": nullcontext,
        "current_stream": lambda *_: current,
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


def _check_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None, **_: object
) -> None:
    """No kernel of CUDA takes a mask and shared key heads; torch would write down all scores."""
    assert attn_mask is None or query.shape[1] == key.shape[1], "a mask, and heads that share key heads"


def _efficient_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None, *given: Any, scale: float
) -> tuple[torch.Tensor, ...]:
    """CUDA's kernel wants as many key heads as query heads, and a bias of whole size in aligned rows.

    It computes powers of two, see torch's ``mem_eff_attention/kernel_forward.h``. The most negative number overflows
    by the factor. A row without another score then has no sum.
    """
    assert query.shape[1] == key.shape[1] == value.shape[1]
    with on_host():
        scores = query.float() @ key.float().transpose(-1, -2) * scale
        if bias is not None:
            assert bias.shape == scores.shape
            assert bias.dtype == query.dtype
            assert (bias.stride(-1), bias.stride(-2) % 8) == (1, 0)
            scores = scores + bias.float()
        scores = scores * math.log2(math.e)
        if given[2:] == (True,):
            scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
        top = scores.amax(-1, keepdim=True)
        weights = torch.where(top == float("-inf"), 0.0, (scores - top).exp2())
        total = weights.sum(-1, keepdim=True)
        out = (weights @ value.float() / torch.where(total == 0, 1.0, total)).to(query.dtype)
        sums = (top / math.log2(math.e) + total.log())[..., 0]
        return out, torch.nn.functional.pad(sums, (0, -sums.shape[-1] % 32)), torch.zeros(()), torch.zeros(())


def _flash_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *given: Any, scale: float
) -> tuple[torch.Tensor | int, ...]:
    """CUDA's kernel takes states of half precision and one width, and heads that share key heads."""
    assert query.dtype in (torch.float16, torch.bfloat16)
    assert query.shape[-1] == key.shape[-1] == value.shape[-1]
    assert query.shape[-1] % 8 == 0
    with on_host():
        attended = eager_with_lse(query, key, value, None, scale, causal=given == (0.0, True))
        unused = torch.zeros(())
        return *attended, unused, unused, query.shape[2], key.shape[2], unused, unused, unused


KERNELS: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_efficient_attention": _efficient_attention,
    "_scaled_dot_product_flash_attention": _flash_attention,
    "histc": lambda one, *arguments: torch.histc(one.float(), *arguments).to(one.dtype),  # for integers on CUDA only
}


def _host(one: Any) -> Any:
    return one.host if isinstance(one, CardTensor) else one


def _on_card(one: Any) -> Any:
    return CardTensor(one) if isinstance(one, torch.Tensor) and not isinstance(one, CardTensor) else one


def _is_card(one: object) -> bool:
    return isinstance(one, torch.device | str) and torch.device(one).type == "cuda"


def _names_card(one: object) -> bool:
    """True for an argument of ``Tensor.to`` that says it is the card."""
    return isinstance(one, CardTensor) or _is_card(one)


def _memory(one: torch.Tensor) -> int:
    return one.untyped_storage().data_ptr()


def _is_below(filename: str) -> bool:
    return filename == __file__ or "/torch/" in filename
