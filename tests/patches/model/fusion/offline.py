"""Compiles the fused kernels for a GPU that need not be there, as a program: ``TRITON_INTERPRET`` has to be unset.

Prints a line of JSON for each: whether threads spill to local memory, and whether products and sums became one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import product
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from patches.attention.paged.tables import power_of_two
from patches.model.fusion import kernels


def variants() -> Iterator[tuple[Any, dict[str, Any]]]:
    """(kernel, its constants)."""
    for width, first, more, adds in product((128, 96, 4096), (False, True), (False, True), (False, True)):
        chosen = {"WIDTH": width, "BLOCK": power_of_two(width), "ROUNDED_FIRST": first, "ONE_MORE": more, "ADDS": adds}
        yield kernels.rms_norm, chosen
    for pairs, by_pair, products in product((32, 40, 64), (False, True), (False, True)):
        heads = {"Q_HEADS": 32, "K_HEADS": 8, "PAIRS": pairs, "BLOCK": power_of_two(pairs)}
        yield kernels.rotate, {**heads, "BY_PAIR": by_pair, "ROUNDED_PRODUCTS": products}
    for width, gelu in product((14336, 100), (False, True)):
        yield kernels.gated, {"WIDTH": width, "BLOCK": 1024, "GELU": gelu}


def ptx(function: Any, chosen: dict[str, Any], dtype: str, capability: int) -> str:
    """The code of ``function`` for states of ``dtype`` on a GPU of a compute capability such as 90."""
    names = function.arg_names
    kinds = {name: f"*{dtype}" if name.isupper() else "i32" for name in names}
    kinds |= {"eps": "fp32"} if "eps" in names else {}
    kinds |= dict.fromkeys(chosen, "constexpr")
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in kinds if kinds[name][0] in "*i"}
    constexprs = {(names.index(name),): value for name, value in chosen.items()}
    source = ASTSource(fn=function, signature=kinds, constexprs=constexprs, attrs=aligned)
    options = {"enable_fp_fusion": False, "num_warps": 1 if function is kernels.rotate else 4}
    code: str = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["ptx"]
    return code


def main(capability: int, dtype: str) -> None:
    for function, chosen in variants():
        code = ptx(function, {**chosen, "IN_BITS": False}, dtype, capability)
        found = {"spills": ".local" in code, "fuses": "fma.rn.f32" in code}
        print(json.dumps({"kernel": function.__name__, **chosen, **found}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
