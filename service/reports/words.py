"""The answer of an evaluation in a sentence or two, made from its numbers alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from service.evaluation.perplexity.tables import short_number
from service.evaluation.probe.results import ProbeResult
from service.evaluation.results import EvaluationResult, Interval, MethodInResult, name_of
from service.evaluation.ruler.results import RulerResult
from service.evaluation.scores import Score, Scores, scores_of
from service.evaluation.sweep.results import SweepResult
from service.figures.drawing.axes import percent

TOLERANCE = 0.1
"""How far above the model's own perplexity within its trained length another one still counts as near it."""
LISTED = 6
"""Most names in one list."""
FOUND = 0.5
"""The share from which on something counts as found more often than not."""


def words_of(result: EvaluationResult) -> list[str]:
    """Sentences on what was measured; plain text that still has to be escaped.

    Raises:
        TypeError: for a result without scores.
    """
    if isinstance(result, SweepResult):
        return _sweep(result)
    scores, names = scores_of(result), [name_of(method, result) for method in _methods(result)]
    if not any(scores.by_method):
        return ["Nothing could be measured: no scored token needs long context."]
    if isinstance(result, ProbeResult):
        return [*_best(scores, names, "distance"), *_attention(result, names)]
    if isinstance(result, RulerResult):
        return [*_best(scores, names, "length"), _effective(result, names)]
    reach = _near_the_plain_one(result, scores, names) if scores.lower_is_better else _found(scores, names)
    return [*_best(scores, names, "length"), *reach]


def _methods(result: EvaluationResult) -> Sequence[MethodInResult]:
    found: Sequence[MethodInResult] = getattr(result, "methods", ())
    return found


def _best(scores: Scores, names: Sequence[str], of: str) -> list[str]:
    """Who is best at the longest length (or distance), and who cannot be told apart from that."""
    longest = max(length for by_length in scores.by_method for length in by_length)
    at = {name: by[longest] for name, by in zip(names, scores.by_method, strict=True) if longest in by}
    sign = 1 if scores.lower_is_better else -1
    best = min(at, key=lambda name: sign * at[name].value)
    where = f"At {longest:,} tokens" if of == "length" else f"At a distance of {longest:,} tokens"
    number = _number(at[best], scores)
    if len(at) == 1:
        return [f"{where}, the {scores.measure} of {best} is {number}."]
    if not scores.lower_is_better and at[best].value == 0:
        return [f"{where}, every method fails: {scores.measure} {number}."]
    equal = [name for name in at if name != best and at[name].value == at[best].value]
    if equal:
        return [f"{where}, {_listed([best, *equal])} are equally good: {scores.measure} {number}."]
    sentences = [f"{where}, {best} is best: {scores.measure} {number}."]
    near = [name for name in at if name != best and _overlap(at[name].interval, at[best].interval)]
    if near:
        those = f"interval of {near[0]} overlaps" if len(near) == 1 else f"intervals of {_listed(near)} overlap"
        sentences.append(f"The {those} with that: by these intervals they cannot be told apart.")
    return sentences


def _near_the_plain_one(result: EvaluationResult, scores: Scores, names: Sequence[str]) -> list[str]:
    """Which methods stay near what the model does by itself within its trained length, and how far."""
    reference = _reference(result, scores)
    if reference is None:
        return [
            f"The model's own encoding was not measured within its trained {result.trained_length:,} tokens: "
            "there is nothing to compare with."
        ]
    length, score = reference
    limit = score.value * (1 + TOLERANCE)
    reached: dict[tuple[int, ...], list[str]] = {}
    for name, by_length in zip(names, scores.by_method, strict=True):
        near = tuple(n for n, at in sorted(by_length.items()) if n >= length and at.value <= limit)
        reached.setdefault(near, []).append(_doubtful(name, by_length.get(max(near, default=0)), limit))
    measured = sorted({n for by_length in scores.by_method for n in by_length if n >= length})
    order = sorted(reached, key=lambda near: -max(near, default=0))
    told = "; ".join(f"{_listed(reached[near])} {_where(near, measured)}" for near in order)
    return [
        f"The model's own encoding has {_number(score, scores)} at {length:,} tokens. "
        f"Within {percent(TOLERANCE)} of that ({_plain(limit, scores)}): {told}."
    ]


