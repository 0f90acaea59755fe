"""Numbers as text, and the lengths that a narrow table shows."""

from __future__ import annotations

import math
from collections.abc import Sequence

CONTROL = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """``text`` without control characters, which could control a terminal."""
    return text.translate(CONTROL)


def in_cell(text: str) -> str:
    """``printable``, in one line."""
    return " ".join(printable(text).splitlines())


def percent(share: float) -> str:
    """0.125 as 12.5 %, 0.5 as 50 %."""
    return f"{100 * share:.3g} %"


def probability(value: float) -> str:
    """Two digits; none is certain."""
    return "above 0.99" if value > 0.99 else "below 0.01" if value < 0.01 else f"{value:.2f}"


def short_number(value: float) -> str:
    """A perplexity in few characters: 7.123, 45.67, 812.3, 56,789, 1.2e+09. The limits are those of rounded numbers."""
    if value >= 999_999.5:
        return f"{value:.1e}"
    if value >= 999.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 99.995 else f"{value:.2f}" if value >= 9.9995 else f"{value:.3f}"


def counted(count: int, noun: str) -> str:
    """ "1 prompt", "3 prompts"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def listed(names: Sequence[str], most: int = 6) -> str:
    """ "a, b and c"; of many names, the first few and the number of others."""
    shown = list(names) if len(names) <= most else [*names[: most - 1], f"{len(names) - most + 1} more"]
    return f"{', '.join(shown[:-1])} and {shown[-1]}" if len(shown) > 1 else "".join(shown)


def spaced(lengths: Sequence[int], trained_length: int, most: int) -> list[int]:
    """At most ``most`` of the ascending ``lengths``, apart on a log scale.

    Both ends come first, then the trained length and its doublings, then others.
    """
    first, last = lengths[0], lengths[-1]
    gap = math.log2(last / first) / (most - 1) * (1 - 1e-9)
    doublings = [length for length in lengths if math.log2(length / trained_length).is_integer()]
    chosen = [first]
    for length in [last, *doublings, *lengths]:
        if all(abs(math.log2(length / other)) >= gap and length != other for other in chosen):
            chosen.append(length)
    return sorted(chosen)
