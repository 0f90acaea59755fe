"""Answers with figures for a page to draw."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from service.evaluation.results import Partial


class FigureInfo(BaseModel):
    """A Plotly figure: its traces, and its layouts for wide and narrow pages. The titles are plain text."""

    name: str
    title: str
    subtitle: str
    caption: str
    data: list[dict[str, Any]]
    wide: dict[str, Any]
    narrow: dict[str, Any]


class Figures(BaseModel):
    """Figures to draw with Plotly, whose script is at the path ``script``.

    ``dark`` maps colours of light pages to those of dark ones.
    """

    figures: list[FigureInfo]
    dark: dict[str, str]
    script: str


class ResultFigures(Figures):
    """Figures of a result, and its answer in sentences; ``partial`` is that of a result without all methods."""

    evaluation: str
    words: list[str]
    partial: Partial | None
