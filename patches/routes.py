"""One encoding for each route through the attention, for checks of all routes."""

from __future__ import annotations

from typing import Any

from patches.encoding.geometry import RopeGeometry
from patches.encoding.method import Method
from patches.parsing import parse
from patches.resolution import resolve

ROUTES: dict[str, list[dict[str, Any]]] = {
    "plain": [{"method": "yarn", "factor": 2.0}],
    "bands": [{"method": "self_extend", "group_size": 2, "neighbor_window": 4}],
    "first keys": [{"method": "streaming", "sink_tokens": 2, "window": 4}],
    "chunks": [{"method": "dual_chunk", "chunk_size": 8, "local_window": 2}],
    "bias": [{"method": "kerple_log"}],
    "added positions": [
        {"method": "learned_interpolation", "factor": 2.0},
        {"method": "sinusoidal_interpolation", "factor": 2.0},
    ],
    "relative": [{"method": "shaw"}, {"method": "transformer_xl"}],
}
"""Route -> encodings that take it, within some twenty tokens; a model resolves one of them or none."""


def one_per_route(geometry: RopeGeometry, length: int) -> list[Method]:
    """The model's own encoding, and one for each route that it can take with ``length`` reserved tokens."""
    found = [parse({"method": "default"})]
    for candidates in ROUTES.values():
        method = next((m for m in map(parse, candidates) if _resolves(m, geometry, length)), None)
        if method is not None:
            found.append(method)
    return found


def _resolves(method: Method, geometry: RopeGeometry, length: int) -> bool:
    try:
        resolve(method, geometry, length)
    except ValueError:
        return False
    return True
