"""Several results as one comparison, after a check that their numbers are comparable.

A perplexity is compared over the same tokens, by the ratio, whose interval is over documents or quarters of one. Text
that is hard for both counts for nothing. A share is compared over the same prompts, by the difference (Newcombe 1998,
Statistics in Medicine 17, p. 2635-2650, method 10).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from service.evaluation.catalogue import IN_SWEEPS
from service.evaluation.comparison.results import Change, ComparedLength, ComparedMethod, ComparisonResult, Source
from service.evaluation.formatting import listed
from service.evaluation.results import (
    DocumentInfo,
    EvaluationResult,
    Interval,
    MethodInResult,
    Score,
    are_equal,
)
from service.evaluation.statistics.per_token import ratio_of
from service.evaluation.statistics.separation import pieces_of_both

COMPARABLE = tuple(evaluation.name for evaluation in IN_SWEEPS)
"""Evaluations with a number per method and length."""

FREE = {
    *("evaluation", "id", "model", "trained_length", "partial", "setup", "seconds", "links"),
    *("lengths", "documents", "skipped", "methods", "position_bin"),
}
"""Fields in which results may differ, or that are compared by themselves."""


class NotComparable(ValueError):
    """Results whose numbers differ for another reason than methods and models. ``field`` is the one at fault."""

    def __init__(self, why: str, field: str = "jobs") -> None:
        super().__init__(why)
        self.field = field


class Named(NamedTuple):
    """A result and its name, such as that of its file."""

    name: str
    result: EvaluationResult


class _Entry(NamedTuple):
    """A method of a result with its scores by length."""

    source: Named
    method: MethodInResult
    scores: Mapping[int, Score]


def compared(results: Sequence[Named], baseline: str | None = None) -> ComparisonResult:
    """The methods of all ``results`` in one result.

    The partner of a method is that with its label in the first result. ``baseline``, a name or a label, is the partner
    of all others.

    Raises:
        NotComparable: for fewer than two results, for results of other evaluations or settings, and for a ``baseline``
            that is no method.
    """
    _check(results)
    first = results[0].result
    entries = [
        _Entry(named, method, scores)
        for named in results
        for method, scores in zip(named.result.methods, named.result.scores().by_method, strict=True)
    ]
    names = _names(entries)
    partners = _partners(entries, names, baseline)
    measure = first.scores()
    change = _ratio if measure.lower_is_better else _difference
    methods = [
        ComparedMethod(
            label=entry.method.label,
            pe=entry.method.pe,
            model=entry.method.model,
            name=name,
            source=entry.source.name,
            partner=None if partner is None else names[partner],
            lengths=list(_lengths(entry, None if partner is None else entries[partner], change)),
        )
        for entry, name, partner in zip(entries, names, partners, strict=True)
    ]
    return ComparisonResult(
        model=listed(list(dict.fromkeys(named.result.model for named in results))),
        trained_length=first.trained_length,
        compared=first.evaluation,
        measure=measure.measure,
        lower_is_better=measure.lower_is_better,
        sources=[
            Source(name=name, model=result.model, trained_length=result.trained_length, id=result.id)
            for name, result in results
        ],
        documents=_documents(first),
        notes=_notes(results),
        methods=methods,
    )


def _check(results: Sequence[Named]) -> None:
    if len(results) < 2:
        raise NotComparable("a comparison needs two results at least")
    twice = [name for name, count in Counter(named.name for named in results).items() if count > 1]
    if twice:
        raise NotComparable(f"two results have the name {twice[0]!r}: name them, as in NAME={twice[0]}")
    for name, result in results:
        if result.evaluation not in COMPARABLE:
            allowed = listed(COMPARABLE)
            raise NotComparable(f"{name} is of {result.evaluation}, and comparable are those of {allowed}")
    first = results[0]
    for other in results[1:]:
        if other.result.evaluation != first.result.evaluation:
            raise NotComparable(
                f"{first.name} is of {first.result.evaluation}, and {other.name} of {other.result.evaluation}"
            )
        _check_pair(first, other)


def _check_pair(first: Named, other: Named) -> None:
    """Raises:
    NotComparable: naming the setting or the document in which the two differ.
    """
    over_tokens = first.result.scores().lower_is_better
    free = FREE if over_tokens else FREE | {"bos"}
    own, others = (_settings(named.result, free) for named in (first, other))
    for field in own:
        if own[field] != others.get(field):
            raise NotComparable(
                f"{field} is {_shown(own[field])} in {first.name} and {_shown(others.get(field))} in {other.name}"
            )
    for at, (a, b) in enumerate(_pairs(_documents(first.result), _documents(other.result))):
        if a is None or b is None or _contents(a, over_tokens) != _contents(b, over_tokens):
            why = f"document {at + 1} is {_document(a)} in {first.name} and {_document(b)} in {other.name}"
            more = "; numbers per token compare with one tokenizer alone" if over_tokens else ""
            raise NotComparable(f"{why}{more}")
    if not set(_lengths_of(first.result)) & set(_lengths_of(other.result)):
        raise NotComparable(f"{first.name} and {other.name} share no length")


def _settings(result: EvaluationResult, free: set[str]) -> dict[str, Any]:
    return result.model_dump(mode="json", exclude=free)


def _documents(result: EvaluationResult) -> list[DocumentInfo]:
    documents: list[DocumentInfo] = getattr(result, "documents", [])
    return documents


def _pairs(a: list[DocumentInfo], b: list[DocumentInfo]) -> Iterator[tuple[DocumentInfo | None, DocumentInfo | None]]:
    for at in range(max(len(a), len(b))):
        yield (a[at] if at < len(a) else None), (b[at] if at < len(b) else None)


def _contents(document: DocumentInfo, over_tokens: bool) -> tuple[object, ...]:
    """The part of a document that must agree. Prompts of two tokenizers have the same text."""
    return (document.tokens, document.bytes, document.tokens_sha256) if over_tokens else (document.name,)


def _document(document: DocumentInfo | None) -> str:
    if document is None:
        return "absent"
    return f"{document.name} ({document.tokens:,} tokens, hash {document.tokens_sha256[:8]})"


def _lengths_of(result: EvaluationResult) -> list[int]:
    return result.scores().lengths()


def _shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _names(entries: Sequence[_Entry]) -> list[str]:
    """The shortest names that differ: labels, and where needed models and results."""
    ways: tuple[Callable[[_Entry], str], ...] = (
        lambda entry: entry.method.label,
        lambda entry: f"{entry.method.label} on {entry.method.model}",
        lambda entry: f"{entry.method.label} ({entry.source.name})",
        lambda entry: f"{entry.method.label} on {entry.method.model} ({entry.source.name})",
    )
    for way in ways:
        names = [way(entry) for entry in entries]
        if len(set(names)) == len(names):
            return names
    raise NotComparable(f"a result has the method {Counter(names).most_common(1)[0][0]} twice")


def _partners(entries: Sequence[_Entry], names: Sequence[str], baseline: str | None) -> list[int | None]:
    """The index of the partner of each entry."""
    if baseline is None:
        first = entries[0].source.name
        own = {entry.method.label: at for at, entry in enumerate(entries) if entry.source.name == first}
        return [None if entry.source.name == first else own.get(entry.method.label) for entry in entries]
    found = [at for at, name in enumerate(names) if name == baseline] or [
        at for at, entry in enumerate(entries) if entry.method.label == baseline
    ]
    if not found:
        raise NotComparable(f"the baseline {baseline!r} is none of {listed(names)}", "baseline")
    return [None if at == found[0] else found[0] for at in range(len(entries))]


def _lengths(
    entry: _Entry, partner: _Entry | None, change: Callable[[Score, Score], Change]
) -> Iterator[ComparedLength]:
    for length, score in sorted(entry.scores.items()):
        other = None if partner is None else partner.scores.get(length)
        yield ComparedLength(
            length=length,
            value=score.value,
            interval=score.interval,
            pieces=score.pieces,
            change=None if other is None else change(score, other),
        )


def _ratio(score: Score, other: Score) -> Change:
    """The ratio of two perplexities over the same tokens."""
    pieces = pieces_of_both(score, other, same_tokens=True)
    if pieces is None:
        return Change(value=score.value / other.value, interval=None, verdict="unsure")
    value, ends = ratio_of(*pieces)
    kind = score.interval.kind if score.interval else "quarters"
    interval = None if ends is None else Interval(low=ends[0], high=ends[1], kind=kind)
    return Change(value=value, interval=interval, verdict=_verdict(score, other, interval, 1.0, lower_is_better=True))


def _difference(score: Score, other: Score) -> Change:
    """The difference of two shares. The same prompts are alike in both, which makes it surer."""
    own, others = score.interval, other.interval
    gap, interval = score.value - other.value, None
    if own is not None and others is not None:
        alike = _correlation(score.samples, other.samples)
        low = _joined(score.value - own.low, others.high - other.value, alike)
        high = _joined(own.high - score.value, other.value - others.low, alike)
        interval = Interval(low=gap - low, high=gap + high, kind="samples")
    return Change(value=gap, interval=interval, verdict=_verdict(score, other, interval, 0.0, lower_is_better=False))


def _joined(own: float, others: float, alike: float) -> float:
    return math.sqrt(max(own * own - 2 * alike * own * others + others * others, 0.0))


def _correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Of the scores of the same prompts; 0 where the prompts are others, or one model's scores are all equal."""
    if len(a) != len(b) or len(a) < 2:
        return 0.0
    if len(set(a)) == 1 or len(set(b)) == 1:
        return 0.0
    return float(np.corrcoef(a, b)[0, 1])


def _verdict(score: Score, other: Score, interval: Interval | None, level: float, *, lower_is_better: bool) -> Any:
    if are_equal(score.value, other.value):
        return "equal"
    if interval is None or interval.low <= level <= interval.high:
        return "unsure"
    return "better" if (interval.high < level) == lower_is_better else "worse"


def _notes(results: Sequence[Named]) -> list[str]:
    """Differences beside methods and models: partial results, code, number formats, devices, tokenizers."""
    notes = [f"{name} is partial: {result.partial.words()}." for name, result in results if result.partial is not None]
    setups = {name: result.setup for name, result in results if result.setup is not None}
    facts: dict[str, dict[str, str]] = {}
    for name, setup in setups.items():
        facts.setdefault("code", {})[name] = setup.code[:12]
        for model in setup.models.values():
            for fact in ("dtype", "device", "torch", "transformers"):
                facts.setdefault(fact, {})[name] = str(getattr(model, fact, None))
    for fact, values in facts.items():
        if len(set(values.values())) > 1:
            shown = listed([f"{value} in {name}" for name, value in values.items()])
            notes.append(f"The {fact} differs: {shown}.")
    return notes
