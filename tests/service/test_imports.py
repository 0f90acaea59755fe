"""The import graph of ``service`` and ``patches``, read from the sources: no circles, one direction."""

from __future__ import annotations

import ast
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

LAYERS = (
    {"policy"},
    {"addresses", "env_file", "log_writer", "machine"},
    {"context", "errors", "inputs", "logs", "metrics", "settings"},
    {"anthropic_failures", "environment", "sharing", "tracing"},
    {"engine"},
    {"models"},
    {"export"},
    {"evaluation"},
    {"figures", "jobs"},
    {"reports"},
    {"api", "docs"},
    {"ui"},
    {"app", "client"},
    {"scale"},
    {"cli"},
)
"""Files and folders of ``service`` from the bottom up: each imports from lower layers only."""

IN_PATCHES = ("encoding", "batch", "attention", "model")
"""Folders of ``patches`` from the bottom up; ``methods`` and the modules beside them are free."""


def sources() -> dict[str, Path]:
    """Module name -> file."""
    found = {}
    for path in (path for folder in ("patches", "service") for path in (ROOT / folder).rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


def imported(path: Path, known: set[str]) -> set[str]:
    """Modules among ``known`` that a file imports, for types and inside of functions too.

    ``from a import b`` is ``a.b`` where that is a module.
    """
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            found |= {name if (name := f"{module}.{alias.name}") in known else module for alias in node.names}
    return found & known


def graph(paths: dict[str, Path]) -> dict[str, set[str]]:
    """Module -> modules that it imports."""
    return {name: imported(path, set(paths)) - {name} for name, path in paths.items()}


@cache
def edges() -> dict[str, set[str]]:
    """``graph`` of all sources."""
    return graph(sources())


def circle(found: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(found).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def upward(name: str, others: set[str]) -> set[str]:
    """Modules among ``others`` that ``name`` may not import: in a layer above, or another room of its layer."""
    layer_of = {room: layer for layer, rooms in enumerate(LAYERS) for room in rooms}
    parts = name.split(".")
    if parts[0] == "patches":
        above = IN_PATCHES[IN_PATCHES.index(parts[1]) + 1 :] if set(parts[1:2]) & set(IN_PATCHES) else ()
        forbidden = ("service", *(f"patches.{folder}" for folder in above))
        return {other for other in others if other.startswith(forbidden)}
    if len(parts) == 1:
        return others
    rooms = {other: other.split(".")[1] for other in others if other.startswith("service.")}
    below = layer_of[parts[1]]
    return {other for other, room in rooms.items() if room != parts[1] and layer_of[room] >= below}


def test_the_reading_itself(tmp_path: Path) -> None:
    texts = {
        "a": "if TYPE_CHECKING:\n import b\nelse:\n import c\ntry:\n import b.d\nfinally: 0\ndef f():\n import e\n",
        "b": "import json\n",
        "b.d": "from b import d, x\nfrom e import f\n",
        "c": "class C:\n    import e\n",
        "e": "",
    }
    paths = {name: tmp_path / f"{name}.py" for name in texts}
    for name, path in paths.items():
        path.write_text(texts[name])
    expected = {"a": {"b", "c", "b.d", "e"}, "b": set(), "b.d": {"b", "e"}, "c": {"e"}, "e": set()}
    assert graph(paths) == expected
    assert circle(expected) == []
    assert set(circle({**expected, "e": {"a"}})) >= {"a", "e"}
    assert upward(
        "service.jobs.runner", {"service.api.errors", "service.figures", "service.jobs.active", "patches"}
    ) == {
        "service.api.errors",
        "service.figures",
    }
    assert upward("patches.registry", {"service.errors", "patches.method"}) == {"service.errors"}
    assert upward("patches.batch.slots", {"patches.model.hf", "patches.encoding.recipe"}) == {"patches.model.hf"}


def test_no_modules_import_each_other() -> None:
    assert len(edges()) > 200
    assert circle(edges()) == []


def test_every_room_has_a_layer() -> None:
    rooms = {name.split(".")[1] for name in sources() if name.startswith("service.")}
    assert rooms == set().union(*LAYERS)


@pytest.mark.parametrize("package", ["patches", "service"])
def test_imports_point_down(package: str) -> None:
    own = {name for name in edges() if name.split(".")[0] == package}
    wrong = {name: sorted(up) for name in sorted(own) if (up := upward(name, edges()[name]))}
    assert wrong == {}
