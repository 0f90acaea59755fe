"""The kernel compiles for GPUs that are not there: Triton's interpreter takes code that its compiler refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.patches.offline import compiled

pytest.importorskip("triton", reason="Triton is installed only where CUDA is")

PLAIN, DECODING, EVERYTHING = 256, 512, 4096
"""Most bytes per thread, measured with Triton 3.6 and 3.9. Few steps need every part of the kernel at once."""

SHARED = {80: 166_912, 90: 232_448}
"""Bytes of shared memory that a block may have, by compute capability."""

DECODES, REGISTERS = (128, True, "plain"), 96
"""Most code that decodes, and its registers per thread. Five programs then fit on a multiprocessor of an H200."""


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "dtype"), [(80, "bf16"), (90, "bf16"), (90, "fp32")])
def test_every_variant_compiles_without_many_spills(capability: int, dtype: str, tmp_path: Path) -> None:
    variants = compiled("tests.patches.attention.paged.offline", capability, dtype, tmp_path)
    assert len(variants) == 23
    for variant in variants:
        if variant["head_dim"] > 256:
            assert variant["shared_bytes"] <= SHARED[capability], variant
        everything = DECODING if variant["split"] else EVERYTHING
        most = everything if variant["code"] == "everything" else PLAIN
        assert variant["local_bytes"] <= most, variant
        if (capability, dtype) == (90, "bf16") and (variant["head_dim"], variant["split"], variant["code"]) == DECODES:
            assert variant["registers"] <= REGISTERS, variant


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_far_positions_keep_their_angles_when_products_and_sums_are_fused(capability: int, tmp_path: Path) -> None:
    """A fused difference of turns added their rounding once more: 0.006 at position 131,072."""
    for found in compiled("tests.patches.attention.paged.angles", capability, "bf16", tmp_path):
        assert found["error"] < 1e-6, found
