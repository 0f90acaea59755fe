"""Tensor parallelism: one model computed by a group of processes, of which the first serves and leads."""

from __future__ import annotations

import threading

LOST = threading.Event()
"""Set when the group of this process has lost a rank. It never recovers: the process ends."""


class RankLost(RuntimeError):
    """Another rank ended, or did not take part in time."""
