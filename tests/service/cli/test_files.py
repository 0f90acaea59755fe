"""Files of the shell as documents."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from service.cli.files import documents


def test_a_byte_order_mark_is_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("ropes", encoding="utf-8-sig")
    assert documents([str(tmp_path / "a.txt")]) == (["a.txt"], "ropes")
    monkeypatch.setattr("sys.stdin", io.StringIO("\ufeffropes"))
    assert documents(["-"]) == (["stdin"], "ropes")
