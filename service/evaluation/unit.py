"""Units of work with stored outcomes, and plans that turn outcomes into results.

Most plans know all of their units at once. A plan in stages adds units that depend on the outcomes so far. It replays
from stored outcomes, and a job that resumes takes the same path.

A unit's outcome depends on its inputs, its encoding, the model and the code, and on nothing else. It can come from a
store, in any order, and the result is the same to the bit.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, count
from typing import Any, ClassVar, NamedTuple

import numpy as np

from patches import Method, Patched, ResolvedRecipe, effective, is_own, label_of, resolve
from service.evaluation.cost import Cost
from service.evaluation.results import EvaluationResult, Part, Progress
from service.evaluation.scoring.chunks import most_tokens

Outcome = dict[str, np.ndarray]
"""Named arrays, for ``numpy.savez``."""


class Subject(NamedTuple):
    """A method and its model: a method may name a variant of the requested model.

    ``most`` is the memory that passes of the model may take, in tokens; ``room`` are the bytes that weights and caches
    leave to them and their steps. None: no limit.
    """

    method: Method
    patch: Patched
    model: str
    most: int | None = None
    room: int | None = None

    @property
    def label(self) -> str:
        return label_of(self.method)

    def described(self, length: int) -> dict[str, Any]:
        """The fields of ``MethodInResult``, with the encoding of ``length`` reserved tokens."""
        return {
            "label": self.label,
            "pe": self.patch.describe(self.method, length),
            "model": self.model,
            "reach": self._reach(length),
        }

    def _reach(self, length: int) -> int | None:
        """Longest length by the parameters, for ``length`` tokens; None for any, and for the model's own encoding."""
        method, geometry = self.method.at(length), self.patch.geometry
        if is_own(resolve(method, geometry, length), geometry, length):
            return None
        asked, own = effective(method, geometry), geometry.native
        # Encodings that reach as far as the own one, or plain RoPE, extend nothing.
        others = (asked.trained_length(geometry), own.reached(geometry) if isinstance(own, Method) else None)
        reach = asked.reached(geometry)
        return None if reach in others else reach


@dataclass(frozen=True, eq=False)
class Unit(ABC):
    """One method on one document or sample, in passes of at most ``length`` tokens.

    The encoding is resolved for ``length``, which is also the most that a pass holds in its cache. ``name`` is the
    document's or the sample's, for people.
    """

    kind: ClassVar[str]
    subject: Subject
    length: int
    name: str

    @property
    @abstractmethod
    def tokens(self) -> int:
        """Tokens that the passes read."""

    @abstractmethod
    def inputs(self) -> dict[str, Any]:
        """JSON of the outcome's inputs, beside the model, the resolved encoding and the code."""

    @abstractmethod
    def run(self) -> Generator[int, None, Outcome]:
        """The outcome; yields the tokens of every chunk as it is done.

        Raises:
            SlotsExhausted: when every slot is taken.
        """

    @abstractmethod
    def summary(self, outcome: Outcome) -> dict[str, float]:
        """The outcome in a number or two, for progress events."""

    @property
    def prompt(self) -> str | None:
        """The text that the model is asked, where the evaluation writes it; without its BOS."""
        return None

    @property
    def method(self) -> Method:
        """The method in effect at this length."""
        return self.subject.method.at(self.length)

    @cached_property
    def resolved(self) -> ResolvedRecipe:
        return self.subject.patch.resolve(self.subject.method, self.length)

    def slot(self) -> AbstractContextManager[int]:
        """A slot of this unit's encoding, released at the end.

        Raises:
            SlotsExhausted: when every slot is taken.
        """
        return self.subject.patch.slots.held(self.resolved)


@dataclass(frozen=True, eq=False)
class ScoredUnit(Unit):
    """A unit whose passes start with the token ``bos``, and read at most ``chunk`` tokens between generation steps."""

    bos: int | None
    chunk: int | None

    @property
    def prefix(self) -> list[int]:
        """The tokens before the text."""
        return [] if self.bos is None else [self.bos]

    @property
    def chunk_of_device(self) -> int:
        """``chunk``, or where it is None that of the model's device."""
        return most_tokens(self.chunk, self.subject.patch.model.device)


