"""Generations of factors on the windows of the search, then the best one on held-out windows."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from patches import OWN, by_factors, factors_of, starts
from service.evaluation.checks import (
    InvalidEvaluation,
    affordable,
    bos_of,
    documents_by_length,
    lengths_of,
    subjects_of,
)
from service.evaluation.cost import Cost
from service.evaluation.documents import Document
from service.evaluation.recommend.plan import DEFAULT_REACH
from service.evaluation.results import DocumentInfo, Part, overlaps_text
from service.evaluation.scoring.places import Places
from service.evaluation.search import evolution
from service.evaluation.search.evolution import ONE, Individual, Space
from service.evaluation.search.judging import Losses, methods_of
from service.evaluation.search.places import split
from service.evaluation.search.request import SearchRequest
from service.evaluation.search.results import Answer, Generation, SearchResult
from service.evaluation.search.unit import LateUnit, scored_of
from service.evaluation.search.words import sentences, surely_beaten
from service.evaluation.unit import Outcome, Plan, Subject, Unit, finished_stages
from service.evaluation.words import measured_text, skipped_text
from service.models.policies import out_of_reach
from service.models.registry import ModelRegistry, ServedModel
from service.settings import Settings

LEAST_PAIRS = 2


@dataclass(frozen=True, eq=False)
class SearchPlan(Plan):
    """``compared`` are the encodings beside the search; with each generation of ``bred`` they read ``places``.

    ``found`` is the best individual, known once the search is over: it and ``compared`` read the windows ``held_out``.
    """

    in_stages: ClassVar[bool] = True
    parts_are: ClassVar[Part] = "generations"
    methods_are_asked: ClassVar[bool] = False

    request: SearchRequest
    served: ServedModel
    space: Space
    compared: tuple[Subject, ...]
    documents: list[Document]
    skipped: list[DocumentInfo]
    target: int
    places: Places
    held_out: Places
    bos: int | None
    chunk: int | None
    bred: tuple[tuple[Individual, ...], ...]
    found: Individual | None = None

    @property
    def times(self) -> float:
        """Target length / trained length."""
        return self.target / self.served.trained_length

    @property
    def generations(self) -> int:
        """Generations until it ends."""
        return min(self.request.generations, self.request.stop_after or self.request.generations)

    @property
    def cost(self) -> Cost:
        candidates = sum(map(len, self.bred))
        if self.found is None:
            candidates += (self.generations - len(self.bred)) * evolution.children_of(self.request.population)
        passes = (len(self.compared) + candidates) * len(self.places.windows)
        if self.request.stop_after is None:
            passes += (len(self.compared) + 1) * len(self.held_out.windows)
        return Cost(self.target, 1, 1).times(passes)

    @cached_property
    def units(self) -> Sequence[Unit]:
        individuals = [individual for generation in self.bred for individual in generation]
        searched = [*self.compared, *map(self._subject, individuals)]
        units = self._units(searched, self.places)
        if self.found is not None:
            units += self._units([self._subject(self.found), *self.compared], self.held_out)
        return units

    def _units(self, subjects: Sequence[Subject], places: Places) -> list[Unit]:
        return [
            LateUnit(
                subject=subject,
                length=self.target,
                name=f"{self.documents[place.document].name} before token {place.stop:,}",
                document=self.documents[place.document],
                stop=place.stop,
                bos=self.bos,
                chunk=self.chunk,
            )
            for subject in subjects
            for place in places.windows
        ]

    def _subject(self, individual: Individual) -> Subject:
        factors, geometry = [value / ONE for value in individual.factors], self.served.patch.geometry
        method = by_factors(factors, geometry, self.times, individual.attention)
        return self.compared[0]._replace(method=method)

    def extended(self, outcomes: Sequence[Outcome]) -> Plan | None:
        if self.found is not None:
            return None
        losses = self._losses(outcomes).searched
        if len(self.bred) < self.generations:
            rng = _rng(self.request.seed, len(self.bred))
            if born := evolution.next_generation(losses, self.space, self.request.population, rng):
                return replace(self, bred=(*self.bred, born))
        if self.request.stop_after is not None:
            return None
        return replace(self, found=_best(losses))

    def _losses(self, outcomes: Sequence[Outcome]) -> Losses:
        return Losses.of(outcomes, len(self.compared), self.bred, len(self.places.windows), len(self.held_out.windows))

    def result(self, outcomes: Sequence[Outcome]) -> SearchResult:
        losses = self._losses(outcomes)
        found = _best(losses.searched)
        methods = methods_of([self._subject(found), *self.compared], losses, found, self.held_out, self.target)
        generations = list(_course(self.bred, losses))
        is_plain = self.served.patch.geometry.native is None
        words = sentences(methods, generations, self.target, len(self.held_out.windows), is_plain=is_plain)
        infos = [document.info for document in self.documents]
        words += [measured_text(infos), *overlaps_text(infos)]
        if any(info.overlap for info in infos):
            words.append("So held-out windows may repeat text that the search has read.")
        words += [*out_of_reach(self.target, self.served), *skipped_text(self.documents, self.skipped)]
        best = min(methods, key=lambda one: one.held_out.perplexity if one.held_out else one.search_loss)
        beaten = [method.label for method in surely_beaten(methods[1:])]
        return SearchResult(
            model=self.served.name,
            fingerprint=self.served.contents,
            trained_length=self.served.trained_length,
            target_length=self.target,
            windows=len(self.places.windows),
            held_out=len(self.held_out.windows),
            population=self.request.population,
            seed=self.request.seed,
            bos=self.bos is not None,
            tokens_read=sum(unit.tokens for unit in self.units),
            documents=infos,
            skipped=self.skipped,
            pe=methods[0].request,
            generations=generations,
            answer=Answer(label=best.label, pe=best.request, surely_beats=beaten, words=words),
            methods=methods,
        )

    def reduced(self, request: Any, finished: Collection[int]) -> Any | None:
        """``request`` with those of its generations that are finished."""
        sizes = [len(generation) * len(self.places.windows) for generation in self.bred]
        sizes[0] += len(self.compared) * len(self.places.windows)
        done = finished_stages(sizes, finished)
        return request.model_copy(update={"stop_after": done}) if done else None


def _rng(seed: int, bred: int) -> np.random.Generator:
    """For the next generation after ``bred`` ones. A list that ends in 0 is the seed alone, which draws places."""
    return np.random.default_rng([seed, 1 + bred])


def _best(losses: dict[Individual, float]) -> Individual:
    return min(losses, key=lambda one: (losses[one], one))


def _course(bred: Sequence[Sequence[Individual]], losses: Losses) -> Iterator[Generation]:
    best = np.inf
    for generation in bred:
        values = [losses.searched[individual] for individual in generation]
        best = min(best, *values)
        yield Generation(candidates=len(values), best=best, median=float(np.median(values)))


def plan_of(request: SearchRequest, models: ModelRegistry, settings: Settings) -> SearchPlan:
    """The first generation. Everything is checked here, before a token reaches the model.

    Raises:
        UnknownModel: for a model that is not served.
        InvalidEvaluation: for anything else that cannot be run as asked.
    """
    served = models.get(request.model)
    bos = bos_of(request.bos, served)
    special = 0 if bos is None else 1
    documents, skipped = documents_by_length(request, served, special, settings)
    target = _target(request, served, documents, special, settings)
    space, first = _begin(request, served, target)
    asked = request.methods if request.names_methods else starts(target / served.trained_length)
    (own,) = subjects_of([OWN], served, models, settings, longest=target)
    others = subjects_of(asked, served, models, settings, longest=target)
    wanted = (request.windows, request.held_out)
    places, held_out = split(documents, target - special, scored_of(target), wanted, request.seed)
    plan = SearchPlan(
        request=request,
        served=served,
        space=space,
        compared=(own, *(subject for subject in others if subject != own)),
        documents=documents,
        skipped=skipped,
        target=target,
        places=places,
        held_out=held_out,
        bos=bos,
        chunk=settings.score_chunk,
        bred=(first,),
    )
    affordable(plan, settings, request.longest_field)
    return plan


def _target(
    request: SearchRequest, served: ServedModel, documents: Sequence[Document], special: int, settings: Settings
) -> int:
    wanted, trained = request.length, served.trained_length
    if wanted is None:
        sizes = [len(document.token_ids) for document in documents]
        # Windows take steps of half a window. A document has no room for up to two more.
        room = 2 * sum(sizes) // (request.windows + request.held_out + 1 + 2 * len(sizes))
        wanted = min(DEFAULT_REACH * trained, min(sizes) + special, room, served.engine.scores.most)
        if wanted <= trained:
            windows = f"{request.windows} windows and {request.held_out} held-out ones"
            message = f"{windows} beyond the trained length, {trained}, need more text: send more, or ask for fewer"
            raise InvalidEvaluation("input", message)
    if wanted <= trained:
        raise InvalidEvaluation("length", f"must be beyond the trained length, {trained}, not {wanted}")
    (target,) = lengths_of([wanted], served, documents, special, settings, "length")
    return target


def _begin(request: SearchRequest, served: ServedModel, target: int) -> tuple[Space, tuple[Individual, ...]]:
    """The space, and the first generation.

    Raises:
        InvalidEvaluation: for a model without two pairs that factors could turn.
    """
    patch, times = served.patch, target / served.trained_length
    methods = starts(times)
    try:
        pairs = len(factors_of(methods[0], patch.geometry, target) or ())
        if pairs < LEAST_PAIRS:
            raise ValueError(f"it needs {LEAST_PAIRS} rotary pairs and has {pairs}")
        first = [
            (factors, patch.resolve(method, target).attention_factor)
            for method in methods
            if (factors := factors_of(method, patch.geometry, target)) is not None
        ]
        longrope = patch.resolve(by_factors(first[0][0], patch.geometry, times), target)
    except ValueError as error:
        raise InvalidEvaluation("model", f"has no factors to search: {error}") from error
    space = Space.of(pairs, times, [longrope.attention_factor, *(attention for _, attention in first)])
    begin = [space.nearest(*each) for each in first]
    return space, evolution.first_generation(begin, space, request.population, _rng(request.seed, 0))
