"""The picture of the toy evaluation."""

# ruff: noqa: TID252 - the test copies this folder into the service
from __future__ import annotations

from service.figures.drawing.charts import new_figure
from service.figures.picture import Picture

from .results import LastTokenResult


def pictures(result: LastTokenResult) -> list[Picture]:
    figure = new_figure("NLL of the last token", result.model)
    for method in result.methods:
        figure.add_scatter(x=list(method.nll), y=list(method.nll.values()), name=method.label)
    return [Picture("last-token", "NLL of the last token", figure, result.rows())]
