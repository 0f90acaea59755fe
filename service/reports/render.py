"""Files made of results, in a separate process: parsing and drawing would block the server's interpreter for seconds.

The server imports this module and no drawing code; its processes do, in ``service.reports.forms``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from patches import Recipe, ResolvedRecipe
from service.evaluation.catalogue import result_in
from service.jobs.records import JobInfo
from service.reports.rendered import PAGE, PageOptions, Rendered, packed_text, refused


def file_of(form: str, evaluation: str, packed: bytes, job: str | None = None, options: PageOptions = PAGE) -> Rendered:
    """The result in ``packed``, JSON under gzip, in one of the forms of ``service.reports.forms``;
    ``job`` is its job's description as JSON."""
    from service.reports.forms import form_of

    result = result_in(packed, evaluation)
    return form_of(form, result, None if job is None else JobInfo.model_validate_json(job), options)


def comparison_of(
    form: str,
    sources: Sequence[tuple[str, bytes]],
    names: Sequence[str],
    places: Sequence[str],
    baseline: str | None,
    options: PageOptions = PAGE,
) -> Rendered:
    """The comparison of results in a form of ``file_of``. Each is (its evaluation, JSON under gzip). ``names`` and
    ``places`` are those of ``compared``."""
    from service.evaluation.comparison.checks import NotComparable
    from service.evaluation.comparison.comparing import compared
    from service.reports.forms import form_of

    results = [result_in(packed, evaluation) for evaluation, packed in sources]
    try:
        return form_of(form, compared(results, names, places, baseline=baseline), None, options)
    except NotComparable as error:
        return refused(error.field, str(error))


def frequencies_of(
    pairs: Sequence[dict[str, Any]], trained_length: int, title: str, recipe: Recipe, length: int
) -> Rendered:
    """The picture of what an encoding changes."""
    from service.figures.drawing.raster import png
    from service.figures.encodings.frequencies import encoding_figure

    return Rendered(png(encoding_figure(pairs, trained_length, title, recipe, length)), "image/png", False)


def encoding_figures_of(
    encodings: Mapping[str, ResolvedRecipe], setting: tuple[Any, ...], about: dict[str, Any]
) -> Rendered:
    """``about`` and the figures of encodings as JSON under gzip; ``setting`` has the fields of ``Setting``."""
    from service.figures.encodings.overview import Setting, encoding_pictures
    from service.figures.web.page import as_json

    return packed_text(as_json(encoding_pictures(encodings, Setting(*setting)), **about), "application/json")
