"""Tensors of the host for a device that may be busy."""

from __future__ import annotations

import torch


def uploaded(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``tensor`` of the host on ``device``. A card copies it by itself, and the host does not wait."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
