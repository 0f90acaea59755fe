"""Reports without the cost of their pictures."""

from __future__ import annotations

import pytest

from service.figures.picture import Picture


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports have empty PNGs: a test of their words or numbers does not look at them."""
    monkeypatch.setattr(Picture, "png", lambda _: b"")
