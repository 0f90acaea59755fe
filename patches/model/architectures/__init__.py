"""Architectures that the two seams do not reach by themselves, one file each, and the table of them.

Most models need no entry: their rotary module and their attention are found and measured. An entry says
what a configuration does not (the native encoding), gives attention to classes that do not dispatch it by
name, and points at the module that adds positions to token embeddings.
"""

from __future__ import annotations

from patches.model.architectures.architecture import Architecture, Seams
from patches.model.architectures.table import architecture_of

__all__ = ["Architecture", "Seams", "architecture_of"]
