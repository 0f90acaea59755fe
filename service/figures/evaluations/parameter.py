"""Scores against a parameter, where several encodings differ in it alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from patches import METHODS, from_text, set_apart, to_shorthand
from service.evaluation.results import EvaluationResult, MethodInResult, Row, name_of
from service.evaluation.scores import ENDS, Scores, interval_columns
from service.figures.drawing.axes import beyond, linear_axis, log_axis, share_axis, spread, value_axis
from service.figures.drawing.charts import new_figure, note
from service.figures.drawing.curves import INTERVALS, Curve, add_curves
from service.figures.picture import Picture

LEAST = 3
"""Values of a parameter that make a picture."""
WIDE = 4
"""Ratio of the largest value to the least one from which on the axis is logarithmic: factors double."""
MOST_LINES, MOST_TICKS = 10, 10
MOST_PICTURES = 8
"""Of a result or a part of a sweep: a grid of values has many families."""

Path = tuple[str, ...]
"""Names of a field and of those that it lies in: ("base", "factor")."""


class Family(NamedTuple):
    """Encodings that are alike but for ``parameter``: their indices by its value, ascending. ``others`` is the rest of
    each, in short form and with its model."""

    parameter: str
    others: str
    members: dict[float, int]


def parameter_pictures(result: EvaluationResult) -> Iterator[Picture]:
    """A picture per family of encodings of a result with scores. A name begins with the number of a sweep's part."""
    parts = result.parts()
    for index, part in enumerate(parts):
        if part.overview() is not None:
            continue
        names: dict[str, int] = {}
        for family in families(part):
            names[family.parameter] = count = names.get(family.parameter, 0) + 1
            name = f"by-{family.parameter}" + (f"-{count}" if count > 1 else "")
            if (picture := _picture(part, family, f"{index + 1}-{name}" if part is not result else name)) is not None:
                yield picture


def families(result: EvaluationResult) -> list[Family]:
    """At most ``MOST_PICTURES`` families of at least ``LEAST`` values, the largest first."""
    asked = {index: fields for index, method in enumerate(result.methods) if (fields := _asked(method)) is not None}
    varied = dict.fromkeys((f["method"], path) for f in asked.values() for path, value in _numbers(f))
    found: dict[tuple[str, str], dict[float, int]] = {}
    for index, fields in asked.items():
        method = result.methods[index]
        for name, path in varied:
            value = _value(fields, path, method) if fields["method"] == name else None
            if value is not None:
                others = to_shorthand(_without(fields, path))
                others = others if method.model == result.model else f"{others} on {method.model}"
                found.setdefault((".".join(path), others), {}).setdefault(value, index)
    largest = sorted(found.items(), key=lambda each: -len(each[1]))[:MOST_PICTURES]
    return [
        Family(parameter, others, dict(sorted(members.items())))
        for (parameter, others), members in largest
        if len(members) >= LEAST
    ]


def _picture(result: EvaluationResult, family: Family, name: str) -> Picture | None:
    """A line per length; None where no score was measured."""
    scores = result.scores()
    lengths = spread(scores.lengths(), MOST_LINES)
    curves = [curve for length in lengths if (curve := _curve(scores, family, length)).x]
    if not curves:
        return None
    known = [curve.known for curve in curves]
    title, y, beyond_it = f"{scores.title} by {family.parameter}: {result.model}", share_axis(scores.measure), ""
    if scores.lower_is_better:
        y = value_axis(scores.measure, known, [curve.ends for curve in curves])
        beyond_it = beyond(known, y)
    figure = new_figure(title, f"{family.others}, all other parameters equal{beyond_it}")
    x = _axis(family.parameter, list(family.members))
    figure.update_layout(xaxis=x, yaxis=y, showlegend=True, legend_title_text=scores.by)
    add_curves(figure, curves, "one value has a score")
    if len(lengths) < len(scores.lengths()):
        note(figure, f"{len(lengths)} of {len(scores.lengths())} lengths are drawn")
    better = "Lower" if scores.lower_is_better else "Higher"
    caption = f"{better} is better. The encodings differ in {family.parameter} alone. {INTERVALS}"
    return Picture(name, title, figure, _rows(result, family, scores), caption)


def _curve(scores: Scores, family: Family, length: int) -> Curve:
    """The scores at ``length``, or at this distance, by the value of the parameter."""
    found = [(value, scores.by_method[index].get(length)) for value, index in family.members.items()]
    points = [(value, score.value, score.interval, "") for value, score in found if score is not None]
    return Curve.through(f"{length:,} tokens", points, scores.text)


def _axis(title: str, values: Sequence[float]) -> dict[str, Any]:
    """Logarithmic over a wide range; ``values`` ascend."""
    low, high = values[0], values[-1]
    ticks = spread(values, MOST_TICKS)
    if low > 0 and high / low >= WIDE:
        margin = (high / low) ** 0.04
        return log_axis(f"{title}, logarithmic", low / margin, high * margin, ticks=ticks)
    margin = 0.04 * (high - low)
    return linear_axis(title, low - margin, high + margin, ticks=ticks)


def _rows(result: EvaluationResult, family: Family, scores: Scores) -> list[Row]:
    return [
        {
            "method": name_of(result.methods[index], result),
            "parameter": family.parameter,
            "parameter_value": value,
            "length": length,
            "value": score.value,
            **interval_columns(score.interval, ENDS),
        }
        for value, index in family.members.items()
        for length, score in scores.by_method[index].items()
    ]


def _asked(method: MethodInResult) -> dict[str, Any] | None:
    """The request fields that the label names; None for ``auto``, and for a name that is no encoding."""
    try:
        return from_text(method.label)
    except ValueError:
        return None


def _numbers(fields: Mapping[str, Any], above: Path = ()) -> Iterator[tuple[Path, float]]:
    """Every number among the fields, and among those of encodings inside."""
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, (*above, name))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield (*above, name), float(value)


def _value(fields: Mapping[str, Any], path: Path, method: MethodInResult) -> float | None:
    """The number at ``path``. Labels leave out defaults: these are in the ``pe`` that took effect."""
    numbers = dict(_numbers(fields))
    if path in numbers or method.pe.get("method") != fields["method"]:
        return numbers.get(path)
    chosen, _ = set_apart(method.pe, METHODS[fields["method"]].model_fields)
    return dict(_numbers(chosen)).get(path)


def _without(fields: Mapping[str, Any], path: Path) -> dict[str, Any]:
    first, *rest = path
    if not rest:
        return {name: value for name, value in fields.items() if name != first}
    return {**fields, first: _without(fields[first], tuple(rest))} if first in fields else dict(fields)
