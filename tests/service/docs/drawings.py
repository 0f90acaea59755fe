"""Comparison of generated pictures with those in the repository."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import plotly.graph_objects as go
import pytest

from service.docs.pages import IMAGE, rounded
from service.figures.drawing.raster import svg


def drawing(text: str) -> str:
    """A picture without what another processor may round, or another zlib pack, differently."""
    return rounded(IMAGE.sub("", text))


def assert_current(path: Path, figure: go.Figure) -> None:
    """Fail if the picture at ``path`` is not ``figure``; skip if another version of matplotlib drew it."""
    kept = path.read_text(encoding="utf-8")
    assert ElementTree.fromstring(kept).tag.endswith("svg")
    if f"Matplotlib v{matplotlib.__version__}" not in kept:
        pytest.skip("drawn with another version of matplotlib")
    assert drawing(svg(figure)) == drawing(kept)