class Plan(ABC):
    """A validated evaluation: nothing left to choose, or in stages nothing but what outcomes decide."""

    in_stages: ClassVar[bool] = False
    """True if ``extended`` may add units."""
    parts_are: ClassVar[Part] = "lengths"
    """Parts that ``reduced`` may leave out, besides methods."""
    methods_are_asked: ClassVar[bool] = True
    """False if units have methods of the plan's own making, of which a partial result may lack some."""

    @property
    @abstractmethod
    def cost(self) -> Cost:
        """The cost of the units, without making them; in stages, the most that this and all later stages take."""

    @property
    @abstractmethod
    def units(self) -> Sequence[Unit]:
        """The work, in any order; in stages, that of the stages known so far."""

    def extended(self, outcomes: Sequence[Outcome]) -> Plan | None:
        """The plan with the units of the next stage after its own; None when ``outcomes``, one per unit, suffice.

        Equal outcomes give equal plans.
        """
        return None

    @abstractmethod
    def result(self, outcomes: Sequence[Outcome]) -> EvaluationResult:
        """The result of the outcomes, one per unit and in their order."""

    @property
    def tokens(self) -> int:
        """Tokens that all passes read."""
        return self.cost.tokens

    def reduced(self, request: Any, finished: Collection[int]) -> Any | None:
        """``request`` with the methods whose units are all among the positions ``finished``.

        Without any, it has the methods that are finished at some lengths, and the lengths that these share. None
        without such lengths. The plan of the reduced request may need other units too.
        """
        kept: dict[str, Any] = {"methods": complete_methods(self.units, finished)}
        if not kept["methods"]:
            kept["methods"], kept["lengths"] = complete_lengths(self.units, finished)
        return request.reduced(kept) if kept["methods"] else None


def complete_methods(units: Sequence[Unit], finished: Collection[int]) -> list[Method]:
    """The methods of ``units`` that have no unit at a position outside ``finished``, in order."""
    unfinished = {unit.subject.method for position, unit in enumerate(units) if position not in finished}
    return [method for method in dict.fromkeys(unit.subject.method for unit in units) if method not in unfinished]


def complete_lengths(units: Sequence[Unit], finished: Collection[int]) -> tuple[list[Method], list[int]]:
    """The methods of ``units`` with no unit outside ``finished`` at some lengths, and the lengths that they share."""
    unfinished = {(unit.subject.method, unit.length) for position, unit in enumerate(units) if position not in finished}
    complete: dict[Method, set[int]] = {}
    for unit in units:
        if (unit.subject.method, unit.length) not in unfinished:
            complete.setdefault(unit.subject.method, set()).add(unit.length)
    shared = set.intersection(*complete.values()) if complete else set()
    return (list(complete), sorted(shared)) if shared else ([], [])


def finished_stages(sizes: Iterable[int], finished: Collection[int]) -> int:
    """The first stages, of ``sizes`` units each, that have no unit at a position outside ``finished``."""
    unfinished = next(position for position in count() if position not in finished)
    return sum(stop <= unfinished for stop in accumulate(sizes))


def run_units(units: Sequence[Unit]) -> Generator[Progress, None, list[Outcome]]:
    """Run ``units`` one after another; yields progress after every chunk of tokens, and at the end of each unit."""
    began = time.perf_counter()
    total, done = sum(unit.tokens for unit in units), 0

    def progress(tokens: int, unit: Unit) -> Progress:
        seconds = time.perf_counter() - began
        return Progress(tokens_done=tokens, tokens_total=total, label=unit.subject.label, seconds=seconds)

    outcomes: list[Outcome] = []
    for unit in units:
        work, read = unit.run(), 0
        try:
            while True:
                read += next(work)
                yield progress(done + read, unit)
        except StopIteration as stop:
            outcomes.append(stop.value)
        finally:
            work.close()
        done += unit.tokens
        if read < unit.tokens:  # a last token is only a target, and an answer may end early
            yield progress(done, unit)
    return outcomes


def evaluate(plan: Plan) -> Generator[Progress, None, EvaluationResult]:
    """The whole plan on this thread, stage by stage."""
    outcomes: list[Outcome] = []
    extended: Plan | None = plan
    while extended is not None:
        plan = extended
        outcomes += yield from run_units(plan.units[len(outcomes) :])
        extended = plan.extended(outcomes)
    return plan.result(outcomes)
