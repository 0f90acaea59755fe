"""All generated pages and their pictures, written into a folder."""

from __future__ import annotations

from pathlib import Path

from service.docs import export, methods, primer
from service.sharing.files import replace


def write_docs(folder: Path) -> list[Path]:
    """Write every generated page and picture below ``folder``; returns the paths."""
    written = []
    for name, text in (*methods.files(), *export.files(), *primer.files()):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        replace(path, text.encode())
        written.append(path)
    return written
