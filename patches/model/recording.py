"""Forwards as lists of their calls of torch, which run again without the Python of the model's modules.

For a few tokens, that Python takes as long as the mathematics of a small model. A recording serves forwards of the same
shape: it calls the same functions in the same order, so it computes the same bits. Calls of a seam are parts of the
list and run as Python, since they depend on the batch. A model is not recorded if its Python reads numbers of tensors.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MethodWrapperType
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

MOST = 64
"""Recordings that are kept, one for each number of rows."""

LITERALS = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
"""Arguments that are written into the list. All others become its constants."""

READS = {"tolist", "numpy", "__array__", "__dlpack__"}
"""Methods by which Python reads a tensor past torch's dispatcher."""


@dataclass(frozen=True)
class Logits:
    """The output of a recorded forward: ``logits`` [rows, tokens, vocabulary]."""

    logits: torch.Tensor


class Recorder(TorchFunctionMode):
    """Within it, calls of torch functions are written down, from tensors ``inputs`` on.

    ``refused`` is the reason why the list does not serve other inputs, if there is one.
    """

    def __init__(self, inputs: tuple[torch.Tensor, ...]) -> None:
        super().__init__()
        self.refused: str | None = None
        self.constants: list[Any] = []
        self.is_inside_seam = False
        self._graph = fx.Graph()
        self._nodes: dict[int, fx.Node] = {}
        self._made: set[int] = set()
        self._known: list[Any] = []  # numbers of living objects are unique
        for tensor in inputs:
            self._name(tensor, self._graph.placeholder(f"input_{len(self._known)}"))

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") in READS:
            self.refuse(func)
        self._write(func, args, kwargs or {}, output)
        return output

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``function(*args, **kwargs)`` as one call of the list. Its output is a tensor or a tuple."""
        self.is_inside_seam = True
        try:
            with torch._C.DisableTorchFunction():
                output = function(*args, **kwargs)
        finally:
            self.is_inside_seam = False
        self._write(function, args, kwargs, output)
        return output

    def made(self, output: Any) -> None:
        """An operation has returned ``output``. The list has it only if a torch function returns it too."""
        if isinstance(output, torch.Tensor):
            self._known.append(output)
            self._made.add(id(output))

    def refuse(self, func: Any) -> None:
        name = resolve_name(func) or getattr(func, "__name__", str(func))
        self.refused = self.refused or f"its forward reads numbers of tensors, by {name}"

    def finished(self, output: torch.Tensor) -> Callable[..., torch.Tensor]:
        """The list as a function of the inputs and the constants, which returns ``output``."""
        self._graph.output(self._nodes[id(output)])
        code = self._graph.python_code("self")
        names = dict(code.globals)
        exec(code.src, names)
        return partial(names["forward"], None)

    def _name(self, value: Any, node: fx.Node) -> fx.Node:
        self._nodes[id(value)] = node
        self._known.append(value)
        return node

    def _write(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any
    ) -> None:
        several = isinstance(output, (tuple, list)) and any(isinstance(one, torch.Tensor) for one in output)
        changes = output is None and any(isinstance(one, torch.Tensor) for one in args)  # an assignment to a part
        if not (isinstance(output, torch.Tensor) or several or changes):
            return  # sizes and properties, the same for all inputs of a shape
        given = self._argument(list(args)), {name: self._argument(value) for name, value in kwargs.items()}
        node = self._graph.call_function(_named(function), tuple(given[0]), given[1])
        if isinstance(output, torch.Tensor):
            self._name(output, node)
        elif several:
            for index, one in enumerate(output):
                if isinstance(one, torch.Tensor):
                    self._name(one, self._graph.call_function(operator.getitem, (node, index)))

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
        if id(value) in self._made:
            self.refused = self.refused or "its forward computes past the functions of torch"
        if isinstance(value, Mapping) and any(isinstance(one, torch.Tensor) for one in value.values()):
            self.refused = self.refused or "its forward hands on tensors in a dictionary"
        self.constants.append(value)
        return self._name(value, self._graph.placeholder(f"constant_{len(self.constants)}"))


def _named(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with a name, which generated code needs: getters of properties have none."""
    return (lambda *args: function(*args)) if isinstance(function, MethodWrapperType) else function


class _Checked(TorchDispatchMode):
    """Refuses a recording whose operations give numbers to Python, or sizes that depend on numbers."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self._recorder.is_inside_seam and _depends_on_numbers(func, args):
            self._recorder.refuse(func)
        output = func(*args, **(kwargs or {}))
        if not any(output is given for given in args):
            self._recorder.made(output)
        return output


def _depends_on_numbers(func: Any, args: tuple[Any, ...]) -> bool:
    """True for an operation whose output Python reads, or whose sizes depend on numbers."""
    if func.overloadpacket is torch.ops.aten.index:  # its sizes do only where a mask chooses
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return not {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}.isdisjoint(func.tags)


class Recordings:
    """The recordings of one model, by the shapes of the inputs; the least recently used go first.

    ``recorder`` writes the forward that runs, if it is the first of its shapes. ``replays`` is True if the last forward
    ran from a list.
    """

    def __init__(self, failures: list[str]) -> None:
        """``failures`` gets the reason of each forward that was not recorded."""
        self.replays, self._failures = False, failures
        self.recorder: Recorder | None = None
        self._lists: OrderedDict[Hashable, tuple[Callable[..., torch.Tensor], list[Any]] | None] = OrderedDict()

    def run(self, forward: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        """Output of ``forward(**arguments)`` with its ``logits``. The first of each shape is recorded."""
        tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
        shapes = ((name, value.shape, value.dtype) for name, value in tensors.items())
        key = (*shapes, *((name, value) for name, value in arguments.items() if name not in tensors))
        self.replays = False
        if key not in self._lists:
            return self._record(key, forward, arguments, tuple(tensors.values()))
        self._lists.move_to_end(key)
        found = self._lists[key]
        if found is None:
            return forward(**arguments)
        self.replays = True
        function, constants = found
        return Logits(function(*tensors.values(), *constants))

    def _record(
        self,
        key: Hashable,
        forward: Callable[..., Any],
        arguments: Mapping[str, Any],
        inputs: tuple[torch.Tensor, ...],
    ) -> Any:
        self.recorder = recorder = Recorder(inputs)
        try:
            with recorder, _Checked(recorder):
                output = forward(**arguments)
        finally:
            self.recorder = None
        if recorder.refused is not None:
            self._failures.append(recorder.refused)
        self._lists[key] = None if recorder.refused else (recorder.finished(output.logits), recorder.constants)
        if len(self._lists) > MOST:
            self._lists.popitem(last=False)
        return output
