"""Compiles the rotation of the kernel for a GPU that need not be there, and computes angles from the code.

Prints a line of JSON with and without fused products and sums: the largest error of an angle in radians.
``TRITON_INTERPRET`` has to be unset at import.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from patches.attention.paged.triton import kernel

LAST = 131_072
"""The farthest position."""

OPERATIONS: dict[str, Callable[..., Any]] = {
    "mov": lambda x: x,
    "neg": lambda x: -x,
    "cvt.rmi": np.floor,
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "fma": lambda x, y, z: x * y + z,
}
"""Instructions of PTX on numbers of more than twice the digits of float32, which are rounded afterwards."""


@triton.jit
def turned(states, by, high, low, pairs: tl.constexpr):
    """Turn pairs of 16 rows by a position ``by`` at a frequency of two parts."""
    pair = tl.arange(0, pairs)
    at = tl.arange(0, 16)[:, None] * 2 * pairs + pair[None, :]
    parts = tl.full([pairs], high, tl.float32), tl.full([pairs], low, tl.float32)
    first, second = tl.load(states + at), tl.load(states + pairs + at)
    first, second = kernel._turned(first, second, tl.full([16, 1], by, tl.float32), parts[0], parts[1], True)
    tl.store(states + at, first)
    tl.store(states + pairs + at, second)


def compiled(capability: int, dtype: str, *, fuses: bool) -> str:
    """The PTX of ``turned``."""
    kinds = {"states": f"*{dtype}", "by": "fp32", "high": "fp32", "low": "fp32", "pairs": "constexpr"}
    source = ASTSource(fn=turned, signature=kinds, constexprs={(4,): 16})
    options = {"enable_fp_fusion": fuses}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return str(made.asm["ptx"])


def angles(ptx: str, given: Mapping[str, np.ndarray]) -> np.ndarray:
    """The float32 whose cosine the code takes first. ``given`` are the parameters by their place."""
    known: dict[str, Any] = {}
    for line in ptx.splitlines():
        found = re.fullmatch(r"\s*([\w.]+)\s+(%\w+), (.+);", line)
        if found is None:
            continue
        operation, made, arguments = found[1], found[2], found[3].split(", ")
        if operation.startswith("cos."):
            return np.asarray(known[arguments[0]])
        if place := re.fullmatch(r"\[\w+_param_(\d+)\]", found[3]):
            known |= {made: given[place[1]]} if place[1] in given else {}
            continue
        known |= {name: _literal(name) for name in arguments if name.startswith("0f")}
        name = "cvt.rmi" if operation.startswith("cvt.rmi.") else operation.split(".")[0]
        if name in OPERATIONS and all(each in known for each in arguments):
            wide = [known[each].astype(np.longdouble) for each in arguments]
            known[made] = OPERATIONS[name](*wide).astype(np.float32)
    raise AssertionError("the code takes no cosine")


def _literal(name: str) -> np.ndarray:
    """A number such as ``0f3F000000``."""
    return np.array(int(name[2:], 16), np.uint32).view(np.float32)


def error(ptx: str) -> float:
    """The largest one of an angle, for 4096 positions before ``LAST`` at 64 frequencies."""
    frequencies = 5e5 ** (-np.arange(64) / 64) / (2 * np.pi)
    high = frequencies.astype(np.float32)
    low = (frequencies - high).astype(np.float32)
    by = np.arange(LAST - 4096, LAST, dtype=np.float32)[:, None]
    turns = angles(ptx, {"1": by, "2": high, "3": low}).astype(np.longdouble) / (2 * np.pi)
    turns -= by.astype(np.longdouble) * frequencies
    return float(np.abs(turns - np.rint(turns)).max() * 2 * np.pi)


if __name__ == "__main__":
    for fuses in (True, False):
        print(json.dumps({"fuses": fuses, "error": error(compiled(int(sys.argv[1]), sys.argv[2], fuses=fuses))}))
