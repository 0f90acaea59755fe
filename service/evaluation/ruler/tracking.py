"""Variable tracking: chains of assignments scattered over noise (RULER, section 3.2)."""

from __future__ import annotations

from itertools import islice, pairwise

import numpy as np

from service.evaluation.retrieval.haystack import Hidden, with_hidden
from service.evaluation.retrieval.prompts import Draft
from service.evaluation.ruler.lexicon import numbers, variables
from service.evaluation.ruler.niah import NOISE

NEW_TOKENS = 30


def tracking_draft(name: str, rng: np.random.Generator, chains: int, hops: int, new_tokens: int) -> Draft:
    """All variables of the first of ``chains`` chains are asked for: hops + 1 of them. Each chain keeps its
    order; the chains are mixed."""
    names, values = variables(rng), numbers(rng, 5)
    tracked = [(list(islice(names, hops + 1)), next(values)) for _ in range(chains)]
    hidden = [
        Hidden(depth, assignment)
        for chain, value in tracked
        for depth, assignment in zip(
            np.sort(rng.random(hops + 1)).tolist(),
            [f"VAR {chain[0]} = {value}", *(f"VAR {left} = VAR {right}" for right, left in pairwise(chain))],
            strict=True,
        )
    ]
    expected, value = tracked[0]

    def text(words: int) -> str:
        return (
            "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
            f"{with_hidden(NOISE, 0, words, hidden, between=chr(10))}\n"
            f"Question: Find all variables that are assigned the value {value} in the text above. "
            "Answer: According to the chain(s) of variable assignment in the text above, "
            f"{len(expected)} variables are assigned the value {value}, they are:"
        )

    return Draft(name, text, f" {', '.join(expected)}", tuple(expected), new_tokens)
