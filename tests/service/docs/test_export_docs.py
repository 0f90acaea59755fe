"""docs/export.md is what the targets say."""

from __future__ import annotations

from service.docs.export import PAGE, export_page
from tests.conftest import ROOT


def test_the_page_is_the_targets() -> None:
    """Regenerate with: ropeway methods --docs docs"""
    assert (ROOT / "docs" / PAGE).read_text(encoding="utf-8") == export_page()
