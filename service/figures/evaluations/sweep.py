"""Pictures of a sweep: every method at the target length, then the pictures of each part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from service.evaluation.catalogue import EVALUATIONS
from service.evaluation.results import Row, name_of
from service.evaluation.scores import ENDS, Scores, interval_columns
from service.evaluation.statistics.separation import verdict_note
from service.evaluation.sweep.results import Judgement, SweepResult
from service.figures.drawing.axes import bar_share_axis, log_axis
from service.figures.drawing.bars import Bar, add_bars
from service.figures.drawing.charts import SUBTITLE, new_figure, note
from service.figures.drawing.style import FAINT
from service.figures.looks import looks
from service.figures.picture import Picture


def sweep_pictures(result: SweepResult) -> Iterator[Picture]:
    """Bars of every part at the target length, then the pictures of each part."""
    for index in range(len(result.evaluations)):
        yield target_picture(result, index)
    for index, part in enumerate(result.evaluations):
        for picture in EVALUATIONS[part.evaluation].pictures(part):
            yield replace(picture, name=f"{index + 1}-{picture.name}")


def target_picture(result: SweepResult, index: int) -> Picture:
    """A bar per method for one part, with its interval and the limit of what is good enough. The best is on top."""
    judged = [(method, at) for method in result.methods for at in method.judgements if at.evaluation == index]
    look = looks(result.names())
    first, scores = judged[0][1], result.evaluations[index].scores()
    title = f"{scores.title} at {result.target_length:,} tokens: {result.model}"
    share = not scores.lower_is_better
    judged.sort(key=lambda found: _order(found[1], share))
    values = [at.value for _, at in judged]
    best = values[0] if len(set(values)) > 1 else None
    names = [name_of(method, result) for method, _ in judged]
    intervals = [(at.interval.low, at.interval.high) if at.interval else None for _, at in judged]
    bars = [
        Bar(name, at.value, _verdict(at, scores), look[name], interval, best=at.value is not None and at.value == best)
        for name, interval, (_, at) in zip(names, intervals, judged, strict=True)
    ]
    limit = [] if first.limit is None else [f"dotted: limit of good enough, {scores.text(first.limit)}"]
    star = [] if best is None else ["★ best"]
    about = {"by_ratio": any(at.by_ratio for _, at in judged), "doubtful": any(at.is_doubtful for _, at in judged)}
    facts, trained = [*star, *limit], f"trained length {result.trained_length:,} tokens"
    whole, short = (
        " · ".join(filter(None, [*facts, verdict_note(**about, short=is_short), trained])) for is_short in (False, True)
    )
    figure = new_figure(title, whole if len(whole) <= SUBTITLE else short)
    shown = [value for value in (*values, first.limit) if value is not None]
    ends = [end for interval in intervals if interval for end in interval]
    add_bars(figure, bars, _axis(first.measure, shown, ends, share))
    if first.limit is not None:
        figure.add_vline(x=first.limit, line={"color": FAINT, "dash": "dot", "width": 1.6})
    rows: list[Row] = [
        {
            "method": name,
            "value": at.value,
            **interval_columns(at.interval, ENDS),
            "limit": at.limit,
            "adequate": at.adequate,
            "sure": at.sure,
            "rank": at.rank,
        }
        for name, (_, at) in zip(names, judged, strict=True)
    ]
    if share and not any(values):
        note(figure, "nothing was found at this length")
    start = "nothing found" if share else "a perfect prediction"
    enough = f" Good enough is {'right' if share else 'left'} of the dotted line." if limit else ""
    verdicts = verdict_note(**about)
    caption = f"Bars begin at {start}.{enough} Whiskers: 95 % intervals.{verdicts and f' {verdicts}.'}"
    return Picture(f"target-{index + 1}", title, figure, rows, caption)


def _order(at: Judgement, share: bool) -> tuple[bool, float]:
    """The best first, those without a number last."""
    return at.value is None, (-(at.value or 0.0) if share else at.value or 0.0)


def _axis(title: str, shown: Sequence[float], ends: Sequence[float], share: bool) -> dict[str, object]:
    """From 0, or for perplexities from 1, where a length of a bar is NLL; ``ends`` of intervals may widen it by a
    factor of two."""
    known = [*shown, *(min(max(end, min(shown) / 2), 2 * max(shown)) for end in ends)]
    if share:
        return bar_share_axis(title)
    return log_axis(f"{title}, logarithmic", 1.0, 1.3 * max(known, default=1.0))


def _verdict(at: Judgement, scores: Scores) -> str:
    if at.value is None:
        return "nothing to measure"
    text = scores.text(at.value)
    if at.adequate is None:
        return text
    if at.is_reference:
        return f"{text}, the reference"
    return f"{text}, {'good enough' if at.adequate else 'not enough'}{'?' if at.is_doubtful else ''}"
