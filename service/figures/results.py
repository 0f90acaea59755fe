"""The pictures of an evaluation's result."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from service.evaluation.catalogue import EVALUATIONS
from service.evaluation.comparison.results import ComparisonResult
from service.evaluation.comparison.within import within
from service.evaluation.results import EvaluationResult
from service.figures.drawing.charts import note
from service.figures.evaluations.comparison import change_picture, comparison_pictures
from service.figures.evaluations.parameter import parameter_pictures
from service.figures.picture import Picture
from service.figures.web.page import plot_page


def pictures_of(result: EvaluationResult) -> list[Picture]:
    """Every picture of a result, the main one first."""
    return list(_drawn(result))


class NoSuchPicture(LookupError):
    """A result has no picture of a name. ``names`` are those that it has."""

    def __init__(self, name: str, names: Sequence[str]) -> None:
        super().__init__(f"there is no picture {name!r}: the result has {', '.join(names)}")
        self.names = names


def picture_of(result: EvaluationResult, name: str | None = None) -> Picture:
    """The picture called ``name``, or the main one, drawn without waiting for those behind it.

    Raises:
        NoSuchPicture: naming those that there are.
    """
    names = []
    for picture in _drawn(result):
        if name is None or picture.name == name:
            return picture
        names.append(picture.name)
    raise NoSuchPicture(name or "", names)


def html_of(result: EvaluationResult, plotly: str | None = None, name: str | None = None) -> str:
    """A picture of the result as an interactive page.

    It loads nothing but Plotly's script from the address ``plotly`` where there is one.

    Raises:
        NoSuchPicture: as ``picture_of``.
    """
    return plot_page(picture_of(result, name), plotly)


def _pictures(result: EvaluationResult) -> Iterable[Picture]:
    if isinstance(result, ComparisonResult):
        return comparison_pictures(result)
    return chain(EVALUATIONS[result.evaluation].pictures(result), _changes(result), parameter_pictures(result))


def _changes(result: EvaluationResult) -> Iterator[Picture]:
    """Each method beside the model's own encoding."""
    comparison = within(result)
    if comparison is not None and comparison.changed():
        yield change_picture(comparison)


def _drawn(result: EvaluationResult) -> Iterator[Picture]:
    """One by one, scores by a parameter last; those of a partial result name its scope."""
    for picture in _pictures(result):
        if scope := result.scope():
            note(picture.figure, scope)
        yield picture
