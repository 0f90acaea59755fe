"""Forwards as lists of their calls of torch, which run again without the Python of the model's modules.

For a few tokens, that Python takes as long as the mathematics of a small model. A recording serves forwards of the same
shape. It calls the same functions in the same order, so it computes the same bits. Calls of a seam are parts of the
list and run as Python, since they depend on the batch. A model is not recorded if its Python reads numbers of tensors.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MethodWrapperType
from typing import Any, Literal

import torch
from torch import fx
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

from patches.model.recorded.calls import Calls
from patches.model.recorded.tidying import tidy

MOST = 128
"""Recordings that are kept, one for each number of rows."""

Use = Literal["none", "recorded", "list", "failed"]
"""The part of a list in a forward. The forward had none, was written into one, ran from one, or is refused one."""

LITERALS = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
"""Arguments that are written into the list. All others become its constants."""

READS = {"tolist", "numpy", "__array__", "__dlpack__"}
"""Methods by which Python reads a tensor past torch's dispatcher."""


@dataclass(frozen=True)
class Logits:
    """The output of a recorded forward: ``logits`` [rows, tokens, vocabulary]."""

    logits: torch.Tensor


class Recorder(TorchFunctionMode):
    """Within it, calls of torch functions are written down in ``calls``, from tensors ``inputs`` on.

    ``refused`` is the reason why the list does not serve other inputs, if there is one. ``running`` counts
    functions of torch that run now, and ``seams`` those of a seam. ``writes`` is true if the last one wrote memory.
    """

    def __init__(self, inputs: tuple[torch.Tensor, ...]) -> None:
        super().__init__()
        self.refused: str | None = None
        self.running = self.seams = 0
        self.writes = False
        self.calls = Calls()
        self._nodes: dict[int, fx.Node] = {}
        self._known: list[Any] = []  # numbers of living objects are unique
        for tensor in inputs:
            self._name(tensor, self.calls.graph.placeholder(f"input_{len(self._known)}"))

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.running, self.writes = self.running + 1, False
        try:
            output = func(*args, **(kwargs or {}))
        finally:
            self.running -= 1
        if getattr(func, "__name__", "") in READS:
            self.refuse(func)
        self._write(func, args, kwargs or {}, output, set() if self.writes else self.calls.pure)
        return output

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``function(*args, **kwargs)`` as one call of the list. Its output is a tensor or a tuple, and contiguous."""
        self.seams += 1
        try:
            with torch._C.DisableTorchFunction():
                output = _in_line(function(*args, **kwargs))
        finally:
            self.seams -= 1
        self._write(function, args, kwargs, output, self.calls.seams)
        return output

    def refuse(self, func: Any, why: str = "reads numbers of tensors, by") -> None:
        name = resolve_name(func) or getattr(func, "__name__", str(func))
        self.refused = self.refused or f"its forward {why} {name}"

    def finished(self, output: torch.Tensor) -> tuple[Callable[..., torch.Tensor], list[Any]]:
        """The list as a function of the inputs and the constants, which returns ``output``; and the constants."""
        graph, constants = self.calls.graph, self.calls.constants
        graph.output(self._nodes[id(output)])
        tidy(self.calls)
        code = graph.python_code("self")
        names = dict(code.globals)
        exec(code.src, names)
        return partial(names["forward"], None), [constants[node] for node in graph.nodes if node in constants]

    def _name(self, value: Any, node: fx.Node) -> fx.Node:
        self._nodes[id(value)] = node
        self.calls.outputs[node] = value
        self._known.append(value)
        return node

    def _write(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        output: Any,
        kind: set[fx.Node],
    ) -> None:
        """Write a call down, into the calls of its ``kind``."""
        several = isinstance(output, (tuple, list)) and any(isinstance(one, torch.Tensor) for one in output)
        changes = output is None and any(isinstance(one, torch.Tensor) for one in args)  # an assignment to a part
        if not (isinstance(output, torch.Tensor) or several or changes):
            return  # sizes and properties, the same for all inputs of a shape
        given = self._argument(list(args)), {name: self._argument(value) for name, value in kwargs.items()}
        node = self.calls.graph.call_function(_named(function), tuple(given[0]), given[1])
        kind.add(node)
        if not several:
            self._output(output, node, kind)
            return
        self.calls.outputs[node] = output
        for index, one in enumerate(output):
            if isinstance(one, torch.Tensor):
                part = self.calls.graph.call_function(operator.getitem, (node, index))
                kind.add(part)
                self._output(one, part, kind)

    def _output(self, output: Any, node: fx.Node, kind: set[fx.Node]) -> None:
        if kind is self.calls.seams:  # what follows relies on the strides of this run
            node = self.calls.graph.call_function(torch.Tensor.contiguous, (node,))
            kind.add(node)
        self._name(output, node)

    def _argument(self, value: Any) -> Any:
        if type(value) in (list, tuple, torch.Size):
            found = [self._argument(one) for one in value]
            return found if isinstance(value, list) else tuple(found)
        if isinstance(value, slice):
            return slice(*(self._argument(one) for one in (value.start, value.stop, value.step)))
        if id(value) in self._nodes:
            return self._nodes[id(value)]
        if isinstance(value, LITERALS) or value is Ellipsis:
            return value
        if isinstance(value, Mapping) and any(isinstance(one, torch.Tensor) for one in value.values()):
            self.refused = self.refused or "its forward hands on tensors in a dictionary"
        return self._name(value, self.calls.constant(value))


def _in_line(output: Any) -> Any:
    """The output of a seam, with contiguous tensors."""
    if isinstance(output, tuple):
        return tuple(map(_in_line, output))
    return output.contiguous() if isinstance(output, torch.Tensor) else output


def _named(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, behind another one if generated code would not find it by name.

    Getters of properties have no name. ``Tensor.__pow__`` has that of the method which it wraps, in torch 2.13.
    """
    is_of_tensors = getattr(function, "__module__", None) == "torch._tensor"
    is_misnamed = is_of_tensors and getattr(torch.Tensor, function.__name__, None) is not function
    return (lambda *args: function(*args)) if is_misnamed or isinstance(function, MethodWrapperType) else function


