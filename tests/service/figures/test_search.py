"""Pictures of a search."""

from __future__ import annotations

import pytest

from service.figures.evaluations.search import loss_picture
from tests.service.figures.examples import pictures, search


def test_losses_beside_the_search_have_level_lines_and_numbers() -> None:
    picture = pictures("search")[0]
    lines = {trace.name: list(trace.y) for trace in picture.figure.data}
    assert lines["search: 1.8000"] == pytest.approx([1.86, 1.83, 1.8])
    others = [method for method in search().methods if method.label != "search"]
    assert [values for name, values in lines.items() if not name.startswith("search")] == [
        [method.search_loss] * 3 for method in others
    ]
    assert {row["method"] for row in picture.rows} == {method.label for method in search().methods}


def test_an_encoding_far_above_the_search_leaves_the_axis_and_is_named() -> None:
    result = search()
    near = loss_picture(result)
    assert "above the axis" not in near.subtitle
    result.methods[2].search_loss = 90.0
    far = loss_picture(result)
    assert f"above the axis: {result.methods[2].label}" in far.subtitle
    assert far.figure.layout.yaxis.range[1] < 10
    assert far.figure.layout.yaxis.range[0] < 1.8


def test_factors_are_drawn_of_encodings_that_have_some() -> None:
    picture = pictures("search")[1]
    expected = {method.label: method.factors for method in search().methods if method.factors is not None}
    assert len(expected) < len(search().methods)
    assert [list(trace.y) for trace in picture.figure.data] == [*list(expected.values())[1:], expected["search"]]
    assert {(row["method"], row["pair"]): row["factor"] for row in picture.rows} == {
        (label, pair): factor for label, factors in expected.items() for pair, factor in enumerate(factors)
    }
