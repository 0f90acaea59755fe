"""The calls of a recorded list, as they are written down."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import fx


@dataclass
class Calls:
    """Calls as nodes of a graph, with their ``outputs`` while they were recorded.

    ``constants`` are the placeholders of all tensors and objects that are the same in each run. ``pure`` are calls that
    write nothing, and ``seams`` those of a seam. Inputs, and outputs of seams, have the same strides in each run.
    """

    graph: fx.Graph = field(default_factory=fx.Graph)
    outputs: dict[fx.Node, Any] = field(default_factory=dict)
    constants: dict[fx.Node, Any] = field(default_factory=dict)
    pure: set[fx.Node] = field(default_factory=set)
    seams: set[fx.Node] = field(default_factory=set)
    _constants: int = 0

    def constant(self, value: Any) -> fx.Node:
        self._constants += 1
        node = self.graph.placeholder(f"constant_{self._constants}")
        self.constants[node] = self.outputs[node] = value
        return node

    def call(self, target: Any, args: tuple[Any, ...], output: Any) -> fx.Node:
        """A new call that writes nothing."""
        node = self.graph.call_function(target, args)
        self.outputs[node] = output
        self.pure.add(node)
        return node
