"""The multiplier of a query's scores."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any


def log_n(m: int, l0: int) -> float:
    """Su's log-n scaling of the query at position m."""
    return max(1.0, math.log(m + 1) / math.log(l0))


def temperature(asked: Any, l0: int, length: int) -> Callable[[int], float]:
    """The multiplier of a query at position m, for a request's ``attention_temperature``."""
    if isinstance(asked, int | float):
        return lambda m: float(asked)
    p: dict[str, Any] = {"kind": asked} if isinstance(asked, str) else dict(asked)
    l0, s, n = p.get("length") or l0, p.get("factor", 1.0), length
    return {
        "constant": lambda m: float(p["multiplier"]),
        "yarn": lambda m: (0.1 * math.log(s) + 1) ** 2,
        "chunk_llama": lambda m: (0.05 * math.log(s) + 1) ** 2,
        "longrope": lambda m: 1 + math.log(s) / math.log(l0),
        "log_n": lambda m: log_n(m, l0),
        "floor_log": lambda m: 1 + p.get("beta", 0.1) * math.log(1 + math.floor((m + p.get("offset", 0)) / l0)),
        "reserved_length": lambda m: max(1.0, 0.1 * math.log(n / l0) + 1) ** 2,
    }[p["kind"]]
