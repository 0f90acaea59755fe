"""Compiles the kernel for a GPU that need not be there, as a program: ``TRITON_INTERPRET`` has to be unset at import.

Prints a line of JSON for each variant of the attention. It has registers and bytes of local memory (spills) per thread,
and bytes of shared memory per block.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from patches.attention.paged.rows import Variant
from patches.attention.paged.tables import power_of_two
from patches.attention.paged.triton import kernel
from patches.attention.paged.triton.codes import Launch
from patches.attention.paged.triton.launch import blocks_for, variant_constants

STATES, FLOATS = ("Q", "K", "V", "OUT"), ("PART", "FACTOR", "SINKS", "MAPS", "PAIRS", "FREQUENCIES", "BIASES")
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


Code = Literal["plain", "turned", "linear", "everything"]
"""Code that turns nothing, queries only, has a linear bias, or everything with a bias of any form and sinks."""
CODES: tuple[tuple[bool, Code], ...] = (
    *((False, "plain"), (False, "linear"), (False, "everything")),
    *((True, "plain"), (True, "turned"), (True, "linear"), (True, "everything")),
)
WIDEST: tuple[tuple[bool, Code], ...] = ((False, "plain"), (False, "everything"))
"""The most of shared memory."""
VARIANTS = {
    "plain": Variant.PLAIN,
    "turned": Variant.TURNED | Variant.KEYS,
    "linear": Variant.BIASED | Variant.LINEAR,
    "everything": ~Variant.PLAIN & ~Variant.LINEAR,
}
CPU = torch.device("cpu")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def constants(*, split: bool, code: Code, head_dim: int, pairs: int, dtype: str) -> dict[str, Any]:
    """Those of a model with 32 heads over 8 key heads."""
    blocks, everything = blocks_for(DTYPES[dtype], head_dim, CPU), code == "everything"
    launch = Launch(VARIANTS[code], turns_keys=everything, chooses=split)
    return {
        "NUM_PAIRS": pairs,
        "WIDTH": power_of_two(pairs),
        "OFFSET": 0,
        "INTERLEAVED": False,
        "HEAD_DIM": head_dim,
        "REST_WIDTH": power_of_two(head_dim - 2 * pairs),
        "VALUE_DIM": head_dim,
        "VALUE_WIDTH": power_of_two(head_dim),
        "KV_HEADS": 8,
        "GROUP": 4,
        "GROUP_WIDTH": 4,
        "MOST_BANDS": 3,
        **dict.fromkeys(("SOFTCAP", "HAS_SINKS"), everything),
        **variant_constants(blocks, launch, head_dim, split=split),
        "FAST": True,
        "UPCAST": False,
        **({} if everything else {"own_chunk": 1}),  # layers without a mask, whose 1 Triton compiles in
        "PAGE": 32,
        "BLOCK_M": 16 if split else blocks.rows,
        "PARTS": 16,
    }


def usage(function: Any, given: dict[str, Any], dtype: str, capability: int) -> dict[str, int]:
    """Registers and local memory of a thread, for states of ``dtype`` on a GPU of a compute capability such as 90."""
    chosen = {name: value for name, value in given.items() if name in function.arg_names}
    kinds, attributes = {}, {}
    for index, name in enumerate(function.arg_names):
        if name in chosen:
            kinds[name] = "constexpr"
        elif name in STATES:
            kinds[name] = f"*{dtype}"
        elif name == "softcap":
            kinds[name] = "fp32"
        elif name.isupper():
            kinds[name] = "*fp32" if name.startswith(FLOATS) or name == "DISTANCES" else "*i32"
        else:
            kinds[name] = "i32"
        if (name.isupper() and name not in chosen) or name.startswith(("q_", "k_", "v_", "out_", "own_high")):
            attributes[(index,)] = [["tt.divisibility", 16]]
    constexprs = {(function.arg_names.index(name),): value for name, value in chosen.items()}
    source = ASTSource(fn=function, signature=kinds, constexprs=constexprs, attrs=attributes)
    options = {name: given[name] for name in ("num_warps", "num_stages", "maxnreg") if given[name] is not None}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        shown = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", shown)
    assert found is not None, shown
    local_bytes = max(int(found[2]), int(found[3]))
    return {"registers": int(found[1]), "local_bytes": local_bytes, "shared_bytes": compiled.metadata.shared}


def main(capability: int, dtype: str) -> None:
    for head_dim in (64, 128, 256, 512):
        for split, code in CODES if head_dim <= 256 else WIDEST:
            pairs = head_dim // 4 if code == "everything" else head_dim // 2
            given = constants(split=split, code=code, head_dim=head_dim, pairs=pairs, dtype=dtype)
            taken = usage(kernel.attention, given, dtype, capability)
            print(json.dumps({"head_dim": head_dim, "split": split, "code": code} | taken), flush=True)
    given = constants(split=True, code="everything", head_dim=128, pairs=64, dtype=dtype)
    usage(kernel.merge, given, dtype, capability)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
