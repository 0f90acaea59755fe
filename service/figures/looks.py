"""One look per method in all figures of a comparison: an index of colour, dash, marker and hatch."""

from __future__ import annotations

from collections.abc import Iterable

from service.policy.auto import AUTO

OWN_NAME = "default"
"""The name of the model's own encoding."""


def looks(names: Iterable[str]) -> dict[str, int]:
    """Index of the look of each of ``names``.

    The model's own encoding has the first, also where it comes later or was not asked for. ``auto`` has the last. So
    results agree that were asked for the same methods: a recommendation begins with the own one and has no ``auto``.
    """
    others = [name for name in dict.fromkeys(names) if name not in (OWN_NAME, AUTO)]
    return {name: index for index, name in enumerate((OWN_NAME, *others, AUTO))}
