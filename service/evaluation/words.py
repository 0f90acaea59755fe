"""A result in sentences, from its scores alone. Every result's ``words`` chooses among these."""

from __future__ import annotations

from collections.abc import Sequence

from service.evaluation.documents import BUILT_IN
from service.evaluation.formatting import listed, percent
from service.evaluation.results import DocumentInfo, EvaluationResult, overlaps_text
from service.evaluation.scores import Group, Score, Scores, are_equal
from service.evaluation.statistics.pieces import LEAST

TOLERANCE = 0.1
"""Share by which a perplexity near the reference may exceed it."""
FOUND = 0.5
"""Least share of retrieved samples that counts as found."""


def best_method(result: EvaluationResult, longest: int | None = None) -> list[str]:
    """The best method at ``longest``, and those with an overlapping interval. When absent, it is the longest length or
    distance of any method."""
    scores = result.scores()
    longest = longest or max(length for by_length in scores.by_method for length in by_length)
    by_name = zip(result.names(), scores.by_method, strict=True)
    at = {name: by_length[longest] for name, by_length in by_name if longest in by_length}
    sign = 1 if scores.lower_is_better else -1
    best = min(at, key=lambda name: sign * at[name].value)
    where = f"At {'a distance of ' if scores.by == 'distance' else ''}{longest:,} tokens"
    number = _number(at[best], scores)
    if len(at) == 1:
        return [f"{where}, the {scores.measure} of {best} is {number}."]
    if not scores.lower_is_better and at[best].value == 0:
        return [f"{where}, every method fails: {scores.measure} {number}."]
    equal = [name for name in at if name != best and are_equal(at[name].value, at[best].value)]
    if equal:
        return [f"{where}, {listed([best, *equal])} are equally good: {scores.measure} {number}."]
    sentences = [f"{where}, {best} is best: {scores.measure} {number}."]
    near = [name for name in at if name != best and _is_doubtful(at[best], at[name], 1.0, same_tokens=True)]
    if near:
        sentences.append(f"By 95 % intervals it is not surely better than {listed(near)}.")
    return sentences


def measured_text(documents: Sequence[DocumentInfo]) -> str:
    """The text for which an answer holds."""
    names = [f"the built-in document {each.name}" if each.name in BUILT_IN else each.name for each in documents]
    return f"The answer holds for the text of {listed(names, 3)}: measure other kinds of text too."


def skipped_text(documents: Sequence[object], skipped: Sequence[DocumentInfo]) -> list[str]:
    """The caution about documents that were left out beside ``documents``."""
    if not skipped:
        return []
    shown = listed([document.name for document in skipped], 4)
    count = f"{len(skipped)} of {len(skipped) + len(documents)} documents"
    return [f"Left out as shorter than the longest length: {count}, {shown}."]


def beyond_reach(result: EvaluationResult, longest: int) -> list[str]:
    """The caution about encodings whose parameters end before ``longest`` tokens, the longest pass."""
    short = [
        f"{name} at {method.reach:,}"
        for name, method in zip(result.names(), result.methods, strict=True)
        if method.reach is not None and method.reach < longest
    ]
    return [f"These encodings end before {longest:,} tokens by their parameters: {listed(short)}."] if short else []


def cautions_of(
    documents: Sequence[DocumentInfo], skipped: Sequence[DocumentInfo], groups: Sequence[Group]
) -> list[str]:
    """Documents that share text, one with most of the scored tokens of ``groups``, and those left out."""
    return [*overlaps_text(documents), *uneven_text(documents, groups), *skipped_text(documents, skipped)]


def uneven_text(documents: Sequence[DocumentInfo], groups: Sequence[Group]) -> list[str]:
    """The caution about one of several ``documents`` that has more than half of the scored tokens."""
    total, scored = sum(tokens for _, tokens in groups), sum(tokens > 0 for _, tokens in groups)
    if len(groups) != len(documents) or scored < LEAST:  # there is no interval; early versions had blocks of documents
        return []
    shares = [(document.name, tokens / total) for document, (_, tokens) in zip(documents, groups, strict=True)]
    return [
        f"{name} has {percent(share)} of the scored tokens. Intervals are over documents, so they are wide beside it."
        for name, share in shares
        if share > 0.5
    ]


