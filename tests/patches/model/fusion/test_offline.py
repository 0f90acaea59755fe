"""The fused kernels compile for GPUs that are not there, and round between products and sums."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.patches.offline import compiled

pytest.importorskip("triton", reason="Triton is installed only where CUDA is")


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "dtype"), [(80, "bf16"), (90, "bf16"), (90, "fp16"), (90, "fp32")])
def test_every_variant_compiles(capability: int, dtype: str, tmp_path: Path) -> None:
    variants = compiled("tests.patches.model.fusion.offline", capability, dtype, tmp_path)
    assert len(variants) == 40
    assert [variant for variant in variants if variant["spills"] or variant["fuses"]] == []
