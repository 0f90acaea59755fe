"""The answer of a recommendation in sentences, made from its numbers alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from patches import UNSCALED
from service.evaluation.cost import weight_of
from service.evaluation.formatting import listed, percent, probability, short_number
from service.evaluation.recommend.evidence import Evidence
from service.evaluation.recommend.results import Answer, AtLength, RecommendMethod
from service.evaluation.recommend.rounds import Schedule
from service.evaluation.scores import ROUNDING, Interval
from service.evaluation.statistics.per_token import finite_exp

MUCH = 0.3
"""Nats, and share of repeated tokens: an encoding that is worse by more is one to avoid."""

LEAST_SHARED = 2
"""Windows of a reason against a candidate: one may be odd."""

MOST_AVOIDED = 3

MOST_NEAR = 3
"""Labels of dropped candidates that were nearly as good."""


def sentences(
    answer: Answer,
    methods: Sequence[RecommendMethod],
    schedule: Schedule,
    trained_length: int,
    exportable: Sequence[str],
) -> list[str]:
    """The choice, its evidence, the doubt, the cost, and the encodings to avoid. ``exportable`` are the finalists that
    a system can express, the best first."""
    chosen = next(method for method in methods if method.verdict == "recommended")
    return [
        _choice(methods, chosen, answer, schedule, trained_length),
        *_evidence(methods, chosen, schedule, answer),
        *_doubt(methods, chosen, answer, schedule),
        *_more_documents(methods, chosen, answer, schedule),
        *_scaling(methods, chosen),
        *_dropped(methods, schedule),
        _cost(chosen),
        *_export(methods, answer, schedule, exportable),
        *_export_differences(answer),
        *_ranges(methods, chosen, answer, schedule, trained_length),
        *(f"Avoid {avoided.label}: {avoided.reason}." for avoided in answer.avoid[:MOST_AVOIDED]),
    ]


def reason_against(evidence: Evidence, chosen: Evidence, window: int | None) -> str | None:
    """The reason against a candidate that attends to ``window`` keys (None: to all); None without one, and where both
    have read one window only."""
    shared = min(len(evidence.nll), len(chosen.nll))
    if shared < LEAST_SHARED:
        return None
    more = float((evidence.nll[:shared] - chosen.nll[:shared]).mean())
    recall, better = float(evidence.recall[:shared].mean()), float(chosen.recall[:shared].mean())
    ratio = f"{finite_exp(more):.3g}"
    times = "that" if ratio == "1" else f"{ratio} times that"
    perplexity = f"its perplexity is {times} of the recommended one, over {shared} windows"
    reads = "" if window is None else f"it attends to {window:,} tokens only"
    if reads and not evidence.recall_counts:
        shows = "" if more > 0 and ratio != "1" else ", which does not show what it forgets"
        return f"{reads}; {perplexity}{shows}"
    if evidence.recall_counts and better - recall > MUCH:
        copied = f"it copies {percent(recall)} of repeated tokens, not {percent(better)}"
        return "; ".join(filter(None, (reads, copied, perplexity)))
    return perplexity if more > MUCH else None


def _choice(
    methods: Sequence[RecommendMethod],
    chosen: RecommendMethod,
    answer: Answer,
    schedule: Schedule,
    trained_length: int,
) -> str:
    where = f"{schedule.target:,} tokens"
    if schedule.target <= trained_length and answer.native_is_enough:
        return f"For {where} keep the model's own encoding: it was trained with {trained_length:,}."
    if answer.native_is_enough:
        keep = f"For {where} keep the model's own encoding"
        if _is_alone(methods, schedule):
            return f"{keep}: there was no other candidate."
        compared = " without a window" if _left_out(methods) else ""
        surely = "surely " if _ahead(methods, answer, schedule) else ""
        return f"{keep}: no candidate{compared} is {surely}better."
    if chosen.window is not None and not answer.recall_counts:
        forgets = f"it attends to {chosen.window:,} tokens only, and forgets the others"
        return f"For {where} use {answer.label} by perplexity alone: {forgets}."
    return f"For {where} use {answer.label}{_or_cheaper(methods, chosen, answer, schedule)}."


def _or_cheaper(methods: Sequence[RecommendMethod], chosen: RecommendMethod, answer: Answer, schedule: Schedule) -> str:
    """The encoding of a policy at the target, if it costs less and is good enough."""
    used = next(method for method in methods if method.label == answer.ranges[-1].label)
    enough = any(at.good_enough for at in used.lengths if at.length == schedule.target)
    if not enough or used.verdict == "reference" or weight_of(used.cost) >= weight_of(chosen.cost):
        return ""
    return f", or {used.label}, which costs less and is within the tolerance"


def _evidence(
    methods: Sequence[RecommendMethod], chosen: RecommendMethod, schedule: Schedule, answer: Answer
) -> Iterator[str]:
    at = {length.length: length for length in chosen.lengths}[schedule.target]
    recall = "recall" if answer.recall_counts else ""
    windows = f"over {at.windows} windows" if at.windows > 1 else "in one window"
    yield f"It has {_numbers(at, recall)} there, {windows}."
    own = {length.length: length for length in methods[0].lengths}
    if schedule.target not in own:
        cannot = "" if answer.target is None else f", or {answer.target} cannot express it there"
        yield f"The model's own encoding ends before that length{cannot}."
    elif chosen is not methods[0]:
        cannot = f", but {answer.target} cannot express it" if methods[0].verdict == "reference" else ""
        yield f"The model's own encoding has {_numbers(own[schedule.target], recall)} there{cannot}."
    if schedule.reference != schedule.target:
        within = _numbers(own[schedule.reference], recall)
        yield f"Within {schedule.reference:,} trained tokens, the model itself has {within}."
        if (plain := answer.ranges[0].label) != methods[0].label:
            of_plain = next(method.lengths for method in methods if method.label == plain)
            better = _numbers({at.length: at for at in of_plain}[schedule.reference], recall)
            yield f"There {plain}, which is plain RoPE, has {better}. So the policy uses it for short requests."
        if answer.keeps_quality is False:
            yield f"So no candidate keeps the quality of {schedule.reference:,} tokens: the recommended one is worse."
    if not answer.recall_counts:
        reference = own[schedule.reference]
        unsure = f"{reference.windows} windows are too few to show whether this model recalls"
        shown = unsure if answer.recall_shown == "unsure" else "This model cannot show recall"
        yield (
            f"{shown}: within {schedule.reference:,} tokens it predicts "
            f"{percent(reference.recall)} of repeated tokens, and {percent(reference.recall_first)} without the repeat."
        )
        if _left_out(methods):
            yield "So perplexity alone decides, and windowed encodings are left out."
        elif any(method.window is not None for method in methods):
            yield "So perplexity alone decides. All candidates are windowed, and it does not show what they forget."
        elif not _is_alone(methods, schedule):
            yield "So perplexity alone decides."


def _is_alone(methods: Sequence[RecommendMethod], schedule: Schedule) -> bool:
    """True if one candidate alone was measured at the target."""
    measured = [method for method in methods for at in method.lengths if at.length == schedule.target]
    return sum(method.verdict != "reference" for method in measured) == 1


def _ahead(methods: Sequence[RecommendMethod], answer: Answer, schedule: Schedule) -> float:
    """The mean loss of the own encoding above that of the next finalist; 0 where another is the answer."""
    above = (at.difference for at in methods[0].lengths if at.length == schedule.target)
    found = next(above, 0.0) if answer.native_is_enough else 0.0
    return found if found > ROUNDING else 0.0


def _left_out(methods: Sequence[RecommendMethod]) -> bool:
    return any(method.verdict == "windowed" for method in methods)


def _numbers(at: AtLength, recall: str) -> str:
    perplexity = f"perplexity {short_number(at.perplexity)}{_ends(at.perplexity_interval, short_number)}"
    if not recall:
        return perplexity
    return f"{perplexity} and {recall} {percent(at.recall)}{_ends(at.recall_interval, percent)}"


def _ends(interval: Interval | None, text: Callable[[float], str]) -> str:
    return "" if interval is None else f" ({text(interval.low)} to {text(interval.high)})"


def _doubt(
    methods: Sequence[RecommendMethod], chosen: RecommendMethod, answer: Answer, schedule: Schedule
) -> Iterator[str]:
    if answer.runner_up is None:
        return
    read = next(at.windows for at in chosen.lengths if at.length == schedule.target)
    few = "One window is too few" if read == 1 else f"{read} windows are too few"
    least = weight_of(chosen.cost)
    cheaper = [method.label for method in methods if method.label in answer.tied and weight_of(method.cost) < least]
    ahead = _ahead(methods, answer, schedule)
    others = [label for label in answer.tied if label not in cheaper and not (ahead and label == answer.runner_up)]
    unsure = [method.label for method in methods if method.verdict == "unsure"]
    if unsure:
        yield f"{listed(unsure)} {_are(unsure)} worse on average, and {read} windows do not separate {_them(unsure)}."
    if ahead:
        less = f"{ahead:.3f} less loss" if answer.recall_counts else f"{percent(1 - math.exp(-ahead))} lower perplexity"
        separate = "one window does" if read == 1 else f"{read} windows do"
        yield f"{answer.runner_up} has {less} on average, and {separate} not separate the two."
    if others:
        yield f"{listed(others)} {_are(others)} as good as far as these windows show, and no cheaper."
    if cheaper:
        costs = "costs" if len(cheaper) == 1 else "cost"
        cheaper_ones = f"{listed(cheaper)}, which {costs} less, {_are(cheaper)}"
        yield f"{few} to show whether {cheaper_ones} good enough."
    if answer.confidence is None:
        yield f"{few} to compare it with the next finalist, {answer.runner_up}."
    elif not answer.tied:
        sure = f"with probability {probability(answer.confidence)}"
        yield f"Over {read} windows it is better than the next finalist, {answer.runner_up}, {sure}."


def _more_documents(
    methods: Sequence[RecommendMethod], chosen: RecommendMethod, answer: Answer, schedule: Schedule
) -> Iterator[str]:
    """The way out of doubt where intervals are over documents."""
    interval = next(at.perplexity_interval for at in chosen.lengths if at.length == schedule.target)
    doubtful = answer.tied or answer.recall_shown == "unsure" or any(method.verdict == "unsure" for method in methods)
    if doubtful and interval is not None and interval.kind == "documents":
        yield "Windows of one document are alike: more documents compare candidates better than more windows."


def _scaling(methods: Sequence[RecommendMethod], chosen: RecommendMethod) -> Iterator[str]:
    """The declared scaling of the checkpoint, where the answer is surely better without it."""
    unscaled, declared = UNSCALED.model_dump(mode="json", exclude_unset=True), methods[0].pe["method"]
    leaves_it_out = unscaled in (chosen.request, chosen.request.get("base"))
    if leaves_it_out and declared != "default" and methods[0].verdict == "worse":
        yield f"The checkpoint declares {declared}, which costs quality on this text; this answer is over plain RoPE."


def _dropped(methods: Sequence[RecommendMethod], schedule: Schedule) -> Iterator[str]:
    """Candidates that left after one window, which may be an odd one; then those that were nearly as good."""
    dropped = [
        (at, method.label)
        for method in methods
        for at in method.lengths
        if method.verdict == "dropped" and at.length == schedule.target
    ]
    count = sum(at.windows == 1 for at, _ in dropped)
    if count:
        were = "candidate was" if count == 1 else "candidates were"
        yield f"{count} {were} dropped after one window: more windows compare candidates better."
    near = [label for at, label in sorted(dropped, key=lambda each: each[0].difference) if at.good_enough]
    if near:
        were = "candidate was" if len(near) == 1 else "candidates were"
        named = f"{'among them ' if len(near) > MOST_NEAR else ''}{listed(near[:MOST_NEAR])}"
        yield f"{len(near)} dropped {were} within the tolerance, {named}: another seed may name one."


def _them(labels: Sequence[str]) -> str:
    return "it" if len(labels) == 1 else "them"


def _are(labels: Sequence[str]) -> str:
    return "is" if len(labels) == 1 else "are"


def _cost(chosen: RecommendMethod) -> str:
    cost = chosen.cost
    attentions = "one attention" if cost.attentions == 1 else f"{cost.attentions} attentions instead of one"
    more = [
        *(["rotates all keys at each read"] if cost.rotated_when_read else []),
        *(["adds a bias to every score"] if cost.bias else []),
    ]
    memory = f"{chosen.memory.tokens:,} cached tokens take {chosen.memory.bytes / (1 << 20):.3g} MiB"
    return f"It computes {attentions} per layer{''.join(f' and {extra}' for extra in more)}; {memory}."


def _export(
    methods: Sequence[RecommendMethod], answer: Answer, schedule: Schedule, exportable: Sequence[str]
) -> Iterator[str]:
    if answer.target is not None:
        yield f"Only candidates that {answer.target} can express were compared."
    if answer.exports_to is None or answer.exports_to:
        return
    losses = {method.label: at.loss for method in methods for at in method.lengths if at.length == schedule.target}
    if not exportable:
        instead = ", nor any other finalist"
    elif answer.exportable is None:
        instead = f"; finalists that one can are to be avoided: {listed(exportable)}"
    else:
        more = losses[answer.exportable] - losses[answer.label]
        systems = listed(answer.exportable_to or [])
        instead = f"; the best finalist that one can is {answer.exportable} ({systems}), with {more:.3f} more loss"
    yield f"No system that Ropeway exports to can express it{instead}."


def _export_differences(answer: Answer) -> Iterator[str]:
    """Equal differences of several systems in one pair of sentences."""
    systems: dict[str, list[str]] = {}
    for system, texts in (answer.export_differences or {}).items():
        systems.setdefault(" ".join(texts), []).append(system)
    for difference, names in systems.items():
        yield f"The export of {answer.exportable} to {listed(names)} is not exact. {difference}"


def _ranges(
    methods: Sequence[RecommendMethod], chosen: RecommendMethod, answer: Answer, schedule: Schedule, trained_length: int
) -> Iterator[str]:
    """The encoding of a policy at the target, where it is not the recommended one."""
    used = answer.ranges[-1].label
    if used == answer.label:
        return
    uses = f"The policy uses {used} at {schedule.target:,} tokens"
    if schedule.target <= trained_length:
        yield f"{uses}, as at every length up to the {trained_length:,} of its training."
        return
    cost = next(method.cost for method in methods if method.label == used)
    why = "it costs less" if weight_of(cost) < weight_of(chosen.cost) else "it is the model's own"
    yield f"{uses}: it is within the tolerance, and {why}."
