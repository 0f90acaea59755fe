"""Architectures that the seams do not reach by themselves, one file each, and the table of them.

Most models need no entry: their rotary module and their attention are found and measured. An entry may give the native
encoding that the configuration lacks. It may give attention for classes that do not dispatch it by name. It may give
the table of a rotary module without frequencies, or the module that adds positions to token embeddings.
"""

from __future__ import annotations

from patches.model.architectures.architecture import Architecture, MaskKind, Seams
from patches.model.architectures.table import architecture_of

__all__ = ["Architecture", "MaskKind", "Seams", "architecture_of"]
