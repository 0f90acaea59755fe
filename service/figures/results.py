"""The pictures of an evaluation's result."""

from __future__ import annotations

from collections.abc import Iterator

from service.evaluation.catalogue import EVALUATIONS
from service.evaluation.results import EvaluationResult
from service.figures.drawing.charts import note
from service.figures.picture import Picture
from service.figures.web.page import plot_page


def pictures_of(result: EvaluationResult) -> list[Picture]:
    """Every picture of a result, the main one first."""
    return list(_drawn(result))


def png_of(result: EvaluationResult) -> bytes:
    """The result's main picture as PNG."""
    return _main_picture(result).png()


def html_of(result: EvaluationResult, plotly: str | None = None) -> str:
    """The result's main picture as an interactive page.

    It loads nothing but Plotly's script from the address ``plotly`` where there is one.
    """
    return plot_page(_main_picture(result), plotly)


def _main_picture(result: EvaluationResult) -> Picture:
    """Drawn without waiting for the others, which are generated one by one."""
    return next(_drawn(result))


def _drawn(result: EvaluationResult) -> Iterator[Picture]:
    """One by one; those of a partial result name its scope."""
    for picture in EVALUATIONS[result.evaluation].pictures(result):
        if scope := result.scope():
            note(picture.figure, scope)
        yield picture
