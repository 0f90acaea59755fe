"""Direction of the imports, read from the source. The rules are in DESIGN.md; this file keeps them."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import patches
from patches import METHODS
from tests.methods import OTHER_ROWS, RELATIVE_ROWS, ROWS

ROOT = Path(__file__).resolve().parent.parent

TRANSFORMERS_IN_PATCHES = ("patches/model/hf.py",)
TRANSFORMERS_IN_SERVICE = (
    "service/engine/adapter/",  # the one adapter around continuous batching
    "service/models/checkpoint/",  # configuration, tokenizer and weights of a checkpoint
    "service/engine/padded/room.py",
    "service/models/architecture.py",  # demo model under families no Llama carries
    "service/models/parallel/messages.py",  # types of caches
    "service/models/text/tokenizing.py",
    "service/models/training/shape.py",  # untrained demo models
)
"""Files and folders that may import transformers."""

MEASURES = {"patches/attention/mass.py"}
"""The mass of attention is measured on the specification, which serves no request."""

METHODS_MAY_IMPORT = {
    "bands",
    "biases",
    "fields",
    "geometry",
    "masks",
    "method",
    "positions",
    "ramps",
    "recipe",
    "rotary",
    "schedule",
    "temperature",
}
"""Modules of ``patches`` that a method is made of; everything else is above it or beside it."""

TRAINS_FAMILIES = {"service/models/architecture.py"}
"""A model that is written out for every family says which one is which."""

WORDS_OF_EVERYDAY = {"custom", "default", "none", "learned", "sinusoidal"}
"""Method names that are ordinary words too: a service may say them and mean no encoding."""


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imported(tree: ast.AST) -> Iterator[tuple[str, str | None]]:
    """(module, name) of every import, at any depth; name None for ``import module``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from ((node.module or "", alias.name) for alias in node.names)


def packages(tree: ast.AST) -> set[str]:
    return {module.partition(".")[0] for module, _ in imported(tree)}


def literals(tree: ast.AST) -> set[str]:
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


@cache
def parsed(path: Path) -> ast.AST:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def test_the_reading_itself() -> None:
    tree = ast.parse("import a.b\nfrom c.d import e, f\ndef g():\n    from h import i\n    return 'yarn'\n")
    assert set(imported(tree)) == {("a.b", None), ("c.d", "e"), ("c.d", "f"), ("h", "i")}
    assert packages(tree) == {"a", "c", "h"}
    assert literals(tree) == {"yarn"}
    with pytest.raises(AssertionError, match="absolute"):
        packages(ast.parse("from .a import b"))
    assert len(sources("patches")) > 10


def test_patches_does_not_know_the_service() -> None:
    assert [name_of(path) for path in sources("patches") if "service" in packages(parsed(path))] == []


def test_the_service_imports_the_public_surface_only() -> None:
    wrong = [
        f"{name_of(path)}: {module} {name or ''}"
        for path in sources("service")
        for module, name in imported(parsed(path))
        if module.partition(".")[0] == "patches" and (module != "patches" or name not in patches.__all__)
    ]
    assert wrong == [], "write `from patches import NAME` with a name of its __all__"


def test_transformers_is_imported_in_named_places_only() -> None:
    for folder, allowed in (("patches", TRANSFORMERS_IN_PATCHES), ("service", TRANSFORMERS_IN_SERVICE)):
        found = [name_of(path) for path in sources(folder) if "transformers" in packages(parsed(path))]
        assert [name for name in found if not name.startswith(allowed)] == []
        assert [name for name in allowed if not any(file.startswith(name) for file in found)] == []


def test_methods_are_made_of_the_shared_parts_only() -> None:
    for path in sources("patches/methods"):
        modules = {module for module, _ in imported(parsed(path))}
        ours = {module for module in modules if module.partition(".")[0] == "patches"}
        assert ours <= {f"patches.encoding.{part}" for part in METHODS_MAY_IMPORT}, name_of(path)
        assert "transformers" not in packages(parsed(path)), name_of(path)


