"""The places of windows in the text, and the pieces that count as independent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from service.evaluation.checks import InvalidEvaluation
from service.evaluation.documents import Document
from service.evaluation.scores import Group
from service.evaluation.statistics.pieces import LEAST, pieces_of

DENSE = 8
"""Places of a text for each window, from which on windows are far enough apart to count alone."""


class Place(NamedTuple):
    """The stretch of a window ends before token ``stop`` of a document, at every length."""

    document: int
    stop: int


@dataclass(frozen=True)
class Places:
    """The ``windows`` in the order in which they are read, drawn from ``every`` place that the text has."""

    windows: tuple[Place, ...]
    every: int

    def kind(self, read: int) -> Literal["documents", "quarters", "windows"]:
        """The pieces of the text of the first ``read`` windows that count as independent.

        Windows of one document are alike, so three documents or more count once each. Of fewer, windows at random
        places far apart count alone. If they fill more than an eighth of the text, neighbours are alike, as blocks of
        perplexity are.
        """
        if len({place.document for place in self.windows[:read]}) >= LEAST:
            return "documents"
        return "quarters" if DENSE * read > self.every else "windows"

    def groups(self, values: np.ndarray) -> list[Group]:
        """(sum, windows) of every piece, of ``values`` float64 [n] of the first n windows."""
        each = [(float(value), 1) for value in values]
        read, kind = self.windows[: len(values)], self.kind(len(values))
        if kind == "windows":
            return each
        if kind == "quarters":
            return pieces_of([each[index] for index in sorted(range(len(read)), key=read.__getitem__)], 1)
        found: dict[int, Group] = {}
        for place, (value, _) in zip(read, each, strict=True):
            total, windows = found.get(place.document, (0.0, 0))
            found[place.document] = total + value, windows + 1
        return list(found.values())


def places_of(documents: Sequence[Document], room: int, tail: int, windows: int, seed: int) -> Places:
    """At most ``windows`` places whose scored tokens do not overlap, in an order drawn from ``seed``.

    Raises:
        InvalidEvaluation: when the documents have room for fewer than two.
    """
    every = places_in(documents, room, tail)
    if len(every) < 2:
        raise InvalidEvaluation("input", f"needs {room + tail} tokens for two windows: send more text")
    return drawn(every, windows, np.random.default_rng(seed))


def places_in(documents: Sequence[Document], stretch: int, scored: int) -> list[Place]:
    """All places of windows of ``stretch`` tokens whose last ``scored`` ones do not overlap, in the order of the
    text."""
    return [
        Place(index, stop)
        for index, document in enumerate(documents)
        for stop in range(stretch, len(document.token_ids) + 1, scored)
    ]


def drawn(every: Sequence[Place], windows: int, rng: np.random.Generator) -> Places:
    """At most ``windows`` of ``every`` place, in random order."""
    order = rng.permutation(len(every))[:windows]
    return Places(tuple(every[index] for index in order.tolist()), len(every))
