"""Imports inside ``patches`` point one way, from the model down to the encodings, and never in a circle."""

from __future__ import annotations

from graphlib import TopologicalSorter

from tests.test_architecture import ROOT, imported, parsed, sources

LAYERS = ("encoding", "batch", "attention", "model")
"""Folders of ``patches``, each of which imports those before it only."""


def imports() -> dict[str, set[str]]:
    """Module of ``patches`` -> the modules of ``patches`` that it imports, under TYPE_CHECKING too."""
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sources("patches")
    }
    graph = {}
    for name, path in files.items():
        pairs = imported(parsed(path))
        graph[name] = {f"{module}.{what}" if f"{module}.{what}" in files else module for module, what in pairs}
        graph[name] &= files.keys()
    return graph


def test_no_module_imports_itself_through_others() -> None:
    order = list(TopologicalSorter(imports()).static_order())  # raises CycleError with the modules of a circle
    assert order.index("patches.encoding.geometry") < order.index("patches.encoding.recipe")


def test_folders_import_the_layers_below_them() -> None:
    for module, targets in imports().items():
        folder = module.split(".")[1] if "." in module else ""
        above = LAYERS[LAYERS.index(folder) + 1 :] if folder in LAYERS else ()
        assert not [target for target in targets if target.startswith(tuple(f"patches.{a}" for a in above))], module
