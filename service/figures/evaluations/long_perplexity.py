"""Perplexity by context length: of the tokens that need long context, and of all tokens."""

from __future__ import annotations

from collections.abc import Callable

from service.evaluation.formatting import short_number
from service.evaluation.long_perplexity.results import LongLengthResult, LongMethodResult, LongPerplexityResult
from service.evaluation.results import Row, documents_text, name_of
from service.evaluation.scores import ENDS, interval_columns
from service.evaluation.statistics.separation import ratio_note
from service.figures.drawing.axes import beyond, token_axis, value_axis
from service.figures.drawing.charts import mark_trained, new_figure, note
from service.figures.drawing.curves import INTERVALS, Curve, add_curves
from service.figures.looks import looks
from service.figures.picture import Picture

NO_KEY_TOKEN = "no scored token needs long context: shown is the perplexity over all scored tokens"

Value = Callable[[LongLengthResult], float | None]


def long_perplexity_pictures(result: LongPerplexityResult) -> list[Picture]:
    """Long perplexity if any was measured, then perplexity over all scored tokens."""
    key = result.evaluator
    by_ratio = ratio_note(result.scores())
    chosen = f"key tokens chosen by {name_of(key, result)}: context {key.long_context:,} against {key.short_context:,}"
    pictures = [
        _picture(
            result,
            ("long-perplexity", "Long perplexity by context length", f"{chosen} · {documents_text(result.documents)}"),
            lambda at: at.long_perplexity,
            " ".join(
                [
                    "Only over tokens that a model predicts clearly better with long context than with short: "
                    f"{key.key_tokens:,} of {key.tokens:,}, each length those below it. Lower is better.",
                    INTERVALS,
                    *([f"{by_ratio}."] if by_ratio else []),
                    *result.cautions(),
                ]
            ),
        ),
        _picture(
            result,
            ("perplexity", "Perplexity over all scored tokens", documents_text(result.documents)),
            lambda at: at.perplexity,
            "For contrast: most tokens need only a little context, so this shows less about long context.",
        ),
    ]
    shown = [picture for picture in pictures if picture is not None]
    if not any(result.key_tokens().values()):
        note(shown[0].figure, NO_KEY_TOKEN)
    return shown


def _picture(result: LongPerplexityResult, titles: tuple[str, str, str], value: Value, caption: str) -> Picture | None:
    name, title, subtitle = titles
    curves = [_curve(method, result, value, name == "long-perplexity") for method in result.methods]
    if not any(curve.known for curve in curves):
        return None
    title = f"{title}: {result.model}"
    known = [curve.known for curve in curves]
    x = token_axis("context length, tokens", result.lengths, result.trained_length)
    if name == "long-perplexity":
        counts = result.key_tokens()
        x["ticktext"] = [_tick_text(int(length), counts.get(int(length))) for length in x["tickvals"]]
    y = value_axis(name.replace("-", " "), known, [curve.ends for curve in curves])
    figure = new_figure(title, subtitle + beyond(known, y))
    last = max(length for curve in curves for length in curve.x)
    figure.update_layout(xaxis=x, yaxis=y, showlegend=True, legend_title_text=f"at {last:,} tokens")
    mark_trained(figure, result.trained_length, x)
    measured = len(result.lengths) == 1 or name == "perplexity"
    one = "one length was measured" if measured else "there are key tokens at one length only"
    add_curves(figure, curves, one, end=short_number, looks=looks(result.names()))
    rows: list[Row] = [
        {
            "method": name_of(method, result),
            "length": at.length,
            "value": value(at),
            **interval_columns(at.interval, ENDS),
            "key_tokens": at.key_tokens,
            "tokens_scored": at.tokens_scored,
        }
        for method in result.methods
        for at in method.lengths
    ]
    if name == "perplexity":
        rows = [{key: row[key] for key in ("method", "length", "value", "tokens_scored")} for row in rows]
    return Picture(name, title, figure, rows, caption)


def _tick_text(length: int, key_tokens: int | None) -> str:
    """The length, and below it the number of its key tokens."""
    return f"{length:,}" if key_tokens is None else f"{length:,}<br>{key_tokens:,} key"


def _curve(method: LongMethodResult, result: LongPerplexityResult, value: Value, with_intervals: bool) -> Curve:
    points = [
        (at.length, y, at.interval if with_intervals else None, f"{at.key_tokens:,} key tokens of {at.tokens_scored:,}")
        for at in method.lengths
        if (y := value(at)) is not None
    ]
    return Curve.through(name_of(method, result), points, short_number)
