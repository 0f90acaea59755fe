"""Which pictures an evaluation's result has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from service.evaluation.results import EvaluationResult
from service.figures.picture import Picture


def pictures_of(result: EvaluationResult) -> list[Picture]:
    """Every picture of a result, the one that answers its question first.

    Raises:
        ValueError: for an evaluation without pictures.
    """
    if result.evaluation not in _PICTURES:
        raise ValueError(f"evaluation: {result.evaluation!r} has no pictures")
    return _PICTURES[result.evaluation](result)


def png_of(result: EvaluationResult) -> bytes:
    """The result's first picture as PNG."""
    return pictures_of(result)[0].png()


def html_of(result: EvaluationResult, plotly: str | None = None) -> str:
    """The result's first picture as an interactive page, which loads nothing but Plotly's script from the address
    ``plotly`` where there is one."""
    return pictures_of(result)[0].html(plotly)


def _perplexity(result: Any) -> list[Picture]:
    from service.figures.nll import nll_by_position
    from service.figures.perplexity import perplexity_picture

    by_position = nll_by_position(result, result.methods, result.lengths[-1], result.documents)
    return [perplexity_picture(result), *([by_position] if by_position else [])]


def _long_perplexity(result: Any) -> list[Picture]:
    from service.figures.long_perplexity import long_perplexity_pictures

    return long_perplexity_pictures(result)


def _retrieval(result: Any) -> list[Picture]:
    from service.figures.retrieval import retrieval_pictures

    return retrieval_pictures(result)


def _probe(result: Any) -> list[Picture]:
    from service.figures.probe import probe_pictures

    return probe_pictures(result)


def _ruler(result: Any) -> list[Picture]:
    from service.figures.ruler import ruler_pictures

    return ruler_pictures(result)


def _sweep(result: Any) -> list[Picture]:
    """Bars of every part at the target length, then what each part has itself."""
    from service.figures.sweep import target_picture

    bars = [target_picture(result, index) for index in range(len(result.evaluations))]
    parts = [
        replace(picture, name=f"{index + 1}-{picture.name}")
        for index, part in enumerate(result.evaluations)
        for picture in pictures_of(part)
    ]
    return [*bars, *parts]


_PICTURES: dict[str, Callable[[Any], list[Picture]]] = {
    "perplexity": _perplexity,
    "long_perplexity": _long_perplexity,
    "passkey": _retrieval,
    "needle": _retrieval,
    "ruler": _ruler,
    "probe": _probe,
    "sweep": _sweep,
}
