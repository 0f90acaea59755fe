"""The one adapter around transformers' continuous batching. All uses of its private parts are in this folder.

``compatibility`` checks that these parts are those of transformers 5.24. The adapter adds slots in ``position_ids`` and
a prefix cache that never crosses encodings or tenants. It evicts pages out of reach, replays decode steps from CUDA
graphs, and samples each request from its own noise. It interleaves long work between steps, and has a heartbeat. Out of
memory costs one request.
"""

from __future__ import annotations

from service.engine.adapter.manager import EncodingManager
from service.engine.adapter.runner import OnStep

__all__ = ["EncodingManager", "OnStep"]
