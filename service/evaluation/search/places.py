"""Windows of the search, and later ones that share no token with them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from service.evaluation.checks import InvalidEvaluation
from service.evaluation.documents import Document
from service.evaluation.scoring.places import Places, drawn, places_in


def split(
    documents: Sequence[Document], stretch: int, scored: int, wanted: tuple[int, int], seed: int
) -> tuple[Places, Places]:
    """Places of the search and held-out ones, as many as ``wanted``; the search has the earlier text.

    A window has ``stretch`` tokens of a document. Its last ``scored`` ones, at least half, are of no other window of
    the same part.

    Raises:
        InvalidEvaluation: when the documents have no room for these windows.
    """
    windows, held_out = wanted
    every = places_in(documents, stretch, scored)
    count = len(every) * windows // (windows + held_out)
    earlier, last = every[:count], every[max(0, count - 1)]
    later = [place for place in every[count:] if place.document > last.document or place.stop >= last.stop + stretch]
    if count < windows or len(later) < held_out:
        least = stretch + (windows + held_out) * scored
        where = " of one document" if len(documents) > 1 else ""
        message = (
            f"{windows} windows and {held_out} held-out ones need {least} tokens{where}: send more text, or ask for "
            "fewer, or for a shorter length"
        )
        raise InvalidEvaluation("input", message)
    rng = np.random.default_rng(seed)
    return drawn(earlier, windows, rng), drawn(later, held_out, rng)
