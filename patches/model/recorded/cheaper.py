"""Calls of a recorded list in a cheaper form, to the same bits.

A form that computes is taken if it has the call's bits and strides for the numbers that were recorded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from patches.model.recorded.calls import Calls


def make_cheaper(calls: Calls) -> None:
    """Add and multiply by tensors in place of numbers, and rotate halves by one call. Nothing may write memory."""
    signed: dict[fx.Node, fx.Node] = {}
    tensors: dict[str, fx.Node] = {}
    for node in list(calls.graph.nodes):
        if node in calls.pure and len(node.args) == 2 and not node.kwargs:
            if node.target in (torch.Tensor.add, torch.Tensor.mul):
                _take_tensor(calls, node, tensors)
            if node.target is torch.Tensor.mul:
                _roll(calls, node, signed)


def _take_tensor(calls: Calls, node: fx.Node, tensors: dict[str, fx.Node]) -> None:
    """Have a number as a tensor. From a number, torch makes one in each call, and takes twice as long.

    Equal numbers are one of ``tensors``, so calls with equal arguments stay alike.
    """
    source, number = node.args
    if isinstance(source, fx.Node) and isinstance(number, float) and calls.outputs[node].dtype == torch.float32:
        tensor = torch.tensor(number, dtype=torch.float32, device="cpu")
        if _is_same(calls.outputs[node], calls.outputs[source], tensor, node.target):
            with calls.graph.inserting_before(node):
                if repr(number) not in tensors:  # that of -0.0 is another
                    tensors[repr(number)] = calls.constant(tensor)
                node.args = source, tensors[repr(number)]


def _roll(calls: Calls, node: fx.Node, signed: dict[fx.Node, fx.Node]) -> None:
    """Of a product of (-second, first) half and sines, have (second, first) half in one call.

    The first half of the sines then has the other sign, in one call for all layers.
    """
    halves, sines = node.args if _rotated(calls, node.args[0]) else reversed(node.args)
    rotated = _rotated(calls, halves)
    if rotated is None or not isinstance(halves, fx.Node) or not isinstance(sines, fx.Node):
        return
    (root, *geometry), half, number = rotated, calls.outputs[halves].shape[-1] // 2, calls.outputs[sines]
    if sines in calls.constants or number.shape[-1:] != (2 * half,):
        return
    by = _with_signs(number, half)
    whole = torch.as_strided(calls.outputs[root], *geometry)
    rolled = torch.roll(whole, half, -1)
    if not _is_same(calls.outputs[node], rolled, by, torch.mul):
        return
    if sines not in signed:
        with calls.graph.inserting_after(sines):
            signed[sines] = calls.call(_with_signs, (sines, half), by)
    with calls.graph.inserting_before(halves):
        view = calls.call(torch.as_strided, (root, *geometry), whole)
        node.args = calls.call(torch.roll, (view, half, -1), rolled), signed[sines]


def _rotated(calls: Calls, halves: Any) -> tuple[fx.Node, Any, Any, Any] | None:
    """Arguments of the view whose ``halves`` a call joins, the second one first and negated; None for other calls."""
    if not isinstance(halves, fx.Node) or halves.target is not torch.cat:
        return None
    parts: Any = halves.args[0] if halves.args else ()
    is_last = (halves.args[1:], halves.kwargs) in (((-1,), {}), ((), {"dim": -1}))
    if len(parts) != 2 or not is_last or parts[0].target is not torch.Tensor.neg:
        return None
    (second,), first = parts[0].args, parts[1]
    if any(each.target is not torch.as_strided or len(each.args) != 4 for each in (first, second)):
        return None
    root, size, stride, offset = first.args
    if second.args != (root, size, stride, offset + size[-1]) or stride[-1] != 1:
        return None
    return root, (*size[:-1], 2 * size[-1]), stride, offset


def repeat_in_place(calls: Calls) -> None:
    """Write repeated rows, the factors of sums, into memory that the list keeps. A view and new memory take longer.

    Rows of one shape take turns, unless one is still to be read.
    """
    order = {node: number for number, node in enumerate(calls.graph.nodes)}
    kept: dict[tuple[Any, ...], tuple[fx.Node, fx.Node, int]] = {}
    for node in order:
        found = _repeated_rows(calls, node)
        if found is None or not node.users or any(user.target is not torch.embedding_bag for user in node.users):
            continue  # others may hand the memory on
        root, times = found
        row = calls.outputs[root]
        kind = times, row.shape, row.dtype
        memory, flat, last = kept.get(kind, (None, None, len(order)))
        with calls.graph.inserting_before(node):
            if memory is None or flat is None or last >= order[node]:
                whole = torch.empty(times, *row.shape, dtype=row.dtype, device="cpu")
                memory, flat = calls.constant(whole), calls.constant(whole.view(-1))
            copied = calls.call(_copied, (memory, root, flat), calls.outputs[node])
        kept[kind] = memory, flat, max(order[user] for user in node.users)
        node.replace_all_uses_with(copied)


def _repeated_rows(calls: Calls, node: fx.Node) -> tuple[fx.Node, int] | None:
    """(a contiguous tensor, the times that ``node`` repeats its numbers in new memory); None for other calls."""
    view = node.args[0] if node.args else None
    if node.target is not torch.Tensor.reshape or node.args[1:] != (-1,) or not isinstance(view, fx.Node):
        return None
    if view.target is not torch.as_strided:
        return None
    root: Any = view.args[0]
    size: Any = view.args[1]
    (stride, *offset), row = view.args[2:], calls.outputs[root]
    begins = root.op == "call_function" and (not offset or offset[0] == row.storage_offset() == 0)
    is_whole = begins and row.is_contiguous() and row.device.type == "cpu"
    if not is_whole or len(size) != 2 or stride != (0, 1) or size[1] != row.numel():
        return None
    return root, size[0]


def _copied(memory: torch.Tensor, row: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    memory.copy_(row)
    return flat


def _with_signs(sines: torch.Tensor, half: int) -> torch.Tensor:
    return torch.cat((-sines[..., :half], sines[..., half:]), -1)


def _is_same(expected: torch.Tensor, one: torch.Tensor, other: torch.Tensor, compute: Any) -> bool:
    found = compute(one, other)
    return found.stride() == expected.stride() and found.dtype == expected.dtype and torch.equal(found, expected)
