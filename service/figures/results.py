"""Which pictures an evaluation's result has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from service.evaluation.results import EvaluationResult
from service.figures.picture import Picture


def pictures_of(result: EvaluationResult) -> list[Picture]:
    """Every picture of a result, the one that answers its question first.

    Raises:
        ValueError: for an evaluation without pictures.
    """
    return list(_described(result))


def png_of(result: EvaluationResult) -> bytes:
    """The result's first picture as PNG."""
    return next(_described(result)).png()


def html_of(result: EvaluationResult, plotly: str | None = None) -> str:
    """The result's first picture as an interactive page, which loads nothing but Plotly's script from the address
    ``plotly`` where there is one."""
    return next(_described(result)).html(plotly)


def _described(result: EvaluationResult) -> Iterator[Picture]:
    """One picture after another: who wants the first waits for no other."""
    if result.evaluation not in _PICTURES:
        raise ValueError(f"evaluation: {result.evaluation!r} has no pictures")
    return _PICTURES[result.evaluation](result)


def _perplexity(result: Any) -> Iterator[Picture]:
    from service.figures.evaluations.nll import nll_by_position
    from service.figures.evaluations.perplexity import perplexity_picture

    yield perplexity_picture(result)
    by_position = nll_by_position(result, result.methods, result.lengths[-1], result.documents)
    if by_position is not None:
        yield by_position


def _long_perplexity(result: Any) -> Iterator[Picture]:
    from service.figures.evaluations.long_perplexity import long_perplexity_pictures

    yield from long_perplexity_pictures(result)


def _retrieval(result: Any) -> Iterator[Picture]:
    from service.figures.evaluations.retrieval import retrieval_pictures

    return retrieval_pictures(result)


def _probe(result: Any) -> Iterator[Picture]:
    from service.figures.evaluations.probe import probe_pictures

    return probe_pictures(result)


def _ruler(result: Any) -> Iterator[Picture]:
    from service.figures.evaluations.ruler import ruler_pictures

    return ruler_pictures(result)


def _sweep(result: Any) -> Iterator[Picture]:
    """Bars of every part at the target length, then what each part has itself."""
    from service.figures.evaluations.sweep import target_picture

    for index in range(len(result.evaluations)):
        yield target_picture(result, index)
    for index, part in enumerate(result.evaluations):
        for picture in _described(part):
            yield replace(picture, name=f"{index + 1}-{picture.name}")


_PICTURES: dict[str, Callable[[Any], Iterator[Picture]]] = {
    "perplexity": _perplexity,
    "long_perplexity": _long_perplexity,
    "passkey": _retrieval,
    "needle": _retrieval,
    "ruler": _ruler,
    "probe": _probe,
    "sweep": _sweep,
}
