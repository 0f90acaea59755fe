"""Pictures of a recommendation: loss and recall of every candidate at the target length."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from service.evaluation.formatting import counted, percent
from service.evaluation.recommend.results import OTHERS, AtLength, RecommendMethod, RecommendResult
from service.evaluation.results import Row, name_of
from service.evaluation.scores import ENDS, Interval, interval_columns
from service.evaluation.statistics.pieces import LEAST
from service.figures.drawing.axes import bar_share_axis, linear_axis
from service.figures.drawing.bars import Bar, add_bars
from service.figures.drawing.charts import new_figure
from service.figures.looks import looks
from service.figures.picture import Picture


class _Measure(NamedTuple):
    """One number of every candidate."""

    name: str
    title: str
    value: Callable[[AtLength], float]
    interval: Callable[[AtLength], Interval | None]
    text: Callable[[float], str]
    caption: str
    judged: bool


WHISKERS = f"Whiskers: 95 %, from {LEAST} windows on, or {LEAST} documents."

_MEASURES = (
    _Measure(
        "difference",
        "Loss above the best",
        lambda at: at.difference,
        lambda at: at.difference_interval,
        lambda loss: f"{loss:+.3f}",
        f"Loss over the windows that both have read; candidates that left early have read fewer. {WHISKERS} {OTHERS}",
        judged=True,
    ),
    _Measure(
        "recall",
        "Recall of repeated tokens",
        lambda at: at.recall,
        lambda at: at.recall_interval,
        percent,
        "Share of the tokens of a repeated segment that the model predicts, over the windows that each has read. "
        f"The recommendation is by loss, so another one may have more recall. {WHISKERS}",
        judged=False,
    ),
)


def recommend_pictures(result: RecommendResult) -> Iterator[Picture]:
    """Bars of the loss above the best, then of recall."""
    for measure in _MEASURES:
        yield _bars(result, measure)


def _bars(result: RecommendResult, measure: _Measure) -> Picture:
    """A bar per candidate, the recommended one first, then by rounds and loss."""
    found = result.ranked()
    bars = [_bar(result, measure, *each) for each in found]
    title = f"{measure.title} at {result.target_length:,} tokens: {result.model}"
    figure = new_figure(title, f"★ recommended · trained length {result.trained_length:,} tokens")
    values = [measure.value(at) for _, at in found]
    if measure.name == "recall":
        axis = bar_share_axis(measure.title)
    else:
        reached = [*values, *(end for bar in bars if bar.interval for end in bar.interval)]
        axis = linear_axis(f"{measure.title}, nats", min(0.0, *reached), 1.1 * max(0.1, *reached))
    add_bars(figure, bars, axis)
    rows: list[Row] = [
        {
            "method": name_of(method, result),
            measure.name: bar.value,
            **interval_columns(measure.interval(at), ENDS),
            "windows": at.windows,
            "verdict": method.verdict,
        }
        for bar, (method, at) in zip(bars, found, strict=True)
    ]
    return Picture(measure.name, title, figure, rows, measure.caption)


def _bar(result: RecommendResult, measure: _Measure, method: RecommendMethod, at: AtLength) -> Bar:
    interval = measure.interval(at)
    value = measure.value(at)
    verdict = f", {method.verdict}" if measure.judged else ""
    return Bar(
        name=name_of(method, result),
        value=value,
        text=f"{measure.text(value)}{verdict} · {counted(at.windows, 'window')}",
        look=looks(result.names())[name_of(method, result)],
        interval=None if interval is None else (interval.low, interval.high),
        best=method.verdict == "recommended",
    )
