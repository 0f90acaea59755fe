"""Plotly's texts as Matplotlib draws them."""

from __future__ import annotations

import html
import logging
import re
from collections.abc import Sequence
from functools import cache

from matplotlib import font_manager, rcParams
from matplotlib.font_manager import FontProperties
from rich.cells import cell_len

from service.figures.drawing.charts import CHAR, LABEL_CHARS
from service.figures.drawing.style import different

POINTS = 0.69
"""Points of a pixel: a text of 13 pixels has 9 points."""

FONTS = (
    *("DejaVu Sans", "Noto Sans CJK SC", "WenQuanYi Micro Hei", "Droid Sans Fallback"),
    *("Hiragino Sans GB", "Microsoft YaHei", "Malgun Gothic"),
    *("Noto Sans Devanagari", "Lohit Devanagari", "Noto Sans Thai", "Noto Emoji", "Symbola"),
)
"""Families for the scripts of the world in their order. The first one comes with Matplotlib."""


def text(shown: object) -> str:
    """Plotly's text without its tags; nothing in it is a formula to Matplotlib."""
    return "\n".join(_drawable(line).replace("$", r"\$") for line in _plain(shown))


def label_texts(shown: Sequence[str]) -> list[str]:
    """``text`` of each label, cut where escapes make it too long, so that different labels stay different."""
    texts = [text(label) for label in shown]
    short = different(texts, max(LABEL_CHARS, *map(_length, shown)) if shown else LABEL_CHARS)
    return [short[label] for label in texts]


def extra_width(shown: Sequence[str]) -> float:
    """Pixels that escapes and wide characters add to labels, beside a character's width for each."""
    columns = max(map(cell_len, label_texts(shown)), default=0)
    return CHAR * max(0, columns - max(map(_length, shown), default=0))


def _length(shown: str) -> int:
    return max(map(len, _plain(shown)))


def _plain(shown: object) -> list[str]:
    """The lines of Plotly's text without their tags."""
    lines = re.split(r"<br\s*/?>", str(shown))
    return [html.unescape(re.sub(r"</?(?:b|i|sub|sup|span)\b[^>]*>", "", line)) for line in lines]


def families() -> list[str]:
    """Those of ``FONTS`` that this machine has: Matplotlib takes each character from the first one that has it."""
    installed = set(font_manager.get_font_names())
    return [name for name in FONTS if name in installed]


def _drawable(line: str) -> str:
    """``line`` with an escape, such as ``\\u8bad``, for every character without a glyph, so that names stay distinct.

    An SVG keeps its texts as texts, and its viewer has other fonts.
    """
    kept = None if rcParams["svg.fonttype"] == "none" else _characters(tuple(families()))
    return "".join(
        char if char.isprintable() and (kept is None or ord(char) in kept) else ascii(char)[1:-1] for char in line
    )


@cache
def _characters(names: tuple[str, ...]) -> frozenset[int]:
    """Characters that these families have in both weights: titles are bold."""
    logging.getLogger(font_manager.__name__).setLevel(logging.ERROR)  # it warns of a family without bold letters
    weights = [[FontProperties(family=name, weight=weight) for name in names] for weight in ("normal", "bold")]
    light, bold = (
        {char for font in fonts for char in font_manager.get_font(font_manager.findfont(font)).get_charmap()}
        for fonts in weights
    )
    return frozenset(light & bold)
