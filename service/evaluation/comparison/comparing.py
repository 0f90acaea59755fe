"""Several results as one comparison, or the methods of one.

A perplexity is compared over the same tokens, by the ratio, whose interval is over documents or quarters of one. Text
that is hard for both counts for nothing. A share is compared by the difference (Newcombe 1998, Statistics in Medicine
17, p. 2635-2650, method 10). Over the same prompts, the scores of both are correlated, which makes it surer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from patches import label_of, parse
from service.evaluation.comparison.checks import (
    Named,
    NotComparable,
    check,
    documents_of,
    have_one_tokenizer,
    shared_lengths,
)
from service.evaluation.comparison.notes import notes_on
from service.evaluation.comparison.results import (
    Change,
    ComparedLength,
    ComparedMethod,
    ComparisonResult,
    Source,
    Verdict,
)
from service.evaluation.formatting import listed
from service.evaluation.results import EvaluationResult, MethodInResult, Partial
from service.evaluation.scores import Interval, Score, are_equal
from service.evaluation.statistics.per_token import ratio_of
from service.evaluation.statistics.separation import pieces_of_both


class Entry(NamedTuple):
    """A method of a result with its scores by length."""

    source: Named
    method: MethodInResult
    scores: Mapping[int, Score]
    lower_is_better: bool


def compared(
    results: Sequence[EvaluationResult], names: Sequence[str], places: Sequence[str], *, baseline: str | None = None
) -> ComparisonResult:
    """The methods of all ``results`` in one result.

    ``names`` and ``places`` have one for each. A result with an empty name has that of its model if all models differ,
    else its place. The partner of a method is that with its label in the first result. ``baseline``, a name, label or
    encoding, is the partner of all others. Of a single result, it is by default the model's own encoding, or the first.

    Raises:
        NotComparable: from ``check``; for two results of one name, and for a ``baseline`` that is no method.
    """
    models = [result.model for result in results]
    own = models if len(set(models)) == len(models) else places
    named = [Named(name or default, result) for name, default, result in zip(names, own, results, strict=True)]
    if twice := [name for name, count in Counter(one.name for one in named).items() if count > 1]:
        raise NotComparable(f"two results have the name {twice[0]!r}: give each its own", "names")
    check(named)
    entries = [
        Entry(one, method, by_length, scores.lower_is_better)
        for one in named
        for scores in [one.result.scores()]
        for method, by_length in zip(one.result.methods, scores.by_method, strict=True)
    ]
    shown = _names(named, entries)
    if baseline is None and len(named) == 1:
        partners = _beside(entries, _own(named[0].result))
    else:
        partners = _partners(entries, shown, baseline)
    first = results[0]
    scores = first.scores()
    return ComparisonResult(
        model=listed(list(dict.fromkeys(models))),
        trained_length=first.trained_length,
        compared=first.evaluation,
        measure=scores.measure,
        lower_is_better=scores.lower_is_better,
        sources=[
            Source(
                name=name,
                default_name=default,
                model=result.model,
                trained_length=result.trained_length,
                id=result.id,
                partial=result.partial,
            )
            for (name, result), default in zip(named, own, strict=True)
        ],
        partial=_partial(named),
        shared_lengths=shared_lengths(named),
        documents=documents_of(first),
        notes=[*([] if baseline else _alone(entries, shown, partners)), *notes_on(named)],
        methods=[
            ComparedMethod(
                label=entry.method.label,
                pe=entry.method.pe,
                model=entry.method.model,
                reach=entry.method.reach,
                name=name,
                source=entry.source.name,
                partner=None if partner is None else shown[partner],
                lengths=list(_lengths(entry, None if partner is None else entries[partner])),
            )
            for entry, name, partner in zip(entries, shown, partners, strict=True)
        ],
    )


def _name(label: str, source: Named) -> str:
    """A method's label with the name of its result."""
    return f"{label} ({source.name})"


def _partial(named: Sequence[Named]) -> Partial | None:
    """The progress of all results of jobs that ended early, as one; None without any."""
    found = [(one, one.result.partial) for one in named if one.result.partial is not None]
    if not found:
        return None
    return Partial(
        units_done=sum(partial.units_done for _, partial in found),
        units_total=sum(partial.units_total for _, partial in found),
        missing={
            label if len(named) == 1 else _name(label, one): units
            for one, partial in found
            for label, units in partial.missing.items()
        },
        lacks=list(dict.fromkeys(part for _, partial in found for part in partial.lacks)),
    )


def _names(named: Sequence[Named], entries: Sequence[Entry]) -> list[str]:
    """The name of each method, which no other one has."""
    if len(named) == 1:
        return named[0].result.names()
    names = [_name(entry.method.label, entry.source) for entry in entries]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise NotComparable(f"a result has the method {twice[0]} twice")
    return names


