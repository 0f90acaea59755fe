"""docs/methods.md and its pictures are what the registry says."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
import pytest

from patches import METHODS
from service.docs.methods import PICTURES, TEMPERATURES, methods_page, temperatures_figure
from service.docs.pages import write_docs
from service.figures.drawing.raster import svg
from service.figures.encodings.methods import method_figure
from service.figures.encodings.samples import HEADS, TRAINED, plain, sample, samples
from tests.conftest import ROOT
from tests.service.docs.drawings import assert_current

DOCS = ROOT / "docs"
PAGE = (DOCS / "methods.md").read_text(encoding="utf-8")
FILES = {path.stem: path for path in (DOCS / PICTURES).iterdir()}


def figure(name: str) -> go.Figure:
    return temperatures_figure() if name == TEMPERATURES else method_figure(sample(name), name)


def test_the_page_is_the_registrys() -> None:
    """Regenerate with: ropeway methods --docs docs"""
    assert methods_page() == PAGE


def test_every_method_has_its_section_and_its_picture() -> None:
    assert sorted(re.findall(r"^### `(\w+)`$", PAGE, re.M)) == sorted(METHODS)
    assert set(FILES) == {*METHODS, TEMPERATURES}
    assert sorted(re.findall(rf"\]\({PICTURES}/([\w-]+)\.svg\)", PAGE)) == sorted(FILES)
    assert sum(path.stat().st_size for path in FILES.values()) < 1_600_000


DEFINES = r"\b{0}(_\w)? (=|the|has|are|from|rises|and \S+ are)|\b{0}, \w and \w are|= \w+ L0 \+ {0}\b"


def test_every_symbol_of_a_formula_is_defined() -> None:
    """In the introduction of the page, or in the formula itself. An x between two blanks multiplies."""
    introduction = PAGE.partition("\nL0 is")[2].partition("Pictures")[0]
    known = set(re.findall(r"\b[A-Za-z](?=\b|_)", introduction)) - {"a", "A"}
    for name, method in METHODS.items():
        symbols = set(re.findall(r"\b([A-Za-z])(?:\b|_\w\b)", method.formula.replace(" x ", " "))) - known
        undefined = [one for one in symbols if not re.search(DEFINES.format(one), method.formula)]
        assert undefined == [], name
    assert {"n", "s", "p"} <= set(re.findall(r"\w+", introduction))


def test_anchors_are_unique() -> None:
    headings = re.findall(r"^#+ (.*)$", PAGE, re.M)
    assert len(headings) == len(set(headings))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FILES))
def test_pictures_are_the_registrys(name: str) -> None:
    """Regenerate with: ropeway methods --docs docs"""
    assert_current(FILES[name], figure(name))


@pytest.mark.parametrize("name", ["yarn", "streaming"])
def test_the_same_picture_is_the_same_text(name: str) -> None:
    assert svg(figure(name)) == svg(figure(name))


def test_writes_the_pages_and_the_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.docs.methods.pictures", lambda: iter([("yarn", "<svg/>")]))
    monkeypatch.setattr("service.docs.primer.files", lambda: iter([("primer.md", "# A"), ("primer/b.svg", "<svg/>")]))
    written = write_docs(tmp_path / "new")
    names = [path.relative_to(tmp_path / "new").as_posix() for path in written]
    assert names == ["methods.md", "methods/yarn.svg", "export.md", "primer.md", "primer/b.svg"]
    assert written[0].read_text(encoding="utf-8") == PAGE
    assert written[1].read_text(encoding="utf-8") == "<svg/>"


def test_a_picture_that_another_processor_rounds_differently_remains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("export", "primer"):
        monkeypatch.setattr(f"service.docs.{name}.files", lambda: iter([]))
    kept = "<svg>236.510755</svg>"
    for drawn in (kept, "<svg>236.510754</svg>", "<svg>240.510755</svg>"):
        monkeypatch.setattr("service.docs.methods.files", lambda drawn=drawn: iter([("a.svg", drawn)]))
        (path,) = write_docs(tmp_path)
        assert path.read_text(encoding="utf-8") == (drawn if "240" in drawn else kept)


def test_groups_are_told_from_the_parts() -> None:
    expected = {
        "yarn": "frequency schedule",
        "clipped_rope": "frequency schedule",
        "self_extend": "position map",
        "dual_chunk": "position map",
        "streaming": "mask",
        "lm_infinite": "mask",
        "alibi": "bias",
        "t5_bias": "bias",
        "shaw": "relative vectors",
        "learned": "absolute",
        "sinusoidal_interpolation": "absolute",
        "drope": "none",
    }
    assert {name: sample(name).group for name in expected} == expected


def test_what_is_drawn_differs_from_plain_rope() -> None:
    same = [drawn.name for drawn in samples() if drawn.resolved == plain()]
    assert same == ["default"]
    still = [drawn.name for drawn in samples() if drawn.resolved.recipe == sample("none").resolved.recipe]
    assert still == ["none", "learned", "sinusoidal"]  # the latter two add what the model itself adds


def test_values_are_given_only_where_there_is_no_default() -> None:
    assert sample("self_extend").fields == {"method": "self_extend"}
    assert sample("llama3").fields == {"method": "llama3"}
    assert sample("yarn").fields == {"method": "yarn", "factor": 4.0}
    assert sample("proportional").fields == {"method": "proportional", "partial_rotary_factor": 0.75}


def lines(name: str) -> list[list[float]]:
    """y of the lines of a picture, its panels in order."""
    return [np.array(trace.y, dtype=float).tolist() for trace in figure(name).data if trace.type == "scatter"]


class TestFigures:
    """Numbers in the panels."""

    def test_position_maps(self) -> None:
        cells, _, line = figure("rerope").data
        shown = np.array(cells.z, dtype=float)
        assert shown.shape == (128, 128)
        assert shown[-1, 0] == TRAINED // 4
        assert np.isnan(shown[0, -1])
        assert max(line.y) == TRAINED // 4
        assert line.y[-1] == 0

    def test_masks(self) -> None:
        cells, _, line = figure("lm_infinite").data
        shown = np.array(cells.z, dtype=float)
        assert np.isnan(shown[-1, 64])
        assert shown[-1, 0] == TRAINED
        assert None in line.y

    def test_biases(self) -> None:
        assert [line[-1] for line in lines("alibi")] == [-1023 / 2**k for k in range(1, HEADS + 1)]

    def test_absolute_positions(self) -> None:
        (read,) = lines("learned_interpolation")
        assert read[-1] == (4 * TRAINED - 1) / 4

    def test_temperatures(self) -> None:
        assert lines("drope")[0][0] == pytest.approx(1 + 0.41 * math.log(4))
        every = {trace.name: trace.y for trace in temperatures_figure().data}
        assert every["constant multiplier 1.5"][-1] == 1.5
        assert every["log_n"][-1] == pytest.approx(1.25)
        assert every["yarn factor 4"][-1] == pytest.approx((0.1 * math.log(4) + 1) ** 2)
