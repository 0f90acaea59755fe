"""The answer of a search in sentences, made from its numbers alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from service.evaluation.formatting import listed, short_number
from service.evaluation.scores import Interval
from service.evaluation.search.results import Generation, HeldOut, SearchMethod


def sentences(
    methods: Sequence[SearchMethod], generations: Sequence[Generation], length: int, windows: int, *, is_plain: bool
) -> list[str]:
    """The best encoding, the doubt about it, the course of the search and the use of its factors. ``methods`` begin
    with what was found; ``windows`` are the held-out ones. ``is_plain``: the model's own encoding is plain RoPE."""
    found, *others = methods
    return [
        *(_without_held_out(found, others, length) if found.held_out is None else _best(methods, length, windows)),
        *_sure(others),
        _course(generations),
        *_use(found.request["attention_factor"], is_plain=is_plain),
    ]


def _use(attention: float, *, is_plain: bool) -> Iterator[str]:
    """``attention`` is the factor on cos and sin."""
    yield f"The field `pe` of the JSON has the factors that were found, and {attention:.4g} on cos and sin."
    if attention != 1:
        yield "Up to the trained length, use the model's own encoding: the factor on cos and sin applies there too."
    elif is_plain:
        yield "Up to the trained length, it is plain RoPE."
    else:
        yield "Up to the trained length, it is plain RoPE: use the model's own encoding, which is not."


def _without_held_out(found: SearchMethod, others: Sequence[SearchMethod], length: int) -> Iterator[str]:
    best = min(others, key=lambda method: method.search_loss)
    yield (
        f"For {length:,} tokens, the factors so far have a loss of {found.search_loss:.4f} on the search's windows. "
        f"{best.label}, the best of the others, has {best.search_loss:.4f}."
    )
    yield "No held-out window was read: factors look better on the windows that they were chosen by."


def _best(methods: Sequence[SearchMethod], length: int, windows: int) -> Iterator[str]:
    (_, own), *others = [(method, method.held_out) for method in methods if method.held_out is not None]
    best, at = min(others, key=lambda each: each[1].perplexity)
    where = f"on {windows} held-out windows of {length:,} tokens"
    if own.perplexity < at.perplexity:
        yield f"The factors of this search are best {where}: perplexity {short_number(own.perplexity)}."
        yield f"{best.label}, the next, has {_times(at)} the perplexity."
    else:
        yield f"{best.label} is best {where}: perplexity {short_number(at.perplexity)}."
        yield f"The search did not beat it. It has {_times(at)} the perplexity of the factors that were found."


def _times(at: HeldOut) -> str:
    interval = at.times_search_interval
    ends = "" if interval is None else f" (95 % interval {interval.low:.3f} to {interval.high:.3f})"
    return f"{at.times_search:.3f} times{ends}"


def surely_beaten(others: Sequence[SearchMethod]) -> list[SearchMethod]:
    """Those with a higher perplexity than the search by the whole interval of the ratio."""
    return [method for method, interval in _intervals(others) if interval.low > 1]


def surely_better(others: Sequence[SearchMethod]) -> list[SearchMethod]:
    """Those with a lower one by the whole interval."""
    return [method for method, interval in _intervals(others) if interval.high < 1]


def _intervals(others: Sequence[SearchMethod]) -> Iterator[tuple[SearchMethod, Interval]]:
    for method in others:
        if method.held_out is not None and method.held_out.times_search_interval is not None:
            yield method, method.held_out.times_search_interval


def _sure(others: Sequence[SearchMethod]) -> Iterator[str]:
    if others[0].held_out is None:
        return
    beaten, better = ([method.label for method in found] for found in (surely_beaten(others), surely_better(others)))
    doubtful = [method.label for method in others if method.label not in (*beaten, *better)]
    if beaten:
        yield f"By 95 % intervals of these ratios, the search surely beats {listed(beaten)}."
    if doubtful:
        yield f"The search does not surely beat {listed(doubtful)}: the intervals have 1."
    if better:
        yield f"The search is surely worse than {listed(better)}."


def _course(generations: Sequence[Generation]) -> str:
    count = sum(generation.candidates for generation in generations)
    many = "1 generation" if len(generations) == 1 else f"{len(generations)} generations"
    first, last = generations[0].best, generations[-1].best
    return f"{count} candidates in {many} took the loss on the search's own windows from {first:.4f} to {last:.4f}."
