"""The kernel compiles for GPUs that are not there: Triton's interpreter takes code that its compiler refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is installed only where CUDA is")

ROOT = Path(__file__).resolve().parents[4]


PLAIN, DECODING, EVERYTHING = 128, 512, 4096
"""Most bytes per thread, measured with Triton 3.6 and 3.9. Few steps need every part of the kernel at once."""


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "dtype"), [(80, "bf16"), (90, "bf16"), (90, "fp32")])
def test_every_variant_compiles_without_many_spills(capability: int, dtype: str, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-m", "tests.patches.attention.paged.offline", str(capability), dtype],
        cwd=ROOT,
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    variants = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(variants) == 12
    for variant in variants:
        most = EVERYTHING if variant["everything"] else PLAIN
        if variant["split"]:
            most = min(most, DECODING)
        assert variant["local_bytes"] <= most, variant
