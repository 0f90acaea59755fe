"""The encodings that a recommendation compares."""

from __future__ import annotations

from collections.abc import Sequence

from patches import OWN, Method, candidates
from service.evaluation.checks import InvalidEvaluation, subjects_of
from service.evaluation.recommend.request import RecommendRequest
from service.evaluation.unit import Subject
from service.export.targets import carriers, refusal
from service.models.registry import ModelRegistry, ServedModel
from service.settings import Settings


def candidates_of(
    request: RecommendRequest,
    served: ServedModel,
    models: ModelRegistry,
    settings: Settings,
    reference: int,
    target: int,
) -> list[Subject]:
    """The checkpoint's own encoding, then the other candidates."""
    (own,) = subjects_of([OWN], served, models, settings, longest=reference)
    asked: list[Method] = candidates(served.patch.geometry, target)
    if request.names_methods:
        asked = list(dict.fromkeys(request.methods))
    found = subjects_of(asked, served, models, settings, longest=target)
    others = [subject for subject in found if subject != own]
    return [own, *(others if request.target is None else _expressible(own, others, request.target, target))]


def _expressible(own: Subject, others: Sequence[Subject], system: str, length: int) -> list[Subject]:
    """Those of ``others`` that ``system`` can express for ``length`` tokens.

    Raises:
        InvalidEvaluation: when it can express none, nor the own encoding.
    """
    kept = [subject for subject in others if _carries(system, subject, length)]
    if not kept and not reads(own, length, system):
        why = refusal(own.method, own.patch, system, length)
        raise InvalidEvaluation(
            "target", f"{system} can express no candidate for {length} tokens; of the own one: {why}"
        )
    return kept


def _carries(system: str, subject: Subject, length: int) -> bool:
    return system in (carriers(subject.method, subject.patch, length) or ())


def reads(subject: Subject, length: int, system: str | None) -> bool:
    """True if it reaches ``length``, and ``system`` can express it there."""
    return _fits(subject, length) and (system is None or _carries(system, subject, length))


def _fits(subject: Subject, length: int) -> bool:
    try:
        subject.patch.resolve(subject.method, length)
    except ValueError:  # past the end of a table
        return False
    return True
