"""Pictures of results: ``from service.figures import pictures_of`` in a notebook shows them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from service.figures.picture import Picture
    from service.figures.results import pictures_of

__all__ = ["Picture", "pictures_of"]

_MODULES = {"Picture": "picture", "pictures_of": "results"}


def __getattr__(name: str) -> Any:
    """Drawing libraries load on first use."""
    if name in _MODULES:
        from importlib import import_module

        return getattr(import_module(f"service.figures.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
