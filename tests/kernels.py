"""The device of tests that run Triton kernels."""

from __future__ import annotations

import os

import pytest
import torch


def device_of_kernels() -> torch.device:
    """The card, or the CPU under Triton's interpreter. Elsewhere, the module that asks is skipped."""
    pytest.importorskip("triton", reason="Triton is installed only where CUDA is")
    if torch.cuda.is_available():
        return torch.device("cuda")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("no CUDA device; TRITON_INTERPRET=1 runs the kernel on the CPU", allow_module_level=True)
    return torch.device("cpu")
