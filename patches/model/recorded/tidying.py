"""Fewer calls in a recorded list, to the same bits.

In a step of a few tokens, a call of torch takes as long as its mathematics. Half of a model's calls only look at memory
in another shape, and several layers multiply the same input.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from patches.model.recorded.calls import Calls
from patches.model.recorded.cheaper import make_cheaper, repeat_in_place


def tidy(calls: Calls) -> None:
    """Leave out calls without effect and repeated ones, make one view of several, and one product of several."""
    _leave_out_calls_that_return_their_input(calls)
    _make_views_at_once(calls)
    if _writes_nothing(calls):  # what is written between two calls may be an argument of both
        make_cheaper(calls)
        _compute_once(calls)
        _multiply_at_once(calls)
        repeat_in_place(calls)
    _leave_out_unused_calls(calls)


def _leave_out_calls_that_return_their_input(calls: Calls) -> None:
    for node in calls.graph.nodes:
        source = node.args[0] if node.args else None
        if node in calls.pure and isinstance(source, fx.Node) and calls.outputs[node] is calls.outputs[source]:
            node.replace_all_uses_with(source)


def _make_views_at_once(calls: Calls) -> None:
    """A view of views is one of the tensor that has the memory. A view of a constant is a constant."""
    roots: dict[fx.Node, fx.Node] = {}
    known: dict[tuple[Any, ...], fx.Node] = {}
    for node in list(calls.graph.nodes):
        if not _is_view(calls, node):
            continue
        view, source = calls.outputs[node], node.all_input_nodes[0]
        root = roots[node] = roots.get(source, source)
        key = root, view.shape, view.stride(), view.storage_offset(), view.dtype
        if key not in known:
            with calls.graph.inserting_before(node):
                if root in calls.constants:
                    known[key] = calls.constant(view)
                elif view.dtype == calls.outputs[root].dtype:
                    geometry = tuple(view.shape), view.stride()
                    if _has_its_memory_alone(calls, root):
                        known[key] = calls.call(torch.as_strided, (root, *geometry, view.storage_offset()), view)
                    elif root in calls.seams and view.storage_offset() == calls.outputs[root].storage_offset():
                        known[key] = calls.call(torch.as_strided, (root, *geometry), view)  # from its first number on
        if key in known:
            roots[known[key]] = root
            node.replace_all_uses_with(known[key])


def _is_view(calls: Calls, node: fx.Node) -> bool:
    """True for a call that only looks at the memory of its first argument."""
    output = calls.outputs.get(node)
    if node not in calls.pure or node.all_input_nodes != list(node.args[:1]) or not isinstance(output, torch.Tensor):
        return False
    source = calls.outputs[node.all_input_nodes[0]]
    return isinstance(source, torch.Tensor) and 0 != _memory(output) == _memory(source)


def _has_its_memory_alone(calls: Calls, node: fx.Node) -> bool:
    """True for the output of a call of torch that begins its memory and has no gaps, in each run."""
    tensor = calls.outputs[node]
    is_whole = (
        tensor.layout == torch.strided and tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()
    )
    return (
        is_whole and node in calls.pure and not any(_is_same_memory(calls, each, node) for each in node.all_input_nodes)
    )


def _is_same_memory(calls: Calls, one: fx.Node, other: fx.Node) -> bool:
    tensor = calls.outputs[one]
    return isinstance(tensor, torch.Tensor) and _memory(tensor) == _memory(calls.outputs[other])


def _memory(tensor: torch.Tensor) -> int:
    """Address of a tensor's memory. 0 for packed, sparse and quantized weights; the last wrap other tensors."""
    has_one = tensor.layout == torch.strided and not is_traceable_wrapper_subclass(tensor)
    return tensor.untyped_storage().data_ptr() if has_one else 0


def _functions(calls: Calls) -> list[fx.Node]:
    return [node for node in calls.graph.nodes if node.op == "call_function"]


def _writes_nothing(calls: Calls) -> bool:
    return all(node in calls.pure or node in calls.seams for node in _functions(calls))


def _compute_once(calls: Calls) -> None:
    """A pure call with the arguments of an earlier one has its output, such as that of several layers' input."""
    known: dict[Any, fx.Node] = {}
    for node in filter(calls.pure.__contains__, _functions(calls)):
        key = node.target, repr(node.args), repr(node.kwargs)  # equal numbers of two types differ
        first = known.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)


def _multiply_at_once(calls: Calls) -> None:
    """Batches of products with one right factor become one batch, where their matrices follow one another in memory."""
    nodes = _functions(calls)
    alike: dict[Any, list[fx.Node]] = defaultdict(list)
    for node in nodes:
        right = _broadcast_factor(calls, node)
        if right is not None:
            alike[right].append(node)
    for right, products in alike.items():
        for run in _runs(calls, products):
            _join(calls, right, sorted(run, key=nodes.index))


def _broadcast_factor(calls: Calls, node: fx.Node) -> Any:
    """The key of a right factor that a batch of products of a constant has in common. None for other calls."""
    if node.target is not torch.bmm or len(node.args) != 2 or node.kwargs or node.args[0] not in calls.constants:
        return None
    left: Any = node.args[0]
    right: Any = node.args[1]
    if (
        not isinstance(right, fx.Node)
        or right.target is not torch.as_strided
        or len(right.args) != 4
        or not calls.outputs[left].is_contiguous()
    ):
        return None
    geometry: Any = right.args
    root, size, stride, offset = geometry
    if stride[0] != 0:
        return None
    return root, size[1:], stride, offset, calls.outputs[left].shape[1:]


def _runs(calls: Calls, products: list[fx.Node]) -> Iterator[list[fx.Node]]:
    """Products whose matrices follow one another in memory, two at least, by address."""
    run: list[fx.Node] = []
    stop = (0, 0)
    for product in sorted(products, key=lambda product: calls.outputs[product.all_input_nodes[0]].data_ptr()):
        left = calls.outputs[product.all_input_nodes[0]]
        if stop != (_memory(left), left.data_ptr()):
            if len(run) > 1:
                yield run
            run = []
        run.append(product)
        stop = _memory(left), left.data_ptr() + left.nbytes
    if len(run) > 1:
        yield run


def _join(calls: Calls, right: Any, products: list[fx.Node]) -> None:
    """One batch before the first of ``products``, whose outputs become views of its output."""
    lefts = {product: calls.outputs[product.all_input_nodes[0]] for product in products}
    by_address = sorted(products, key=lambda product: lefts[product].data_ptr())
    first, number = lefts[by_address[0]], sum(len(left) for left in lefts.values())
    root, matrix, stride, offset, _ = right
    with calls.graph.inserting_before(products[0]):
        left = calls.constant(first.as_strided((number, *first.shape[1:]), first.stride(), first.storage_offset()))
        shared = calls.call(torch.as_strided, (root, (number, *matrix), stride, offset), None)
        joined = calls.call(torch.bmm, (left, shared), None)
    start = 0
    for product in by_address:
        output = calls.outputs[product]
        for user in list(product.users):
            if user.target is torch.as_strided:
                _, size, stride, offset = user.args
                user.args = (joined, size, stride, int(offset) + start)  # type: ignore[arg-type]
        with calls.graph.inserting_before(product):
            part = calls.call(torch.as_strided, (joined, tuple(output.shape), output.stride(), start), output)
        product.replace_all_uses_with(part)
        start += output.numel()


def _leave_out_unused_calls(calls: Calls) -> None:
    for node in reversed(calls.graph.nodes):
        if not node.users and (node in calls.pure or node in calls.constants):
            calls.graph.erase_node(node)
            calls.constants.pop(node, None)
