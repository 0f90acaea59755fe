"""Perplexity against context length: every method over every window, as one interruptible generator."""

from __future__ import annotations

import time
import uuid
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from patches import Method, Patched
from service.evaluation import protocols
from service.evaluation.documents import Document
from service.evaluation.protocols import Window
from service.evaluation.results import DocumentInfo, MethodResult, PerplexityResult, Progress, Protocol
from service.evaluation.scoring import Nll, token_nll
from service.evaluation.statistics import Scored, length_result, position_buckets
from service.shorthand import to_shorthand


class Subject(NamedTuple):
    """A method, the model it is measured on (a method may name a variant of the requested one), and how
    many tokens its passes read."""

    method: Method
    patch: Patched
    model: str
    tokens: int


@dataclass(frozen=True)
class Plan:
    """A validated evaluation: nothing left to choose. ``bos`` is the token every window starts with."""

    model: str
    trained_length: int
    documents: list[Document]
    lengths: list[int]
    protocol: Protocol
    stride: int
    tail: int
    bos: int | None
    chunk: int

    def windows(self, document: Document, length: int) -> list[Window]:
        """Windows at ``length`` tokens, the BOS counted in."""
        special = 0 if self.bos is None else 1
        tokens, room = len(document.token_ids), length - special
        if self.protocol == "curve":
            return protocols.curve(tokens, room)
        if self.protocol == "sliding":
            return protocols.sliding(tokens, room, self.stride)
        if self.protocol == "disjoint":
            return protocols.disjoint(tokens, room)
        return protocols.tail(tokens, room, self.tail, self.lengths[-1] - special, self.stride)

    def parameters(self) -> dict[str, Any]:
        """The protocol's parameters that had an effect."""
        if self.protocol == "sliding":
            return {"stride": self.stride}
        if self.protocol == "tail":
            return {"stride": self.stride, "tail": self.tail}
        return {}

    def passes(self, method: Method, patch: Patched) -> list[tuple[int, list[int]]]:
        """(length of the pass, lengths it answers): one pass for a whole curve unless the schedule
        depends on the length."""
        by_length = patch.resolve(method, self.lengths[-1]).recipe.depends_on_length
        if self.protocol == "curve" and not by_length:
            return [(self.lengths[-1], self.lengths)]
        return [(length, [length]) for length in self.lengths]

    def tokens(self, method: Method, patch: Patched) -> int:
        """Tokens that forward passes read for one method."""
        return sum(
            window.stop - window.start
            for length, _ in self.passes(method, patch)
            for document in self.documents
            for window in self.windows(document, length)
        )


def evaluate(plan: Plan, subjects: Sequence[Subject]) -> Generator[Progress, None, PerplexityResult]:
    """Run the plan for every subject; yields progress after every chunk of tokens."""
    began = time.perf_counter()
    total = sum(subject.tokens for subject in subjects)
    done = 0
    results = []
    for subject in subjects:
        label = label_of(subject.method)
        work = _evaluate_method(plan, subject, label)
        try:
            while True:
                done += next(work)
                seconds = time.perf_counter() - began
                yield Progress(tokens_done=min(done, total), tokens_total=total, label=label, seconds=seconds)
        except StopIteration as stop:
            results.append(stop.value)
    return PerplexityResult(
        id=uuid.uuid4().hex,
        model=plan.model,
        trained_length=plan.trained_length,
        protocol=plan.protocol,
        parameters=plan.parameters(),
        bos=plan.bos is not None,
        lengths=plan.lengths,
        documents=[DocumentInfo(name=d.name, tokens=len(d.token_ids), bytes=d.total_bytes) for d in plan.documents],
        methods=results,
        seconds=time.perf_counter() - began,
    )


def label_of(method: Method) -> str:
    """Short name for tables and legends: the method and the parameters that were set."""
    given = method.model_dump(exclude_unset=True)
    chosen = method.model_dump(exclude={"method"}, exclude_defaults=True)
    shown = [f"{name}={_shown(given[name])}" for name in chosen if not isinstance(given[name], tuple)]
    return f"{method.method}({', '.join(shown)})" if shown else method.method


def _shown(value: Any) -> str:
    """A parameter's value: an encoding in its short form, a temperature by its kind and numbers."""
    if isinstance(value, Mapping):
        if "method" in value:
            return to_shorthand(value)
        return " ".join([str(value.get("kind", "")), *(_shown(v) for k, v in value.items() if k != "kind")]).strip()
    return f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def _evaluate_method(plan: Plan, subject: Subject, label: str) -> Generator[int, None, MethodResult]:
    began = time.perf_counter()
    method, patch, model, _ = subject
    lengths, hashes, passes = [], {}, 0
    longest: list[Scored] = []
    for pass_length, answered in plan.passes(method, patch):
        resolved = patch.resolve(method, pass_length)
        slot = patch.slots.acquire(resolved)
        try:
            windows = []
            for index, document in enumerate(plan.documents):
                for window in plan.windows(document, pass_length):
                    nll = yield from _window_nll(plan, patch, document, window, slot)
                    windows.append((index, document, window, nll))
                    passes += 1
        finally:
            patch.slots.release(slot)
        for length in answered:
            longest = [_scored(plan, index, document, w, nll, length) for index, document, w, nll in windows]
            lengths.append(length_result(length, longest, len(plan.documents)))
            hashes[length] = resolved.frequency_hash
    return MethodResult(
        label=label,
        pe=patch.describe(method, plan.lengths[-1]),
        frequency_hashes=hashes,
        model=model,
        passes=passes,
        seconds=time.perf_counter() - began,
        lengths=lengths,
        nll_by_position=position_buckets(longest),
    )


def _window_nll(plan: Plan, patch: Patched, document: Document, window: Window, slot: int) -> Generator[int, None, Nll]:
    """NLL of the window's tokens that have a prediction: all with a BOS before them, else all but the first."""
    token_ids = document.token_ids[window.start : window.stop]
    if plan.bos is not None:
        token_ids = [plan.bos, *token_ids]
    return (yield from token_nll(patch, token_ids, slot, plan.chunk))


def _scored(plan: Plan, index: int, document: Document, window: Window, nll: Nll, length: int) -> Scored:
    """The part of a window's NLL that counts at ``length`` (shorter than the pass only for curves)."""
    special = 0 if plan.bos is None else 1
    first_predicted = window.start + 1 - special
    first = max(window.first_scored, first_predicted)
    last = min(window.stop, window.start + length - special)
    return Scored(
        document=index,
        nll=nll[first - first_predicted : last - first_predicted],
        first_context=first - window.start + special,
        bytes=document.bytes_between(first, last),
    )