def _own(result: EvaluationResult) -> int:
    """The index of the model's own encoding, else of the first method."""
    labels = [method.label if method.model == result.model else "" for method in result.methods]
    return labels.index("default") if "default" in labels else 0


def _beside(entries: Sequence[Entry], baseline: int) -> list[int | None]:
    """``baseline`` as the partner of all others."""
    return [None if at == baseline else baseline for at in range(len(entries))]


def _partners(entries: Sequence[Entry], names: Sequence[str], baseline: str | None) -> list[int | None]:
    """The index of the partner of each entry."""
    if baseline is None:
        first = entries[0].source.name
        own = {entry.method.label: at for at, entry in enumerate(entries) if entry.source.name == first}
        return [None if entry.source.name == first else own.get(entry.method.label) for entry in entries]
    labels = [entry.method.label for entry in entries]
    for wanted, known in ((baseline, names), (baseline, labels), (_label(baseline), labels)):
        if wanted in known:
            return _beside(entries, known.index(wanted))
    raise NotComparable(f"{baseline!r} is none of {listed(names)}", "baseline")


def _alone(entries: Sequence[Entry], names: Sequence[str], partners: Sequence[int | None]) -> list[str]:
    """The caution about methods of the later results without a partner."""
    first = entries[0].source.name
    found = zip(entries, names, partners, strict=True)
    alone = [name for entry, name, partner in found if partner is None and entry.source.name != first]
    return [f"The first result has no partner of {listed(alone)}: `baseline` names one for all."] if alone else []


def _label(encoding: str) -> str:
    """The label of an encoding in short form, or of an object as JSON."""
    try:
        return label_of(parse(encoding))
    except ValueError:
        return encoding


def _lengths(entry: Entry, partner: Entry | None) -> Iterator[ComparedLength]:
    for length, score in sorted(entry.scores.items()):
        other = None if partner is None else partner.scores.get(length)
        yield ComparedLength(
            length=length,
            value=score.value,
            interval=score.interval,
            pieces=score.pieces,
            change=None if other is None or partner is None else _change(entry, partner, score, other),
        )


def _change(entry: Entry, partner: Entry, score: Score, other: Score) -> Change:
    if entry.lower_is_better:
        return _ratio(score, other)
    return _difference(score, other, same_prompts=have_one_tokenizer(entry.source.result, partner.source.result))


def _ratio(score: Score, other: Score) -> Change:
    """The ratio of two perplexities over the same tokens."""
    pieces = pieces_of_both(score, other, same_tokens=True)
    if pieces is None or not pieces[0]:
        return Change(value=score.value / other.value, interval=None, verdict="unsure")
    value, ends = ratio_of(*pieces)
    kind = score.interval.kind if score.interval else "quarters"
    interval = None if ends is None else Interval(low=ends[0], high=ends[1], kind=kind)
    equal = are_equal(score.value, other.value)
    return Change(value=value, interval=interval, verdict="equal" if equal else _verdict(interval, 1.0, "worse"))


def _difference(score: Score, other: Score, *, same_prompts: bool) -> Change:
    """The difference of two shares. They are equal if they are so over each of the same prompts."""
    own, others = score.interval, other.interval
    gap, interval = score.value - other.value, None
    if own is not None and others is not None:
        alike = _correlation(score.samples, other.samples) if same_prompts else 0.0
        low = _joined(score.value - own.low, others.high - other.value, alike)
        high = _joined(own.high - score.value, other.value - others.low, alike)
        interval = Interval(low=gap - low, high=gap + high, kind="samples")
    equal = same_prompts and bool(score.samples) and list(score.samples) == list(other.samples)
    return Change(value=gap, interval=interval, verdict="equal" if equal else _verdict(interval, 0.0, "better"))


def _joined(own: float, others: float, alike: float) -> float:
    return math.sqrt(max(own * own - 2 * alike * own * others + others * others, 0.0))


def _correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Of the scores of the same prompts, with the paper's correction for continuity. 0 where one model's scores are all
    equal."""
    if len(a) != len(b) or len(set(a)) < 2 or len(set(b)) < 2:
        return 0.0
    n, x, y = len(a), np.array(a), np.array(b)
    above = float(n * (x @ y) - x.sum() * y.sum())
    corrected = max(above - n / 2, 0.0) if above > 0 else above
    return corrected / float(n * n * x.std() * y.std())


def _verdict(interval: Interval | None, level: float, above: Verdict) -> Verdict:
    """``above``, or its opposite, if the whole interval is above or below ``level``."""
    if interval is None or interval.low <= level <= interval.high:
        return "unsure"
    below: Verdict = "better" if above == "worse" else "worse"
    return above if interval.low > level else below
