"""A picture: one Plotly figure, its name and title, and its numbers."""

from __future__ import annotations

import html
from dataclasses import dataclass, field
from typing import Any

import plotly.graph_objects as go

from service.evaluation.results import Row
from service.evaluation.tables import csv_text
from service.figures.drawing.raster import pdf, png, svg

CONFIG = {"responsive": True, "displaylogo": False, "showSendToCloud": False}
"""Plotly's own bar would offer to upload the figure to its maker."""


@dataclass(frozen=True)
class Picture:
    """One figure as a page, as PNG, SVG and PDF, and as the table behind it; notebooks display it.

    ``name`` is a word for files and addresses, ``caption`` a sentence on how to read the figure.
    """

    name: str
    title: str
    figure: go.Figure = field(repr=False)
    rows: list[Row] = field(repr=False)
    caption: str = ""

    def png(self) -> bytes:
        """The picture as PNG, without a browser; not thread-safe."""
        return png(self.figure)

    def svg(self) -> str:
        """The picture as SVG; not thread-safe."""
        return svg(self.figure)

    def pdf(self) -> bytes:
        """The picture as PDF; not thread-safe."""
        return pdf(self.figure)

    @property
    def subtitle(self) -> str:
        """Measurement, documents and notes on the drawing, as plain text."""
        return html.unescape(self.figure.layout.title.subtitle.text or "")

    def csv(self) -> str:
        """The numbers behind the picture, full precision, comma-separated with a header (RFC 4180)."""
        return csv_text(self.rows)

    def _repr_html_(self) -> str:
        page = self.figure.to_html(include_plotlyjs=True, full_html=False, config=CONFIG)
        return str(page)

    def _repr_png_(self) -> bytes:
        return self.png()


def rows_of(**columns: Any) -> list[Row]:
    """Rows from columns of one length."""
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