def test_the_shared_parts_do_not_know_the_methods() -> None:
    for part in METHODS_MAY_IMPORT:
        modules = {module for module, _ in imported(parsed(ROOT / f"patches/encoding/{part}.py"))}
        above = {m for m in modules if m.startswith(("patches.methods", "patches.registry", "patches.model"))}
        assert above == set(), part


def test_attention_does_not_know_the_methods() -> None:
    for path in sources("patches/attention"):
        modules = {module for module, _ in imported(parsed(path))}
        assert not any(module.startswith(("patches.methods", "patches.registry")) for module in modules), name_of(path)


def test_fused_attention_does_not_lean_on_its_specification() -> None:
    for path in sources("patches"):
        if name_of(path) in MEASURES:
            continue
        modules = {module if name is None else f"{module}.{name}" for module, name in imported(parsed(path))}
        assert not any(module.startswith("patches.attention.reference") for module in modules), name_of(path)


def test_the_service_names_no_method() -> None:
    names = set(METHODS) - WORDS_OF_EVERYDAY
    found = {name_of(path): sorted(names & literals(parsed(path))) for path in sources("service")}
    assert {path: words for path, words in found.items() if words and path not in TRAINS_FAMILIES} == {}


def test_every_method_has_a_row_and_every_row_a_method() -> None:
    table = [*ROWS, *OTHER_ROWS, *RELATIVE_ROWS]
    assert [row.name for row in table] == list(METHODS)
    for row in table:
        fields = set(METHODS[row.name].model_fields) - {"method", "partial_rotary_factor", "attention_temperature"}
        mscales = {"mscale_all_dim", "mscale", "short_mscale", "long_mscale"}
        shadowed = mscales if "attention_factor" in row.hard else {"attention_factor"}
        optional = {"rope_theta", "factor", *shadowed, *row.easy}
        assert fields - optional <= set(row.hard), f"{row.name}: its hard request leaves parameters at their default"
        assert row.easy != row.hard


def test_the_public_surface_is_what_it_says() -> None:
    assert sorted(patches.__all__) == sorted(set(patches.__all__))
    for name in patches.__all__:
        assert getattr(patches, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        patches.nonsense  # noqa: B018
    assert (ROOT / "patches/py.typed").is_file()


STATE = """
import json, logging, os, random, signal, sys, threading, warnings
import numpy, pydantic, torch

def state():
    return [
        torch.random.get_rng_state().tolist(), random.getstate()[1][:5], str(numpy.random.get_state()[1][:5]),
        torch.get_num_threads(), torch.get_num_interop_threads(), torch.is_grad_enabled(),
        str(torch.get_default_dtype()), torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        sorted(os.environ.items()), len(warnings.filters), len(logging.root.handlers), logging.root.level,
        threading.active_count(), str(signal.getsignal(signal.SIGINT)), os.getcwd(),
        sys.excepthook is sys.__excepthook__,
    ]

before = json.dumps(state())
import patches
print(json.dumps({
    "same": json.dumps(state()) == before,
    "loaded": sorted(set(sys.modules) & {"transformers", "patches.model.hf", "service", "fastapi"}),
}))
"""


def test_importing_patches_does_nothing() -> None:
    result = subprocess.run([sys.executable, "-c", STATE], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert json.loads(result.stdout) == {"same": True, "loaded": []}


LISTING = """
import sys
import patches
patches.describe_methods()
patches.parse({"method": "self_extend", "base": {"method": "yarn", "factor": 4}})
print(sorted(set(sys.modules) & {"torch", "transformers", "patches.model.hf"}))
"""


def test_listing_and_reading_encodings_needs_no_torch() -> None:
    result = subprocess.run([sys.executable, "-c", LISTING], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (result.stderr, result.stdout) == ("", "[]\n")
