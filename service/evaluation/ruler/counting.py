"""Words to count: common ones in a list, frequent ones in a coded text (RULER, section 3.3)."""

from __future__ import annotations

import math

import numpy as np

from service.evaluation.retrieval.prompts import Draft
from service.evaluation.ruler.lexicon import coded_words, growing, syllables

COMMON_NEW_TOKENS = 120
FREQUENT_NEW_TOKENS = 50
COMMON = 10
FREQUENT = 3
UNCOMMON = 10
"""Fewest uncommon words: without any, all words would be common."""


def common_words_draft(
    name: str, rng: np.random.Generator, frequency: int, uncommon_frequency: int, new_tokens: int
) -> Draft:
    """Ten words occur ``frequency`` times each in a numbered list, all the others ``uncommon_frequency`` times."""
    order = int(rng.integers(1 << 62))
    first = growing(syllables(rng))
    expected = tuple(first(COMMON))

    def text(more: int) -> str:
        uncommon = first(COMMON + UNCOMMON + more)[COMMON:]
        listed = [*expected] * frequency + uncommon * uncommon_frequency
        shuffled = np.random.default_rng([order, more]).permutation(len(listed))
        numbered = " ".join(f"{number}. {listed[index]}" for number, index in enumerate(shuffled, 1))
        return (
            "Below is a numbered list of words. In these words, some appear more often than others. "
            f"Memorize the ones that appear most often.\n{numbered}\n"
            f"Question: What are the {COMMON} most common words in the above list? "
            f"Answer: The top {COMMON} words that appear most often in the list are:"
        )

    answer = " ".join(f"{number}. {word}" for number, word in enumerate(expected, 1))
    return Draft(name, text, f" {answer}", expected, new_tokens)


def frequent_words_draft(name: str, rng: np.random.Generator, alpha: float, new_tokens: int) -> Draft:
    """The word of rank k occurs n / k^alpha times (Zipf's law); rank 1 is dots, ranks 2 to 4 are asked for."""
    order = int(rng.integers(1 << 62))
    first = growing(coded_words(rng))
    expected = tuple(first(FREQUENT))
    last = FREQUENT + 1
    # From here on, ranks 4 and 5 differ by a whole word, and so do those before them.
    fewest = math.ceil(1 / (last**-alpha - (last + 1) ** -alpha))

    def text(more: int) -> str:
        counts = zipf_counts(fewest + more, alpha)
        coded = ["....", *first(len(counts) - 1)]
        listed = [word for word, count in zip(coded, counts, strict=True) for _ in range(count)]
        shuffled = np.random.default_rng([order, more]).permutation(len(listed))
        return (
            "Read the following coded text and track the frequency of each coded word. "
            "Find the three most frequently appeared coded words. "
            f"{' '.join(listed[index] for index in shuffled)}\n"
            "Question: Do not provide any explanation. Please ignore the dots '....'. "
            "What are the three most frequently appeared words in the above coded text? "
            "Answer: According to the coded text above, the three most frequently appeared words are:"
        )

    return Draft(name, text, f" {', '.join(expected)}", expected, new_tokens)


def zipf_counts(most: int, alpha: float) -> list[int]:
    """floor(most / k^alpha) for the ranks k = 1, 2, ... that have at least one."""
    ranks = np.arange(1, math.floor(most ** (1 / alpha)) + 2, dtype=np.float64)
    counts: list[int] = np.floor(most / ranks**alpha).astype(int).tolist()
    return [count for count in counts if count]
