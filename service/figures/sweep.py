"""What every method of a sweep scores at the target length."""

from __future__ import annotations

from collections.abc import Sequence

from service.evaluation.perplexity.tables import short_number
from service.evaluation.results import Row, name_of
from service.evaluation.sweep.results import Judgement, SweepResult
from service.figures.axes import linear_axis, log_axis, percent
from service.figures.charts import Bars, add_bars, new_figure
from service.figures.picture import Picture
from service.figures.style import FAINT

WIDE = 4.0
"""Values that differ by more than this factor stand on a logarithmic axis."""


def target_picture(result: SweepResult, index: int) -> Picture:
    """A bar per method for one part, with its interval and the limit of what is good enough."""
    judged = [(method, at) for method in result.methods for at in method.judgements if at.evaluation == index]
    first, part = judged[0][1], result.evaluations[index]
    title = f"{first.measure[:1].upper()}{first.measure[1:]} at {result.target_length:,} tokens: {result.model}"
    share = part.evaluation not in ("perplexity", "long_perplexity")
    limit = "" if first.limit is None else f"dotted: limit of good enough, {_text(first.limit, share)} · "
    figure = new_figure(title, f"{limit}trained length {result.trained_length:,} tokens")
    values = [at.value for _, at in judged]
    names = [name_of(method, result) for method, _ in judged]
    intervals = [(at.interval.low, at.interval.high) if at.interval else None for _, at in judged]
    shown = [value for value in (*values, first.limit) if value is not None]
    ends = [end for interval in intervals if interval for end in interval]
    axis = _axis(first.measure, shown, ends, share)
    add_bars(figure, Bars(names, values, [_verdict(at, share) for _, at in judged], intervals), axis)
    if first.limit is not None:
        figure.add_vline(x=first.limit, line={"color": FAINT, "dash": "dot", "width": 1.6})
    rows: list[Row] = [
        {
            "method": name,
            "value": at.value,
            "interval_low": interval[0] if interval else None,
            "interval_high": interval[1] if interval else None,
            "limit": at.limit,
            "adequate": at.adequate,
            "sure": at.sure,
            "rank": at.rank,
        }
        for name, interval, (_, at) in zip(names, intervals, judged, strict=True)
    ]
    better = "Right" if share else "Left"
    caption = f"{better} of the dotted line is good enough. Whiskers: 95 % intervals."
    return Picture(f"target-{index + 1}", title, figure, rows, caption)


def _axis(title: str, shown: Sequence[float], ends: Sequence[float], share: bool) -> dict[str, object]:
    """Over all of ``shown``; ``ends`` of intervals may widen it by a factor of two."""
    known = [*shown, *(min(max(end, min(shown) / 2), 2 * max(shown)) for end in ends)]
    if share:
        return {**linear_axis(title, 0, 1.05, ticks=[0, 0.5, 1]), "ticktext": ["0 %", "50 %", "100 %"]}
    if known and max(known) > WIDE * min(known):
        return log_axis(f"{title} (logarithmic)", min(known) / 1.5, max(known) * 1.3)
    return linear_axis(title, 0, 1.15 * max(known, default=1.0))


def _verdict(at: Judgement, share: bool) -> str:
    if at.value is None:
        return "nothing to measure"
    text = _text(at.value, share)
    if at.adequate is None:
        return text
    return f"{text}, {'good enough' if at.adequate else 'not enough'}{'' if at.sure else '?'}"


def _text(value: float, share: bool) -> str:
    return percent(value) if share else short_number(value)