def _where(near: tuple[int, ...], measured: Sequence[int]) -> str:
    """The lengths in ``near``, of all that were measured."""
    if not near:
        return "at no length from there on"
    if near == tuple(measured[: len(near)]):
        return f"up to {near[-1]:,} tokens"
    return f"at {_listed([f'{length:,}' for length in near])} tokens"


def _reference(result: EvaluationResult, scores: Scores) -> tuple[int, Score] | None:
    """The model's own encoding at the longest length within its training."""
    for method, by_length in zip(_methods(result), scores.by_method, strict=True):
        if method.label == "default" and method.model == result.model:
            within = [length for length in by_length if length <= result.trained_length]
            if within:
                return max(within), by_length[max(within)]
    return None


def _found(scores: Scores, names: Sequence[str]) -> list[str]:
    """Up to which length each method finds at least half."""
    reached: dict[int | None, list[str]] = {}
    for name, by_length in zip(names, scores.by_method, strict=True):
        reach = _reach([(n, at.value >= FOUND) for n, at in sorted(by_length.items())])
        reached.setdefault(reach, []).append(name)
    return [f"Found at least {percent(FOUND)} of the time, there and at every shorter length: {_reaches(reached)}."]


def _effective(result: RulerResult, names: Sequence[str]) -> str:
    reached: dict[int | None, list[str]] = {}
    for name, method in zip(names, result.methods, strict=True):
        reached.setdefault(method.effective_length, []).append(name)
    return f"Effective length, above {percent(result.threshold)}: {_reaches(reached)}."


def _attention(result: ProbeResult, names: Sequence[str]) -> list[str]:
    """How much of the attention goes farther than the model was trained for, at the longest length."""
    longest, parts = result.lengths[-1], []
    starts = {bucket.start for method in result.methods for at in method.attention_mean for bucket in at.buckets}
    far = min((start for start in starts if start >= result.trained_length), default=longest)
    if longest <= far:
        return []
    for name, method in zip(names, result.methods, strict=True):
        for at in method.attention_mean:
            if at.length == longest:
                mass = sum(bucket.mass for bucket in at.buckets if bucket.start >= far)
                parts.append(f"{name} {percent(mass)} (on the first 4 keys {percent(at.first_keys)})")
    beyond = f"the trained {far:,}" if far == result.trained_length else f"{far:,}"
    return [
        f"In passes of {longest:,} tokens, this share of the attention goes to keys at distances of {beyond} tokens or "
        f"more: {_listed(parts)}."
    ]


def _sweep(result: SweepResult) -> list[str]:
    enough = [name_of(method, result) for method in result.methods if method.adequate]
    several = len(result.evaluations) > 1
    return [
        result.answer.words,
        *([f"Good enough by every evaluation: {_listed(enough)}."] if several and enough else []),
    ]


def _reach(passed: Sequence[tuple[int, bool]]) -> int | None:
    """The longest length up to which every one passed."""
    reach = None
    for length, good in passed:
        if not good:
            break
        reach = length
    return reach


def _reaches(reached: Mapping[int | None, Sequence[str]]) -> str:
    """The farthest first: "a and b up to 2,048 tokens; c at no length"."""
    order = sorted(reached, key=lambda reach: -(reach or 0))
    return "; ".join(
        f"{_listed(reached[reach])} {f'up to {reach:,} tokens' if reach else 'at no length'}" for reach in order
    )


def _doubtful(name: str, at: Score | None, limit: float) -> str:
    """The name, and that the interval at the end of its reach goes past the limit."""
    crosses = at is not None and at.interval is not None and at.interval.high > limit
    return f"{name} (its interval there crosses the limit)" if crosses else name


def _overlap(a: Interval | None, b: Interval | None) -> bool:
    return a is not None and b is not None and a.low <= b.high and b.low <= a.high


def _number(score: Score, scores: Scores) -> str:
    interval = score.interval
    if interval is None:
        return _plain(score.value, scores)
    ends = f"{_plain(interval.low, scores)} to {_plain(interval.high, scores)}"
    return f"{_plain(score.value, scores)} (95 % interval {ends})"


def _plain(value: float, scores: Scores) -> str:
    return short_number(value) if scores.lower_is_better else percent(value)


def _listed(names: Sequence[str]) -> str:
    """ "a, b and c"; of many, the first few and how many more."""
    shown = list(names) if len(names) <= LISTED else [*names[: LISTED - 1], f"{len(names) - LISTED + 1} more"]
    return f"{', '.join(shown[:-1])} and {shown[-1]}" if len(shown) > 1 else "".join(shown)
