"""Execution of a notebook without Jupyter, whose packages would be some thirty more.

``python -m tests.notebook docs/notebook.ipynb`` runs the code cells in order, and writes their outputs into the file.
Outputs are standard output, and the value of a last expression as PNG or text.
"""

from __future__ import annotations

import ast
import base64
import io
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

Cell = dict[str, Any]


def executed(notebook: dict[str, Any]) -> dict[str, Any]:
    """``notebook`` (nbformat 4.5) with the outputs of its code cells, which share one namespace."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    cells, count = [], 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            count += 1
            cell = {**cell, "execution_count": count, "outputs": _outputs("".join(cell["source"]), namespace, count)}
        cells.append(cell)
    return {**notebook, "cells": cells}


def _outputs(source: str, namespace: dict[str, Any], count: int) -> list[Cell]:
    name = f"cell {count}"
    *statements, last = ast.parse(source, name).body
    shown = isinstance(last, ast.Expr) and not source.rstrip().endswith(";")
    value = None
    with redirect_stdout(io.StringIO()) as printed:
        exec(compile(ast.Module(statements if shown else [*statements, last], []), name, "exec"), namespace)
        if shown:
            assert isinstance(last, ast.Expr)
            value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
    outputs: list[Cell] = []
    if printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": _lines(printed.getvalue())})
    if value is not None:
        result = {"output_type": "execute_result", "execution_count": count, "metadata": {}, "data": _data(value)}
        outputs.append(result)
    return outputs


def _data(value: Any) -> dict[str, Any]:
    data: dict[str, Any] = {"text/plain": _lines(repr(value))}
    if hasattr(value, "_repr_png_"):
        data["image/png"] = base64.b64encode(value._repr_png_()).decode()
    return data


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def rewrite(source: Path, target: Path) -> None:
    """Write the notebook in ``source``, with the outputs of its cells, to ``target``."""
    result = executed(json.loads(source.read_text(encoding="utf-8")))
    target.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    notebook, *elsewhere = map(Path, sys.argv[1:])
    rewrite(notebook, *(elsewhere or [notebook]))
