"""All generated pages and their pictures, written into a folder."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path

from matplotlib.image import imread

from service.docs import export, methods, primer
from service.machine.files import replace

IMAGE = re.compile(r'"data:image/png;base64,([^"]*)"')
"""A heat map within an SVG."""


def write_docs(folder: Path) -> list[Path]:
    """Write every generated page and picture below ``folder``; returns their paths.

    A picture that differs in the rounding of another processor alone remains as it is.
    """
    written = []
    for name, text in (*methods.files(), *export.files(), *primer.files()):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix != ".svg" or not path.exists() or _seen(path.read_text(encoding="utf-8")) != _seen(text):
            replace(path, text.encode())
        written.append(path)
    return written


def rounded(svg: str) -> str:
    """An SVG with its numbers in whole pixels: processors round their ends differently."""
    return re.sub(r"-?\d+\.\d+(e-?\d+)?", lambda number: f"{float(number[0]):.0f}", svg)


def _seen(svg: str) -> tuple[str, list[bytes]]:
    """The drawing in whole pixels, and the colours of its heat maps, which zlib may pack differently."""
    images = [imread(io.BytesIO(base64.b64decode(found))) for found in IMAGE.findall(svg)]
    return rounded(IMAGE.sub("", svg)), [image.tobytes() for image in images]
