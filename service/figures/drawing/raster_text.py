"""Plotly's texts as Matplotlib draws them."""

from __future__ import annotations

import html
import re

from matplotlib import font_manager

POINTS = 0.69
"""Points of a pixel: a text of 13 pixels has 9 points."""


def text(shown: object) -> str:
    """Plotly's text without its tags; nothing in it is a formula to Matplotlib or lacks a glyph."""
    lines = re.split(r"<br\s*/?>", str(shown))
    plain = [html.unescape(re.sub(r"</?(?:b|i|sub|sup|span)\b[^>]*>", "", line)) for line in lines]
    return "\n".join(_drawable(line).replace("$", r"\$") for line in plain)


def _drawable(line: str) -> str:
    """``line`` with ``?`` for every character without a glyph: Matplotlib would warn and draw boxes."""
    font = font_manager.get_font(font_manager.findfont("DejaVu Sans"))
    return "".join(char if char.isprintable() and font.get_char_index(ord(char)) else "?" for char in line)
