"""The one adapter around transformers' continuous batching. Every reach into its insides is in this folder.

Written against transformers 5.23. It adds to the manager: slots in ``position_ids``, a prefix cache that never
crosses encodings or tenants, pages given back once no later query reaches them, sampling from each request's own
noise, long work interleaved between steps, a heartbeat, and steps in which running out of memory costs one request.
"""

from __future__ import annotations

from service.engine.adapter.manager import EncodingManager

__all__ = ["EncodingManager"]
