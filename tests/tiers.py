"""The tier of a test by its measured time: ``tests/slow.txt`` lists the functions that `make test-fast` leaves out.

``python -m tests.tiers LOG`` writes the list anew from the log of ``make test ARGS="-vv --durations=0"``.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

LIST = Path(__file__).parent / "slow.txt"
MOST_S = 0.8
"""Seconds that one function may take in the fast tier: all its cases with their fixtures, two cores at work."""

KEPT = ("tests/patches/attention/test_scores.py::test_attention_equals_the_paper",)
"""In the fast tier whatever their time: they compare every rotary method with its oracle."""

LINE = re.compile(r"([\d.]+)s (?:call|setup|teardown)\s+([^\[\s]+)")


def slow(lines: Iterable[str]) -> list[str]:
    """Functions, as FILE::NAME, whose cases take more than ``MOST_S`` together, without ``KEPT``."""
    seconds: Counter[str] = Counter()
    for line in lines:
        if found := LINE.match(line):
            seconds[found[2]] += float(found[1])
    return sorted(name for name, total in seconds.items() if total > MOST_S and name not in KEPT)


def listed() -> set[str]:
    return set(LIST.read_text(encoding="utf-8").split())


if __name__ == "__main__":
    LIST.write_text(
        "\n".join(slow(Path(sys.argv[1]).read_text(encoding="utf-8").splitlines())) + "\n", encoding="utf-8"
    )