class _Checked(TorchDispatchMode):
    """Refuses a recording with operations that give numbers to Python or have sizes that depend on numbers. It also
    refuses one with operations that belong to no function of torch: the list has functions only."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        recorder = self._recorder
        if not recorder.seams and not recorder.running:
            recorder.refuse(func, "computes past the functions of torch, by")
        elif not recorder.seams and _depends_on_numbers(func, args):
            recorder.refuse(func)
        recorder.writes = recorder.writes or _writes(func)
        return func(*args, **(kwargs or {}))


def _depends_on_numbers(func: Any, args: tuple[Any, ...]) -> bool:
    """True for an operation whose output Python reads, or whose sizes depend on numbers."""
    if func.overloadpacket is torch.ops.aten.index:  # its sizes do only where a mask chooses
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return not {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}.isdisjoint(func.tags)


def _writes(func: Any) -> bool:
    """True for an operation that changes memory, or the state of a generator of random numbers."""
    return bool(func._schema.is_mutable) or torch.Tag.nondeterministic_seeded in func.tags


class Recordings:
    """The recordings of one model, by the shapes of the inputs; the least recently used go first.

    ``recorder`` writes the forward that runs, if it is the second of its shapes. ``use`` is that of the last forward.
    """

    def __init__(self, on_failure: Callable[[str], object]) -> None:
        """``on_failure`` gets the reason of each shape that is refused a list, once."""
        self.use: Use = "none"
        self.recorder: Recorder | None = None
        self._on_failure = on_failure
        self._seen: set[Hashable] = set()
        self._refused: set[Hashable] = set()
        self._lists: OrderedDict[Hashable, tuple[Callable[..., torch.Tensor], list[Any]]] = OrderedDict()

    def run(self, forward: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        """Output of ``forward(**arguments)`` with its ``logits``.

        The second of each shape is recorded: while requests come and go, most shapes occur once.
        """
        tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
        shapes = ((name, value.shape, value.stride(), value.dtype) for name, value in tensors.items())
        key = (*shapes, *((name, value) for name, value in arguments.items() if name not in tensors))
        if key in self._lists:
            self.use = "list"
            self._lists.move_to_end(key)
            function, constants = self._lists[key]
            return Logits(function(*tensors.values(), *constants))
        if key in self._seen and key not in self._refused:
            return self._record(key, forward, arguments, tuple(tensors.values()))
        self.use = "failed" if key in self._refused else "none"
        self._seen.add(key)
        return forward(**arguments)

    def _record(
        self,
        key: Hashable,
        forward: Callable[..., Any],
        arguments: Mapping[str, Any],
        inputs: tuple[torch.Tensor, ...],
    ) -> Any:
        self.use, self.recorder = "failed", Recorder(inputs)
        recorder = self.recorder
        try:
            with recorder, _Checked(recorder):
                output = forward(**arguments)
        finally:
            self.recorder = None
        try:
            if recorder.refused is None:
                self._lists[key] = recorder.finished(output.logits)
        except Exception as error:  # the forward itself has not failed
            recorder.refused = f"its list cannot be made: {type(error).__name__}: {error}"
        if recorder.refused is not None:
            self._refused.add(key)
            self._on_failure(recorder.refused)
            return output
        self.use = "recorded"
        if len(self._lists) > MOST:
            self._lists.popitem(last=False)
        return output
