"""The fused kernels compile for GPUs that are not there, and round between products and sums."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is installed only where CUDA is")

ROOT = Path(__file__).resolve().parents[4]


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "dtype"), [(80, "bf16"), (90, "bf16"), (90, "fp16"), (90, "fp32")])
def test_every_variant_compiles(capability: int, dtype: str, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-m", "tests.patches.model.fusion.offline", str(capability), dtype],
        cwd=ROOT,
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    variants = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(variants) == 28
    assert [variant for variant in variants if variant["spills"] or variant["fuses"]] == []
