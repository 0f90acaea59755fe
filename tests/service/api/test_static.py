"""Plotly's script, for browsers that ask at once."""

from __future__ import annotations

import gzip
from concurrent.futures import ThreadPoolExecutor

import pytest

from service.api import static


def test_a_burst_packs_the_script_once(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[int] = []

    def compress(data: bytes, level: int, mtime: float) -> bytes:
        packed.append(len(data))
        return gzip.compress(data[: 1 << 16], level, mtime=mtime)

    monkeypatch.setattr(static, "gzip", type("Gzip", (), {"compress": staticmethod(compress)}))
    static._packed.cache_clear()
    try:
        with ThreadPoolExecutor(8) as pool:
            scripts = list(pool.map(lambda _: static.packed_script(), range(8)))
    finally:
        static._packed.cache_clear()
    assert len(packed) == 1
    assert len(set(scripts)) == 1
