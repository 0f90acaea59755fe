"""The experiments as line charts, by the project's own figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from service.figures.drawing.axes import linear_axis, log_axis, share_axis
from service.figures.drawing.charts import new_figure
from service.figures.drawing.curves import Curve, add_curves
from service.figures.drawing.raster import png

HEIGHT = 400
NAMES = {"affinity": "affinity", "least_of_two": "least of two", "random": "random"}


@dataclass(frozen=True)
class Chart:
    """One chart over rows: a line for each value of ``by``, ``y`` over ``x``. ``y_axis`` is its layout."""

    title: str
    subtitle: str
    x: str
    y: str
    by: str
    x_axis: dict[str, Any]
    y_axis: dict[str, Any]

    def png(self, rows: Sequence[dict[str, Any]]) -> bytes:
        """The chart as PNG."""
        figure = new_figure(self.title, self.subtitle, height=HEIGHT)
        figure.update_xaxes(**self.x_axis)
        figure.update_yaxes(**self.y_axis)
        curves = []
        for value in dict.fromkeys(row[self.by] for row in rows):
            line = [row for row in rows if row[self.by] == value]
            name = NAMES.get(value) or f"{value:g} s"
            curves.append(Curve(name, [row[self.x] for row in line], [row[self.y] for row in line]))
        add_curves(figure, curves)
        return png(figure)


def counts(title: str, values: Sequence[float]) -> dict[str, Any]:
    """Logarithmic axis over ``values``, with a tick at each of them."""
    return log_axis(title, min(values) / 1.2, max(values) * 1.2, ticks=sorted(set(values)))


def seconds(title: str, rows: Sequence[dict[str, Any]], y: str) -> dict[str, Any]:
    """Logarithmic axis over the values of ``y``."""
    values = [row[y] for row in rows]
    return log_axis(title, min(values) / 1.2, max(values) * 1.2)


def linear(title: str, rows: Sequence[dict[str, Any]], key: str) -> dict[str, Any]:
    """Linear axis over the values of ``key``, with 0 on it."""
    values = [row[key] for row in rows]
    return linear_axis(title, min(0.0, *values), 1.05 * max(values))


SHARE = share_axis("requests with a cached prefix")
