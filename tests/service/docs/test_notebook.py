"""The notebook runs, and the outputs in the file are those of its code."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from tests.conftest import ROOT
from tests.forks.process import forked
from tests.notebook import executed, rewrite
from tests.prose import fault, sentences

NOTEBOOK = ROOT / "docs" / "notebook.ipynb"
NUMBER = re.compile(r"\d+\.\d+")
LARGEST = 400_000
"""Bytes of the file with its pictures."""


def cells(notebook: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == kind]


def stored() -> dict[str, Any]:
    notebook: dict[str, Any] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return notebook


def texts(notebook: dict[str, Any]) -> Iterator[str]:
    """Text of every output, in order."""
    for cell in cells(notebook, "code"):
        for output in cell["outputs"]:
            yield "".join(output.get("text") or output["data"]["text/plain"])


def pictures(notebook: dict[str, Any]) -> list[bytes]:
    outputs = [output for cell in cells(notebook, "code") for output in cell["outputs"]]
    encoded = [output["data"]["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    return [base64.b64decode(picture) for picture in encoded]


def test_the_execution_itself() -> None:
    def code(*source: str) -> dict[str, Any]:
        return {"cell_type": "code", "source": list(source), "outputs": [], "execution_count": None}

    made = executed({"cells": [code("x = 1\n", "print(x)\n", "x + 1"), code("x;"), code("def f():\n", "    return x")]})
    printed, result = made["cells"][0]["outputs"]
    assert (printed["text"], result["data"]) == (["1\n"], {"text/plain": ["2"]})
    assert [cell["outputs"] for cell in made["cells"][1:]] == [[], []]
    assert [cell["execution_count"] for cell in made["cells"]] == [1, 2, 3]
    drawn = code("class Drawn:\n", "    def _repr_png_(self):\n", "        return b'png'\n", "Drawn()")
    assert pictures(executed({"cells": [drawn]})) == [b"png"]
    with pytest.raises(NameError):
        executed({"cells": [code("y")]})


def test_it_is_stored_with_its_outputs() -> None:
    notebook = stored()
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    code = cells(notebook, "code")
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert all(cell["outputs"] for cell in code[1:]), "the first cell loads the model"
    assert NOTEBOOK.stat().st_size < LARGEST
    for picture in pictures(notebook):
        assert imread(io.BytesIO(picture)).std() > 0.01, "an empty picture"
    assert pictures(notebook)


def test_its_prose_is_plain() -> None:
    for cell in cells(stored(), "markdown"):
        assert [found for sentence in sentences("".join(cell["source"])) if (found := fault(sentence))] == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_it_runs_and_its_outputs_are_current(tmp_path: Path) -> None:
    """``python -m tests.notebook docs/notebook.ipynb`` writes them again."""
    pytest.importorskip("peft")
    ran = forked(rewrite, NOTEBOOK, tmp_path / "run.ipynb", log=tmp_path / "log")
    assert ran.wait() == 0, (tmp_path / "log").read_text()
    before, after = stored(), json.loads((tmp_path / "run.ipynb").read_text(encoding="utf-8"))
    for old, new in zip(texts(before), texts(after), strict=True):
        assert NUMBER.sub("#", old) == NUMBER.sub("#", new)
        # Processors round differently, and training multiplies that.
        assert list(map(float, NUMBER.findall(new))) == pytest.approx(list(map(float, NUMBER.findall(old))), rel=0.05)
    assert len(pictures(before)) == len(pictures(after))