def near_reference(result: EvaluationResult) -> list[str]:
    """The methods near the model's own encoding within its trained length, and their lengths."""
    scores = result.scores()
    reference = _reference(result, scores)
    if reference is None:
        return [
            f"The model's own encoding has no value within its trained {result.trained_length:,} tokens: "
            "there is nothing to compare with."
        ]
    length, score = reference
    limit = score.value * (1 + TOLERANCE)
    reached: dict[tuple[int, ...], list[str]] = {}
    for name, by_length in zip(result.names(), scores.by_method, strict=True):
        near = tuple(n for n, at in sorted(by_length.items()) if n >= length and at.value <= limit)
        farthest = by_length.get(max(near, default=0))
        same = result.scores_the_same() or max(near, default=0) == length
        if farthest is not None and _is_doubtful(farthest, score, 1 + TOLERANCE, same_tokens=same):
            name = f"{name} (by 95 % intervals not surely there)"
        reached.setdefault(near, []).append(name)
    measured = [n for n in scores.lengths() if n >= length]
    order = sorted(reached, key=lambda near: -max(near, default=0))
    groups = "; ".join(f"{listed(reached[near])} {_where(near, measured)}" for near in order)
    return [
        f"The model's own encoding has {_number(score, scores)} at {length:,} tokens. "
        f"Within {percent(TOLERANCE)} of that ({scores.text(limit)}): {groups}."
    ]


def found_up_to(result: EvaluationResult) -> list[str]:
    """Per method, the longest length up to which it finds at least half."""
    reached = []
    for by_length in result.scores().by_method:
        reach = None
        for length, at in sorted(by_length.items()):
            if at.value < FOUND:
                break
            reach = length
        reached.append(reach)
    return [
        f"Found at least {percent(FOUND)} of the time, there and at every shorter length: {reaches(result, reached)}."
    ]


def reaches(result: EvaluationResult, reached: Sequence[int | None]) -> str:
    """The methods by their longest length in ``reached``: "a and b up to 2,048 tokens; c at no length"."""
    names: dict[int | None, list[str]] = {}
    for name, reach in zip(result.names(), reached, strict=True):
        names.setdefault(reach, []).append(name)
    order = sorted(names, key=lambda reach: -(reach or 0))
    return "; ".join(
        f"{listed(names[reach])} {f'up to {reach:,} tokens' if reach else 'at no length'}" for reach in order
    )


def _where(near: tuple[int, ...], measured: Sequence[int]) -> str:
    """The lengths in ``near``, of all measured ones."""
    if not near:
        return "at no length from there on"
    if near == tuple(measured[: len(near)]):
        return f"up to {near[-1]:,} tokens"
    return f"at {listed([f'{length:,}' for length in near])} tokens"


def _reference(result: EvaluationResult, scores: Scores) -> tuple[int, Score] | None:
    """The model's own encoding at the longest length within its training."""
    for method, by_length in zip(result.methods, scores.by_method, strict=True):
        if method.label == "default" and method.model == result.model:
            within = [length for length in by_length if length <= result.trained_length]
            if within:
                return max(within), by_length[max(within)]
    return None


def _is_doubtful(score: Score, other: Score, factor: float, *, same_tokens: bool) -> bool:
    """True if both have intervals, and these do not separate ``score`` from ``factor`` times ``other``."""
    from service.evaluation.statistics.separation import are_apart  # clients read results without numpy

    is_known = score.interval is not None and other.interval is not None
    return is_known and not are_apart(score, other, factor, same_tokens=same_tokens)


def _number(score: Score, scores: Scores) -> str:
    interval = score.interval
    if interval is None:
        return scores.text(score.value)
    ends = f"{scores.text(interval.low)} to {scores.text(interval.high)}"
    return f"{scores.text(score.value)} (95 % interval {ends})"
