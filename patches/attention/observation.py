"""An observer sees the inputs of every attention in a forward, and changes none of them.

``patches.Patched.observing`` binds an observer to a thread and a ``with`` block, so that forwards of other requests,
before or after, stay unseen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from patches.attention.layer import Layer
from patches.encoding.recipe import ResolvedRecipe


class Observed(NamedTuple):
    """One segment in one layer, as ``patches.attention.fused.attend`` gets it.

    ``query`` [rows, heads, q, head_dim] has the positions q_start, q_start + 1, ...; ``key`` [rows, kv_heads, k,
    head_dim] ends at the last of them. A gap follows the first ``num_sinks`` keys, unless that is 0.
    """

    query: torch.Tensor
    key: torch.Tensor
    resolved: ResolvedRecipe
    layer: Layer
    q_start: int
    num_sinks: int


Observer = Callable[[Observed], None]
