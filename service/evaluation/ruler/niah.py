"""Needles in a haystack: keys with values, some of which are asked for (RULER, section 3.1)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from service.evaluation.retrieval.haystack import FILLER, Haystack, Hidden, with_hidden
from service.evaluation.retrieval.prompts import Draft
from service.evaluation.ruler.lexicon import growing, numbers, uuids, words

NEW_TOKENS = 128
NOISE = Haystack(FILLER, between="\n")
DRAWS: dict[str, Callable[[np.random.Generator], Iterator[str]]] = {"words": words, "numbers": numbers, "uuids": uuids}


@dataclass(frozen=True)
class Niah:
    """``keys`` hidden keys with ``values`` each, of which ``queries`` are asked for. The haystack is the repeated
    noise, the request's documents, or more needles: then every sentence is one."""

    haystack: Literal["noise", "documents", "needles"]
    key: Literal["words", "uuids"] = "words"
    value: Literal["numbers", "uuids"] = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1

    def draft(self, name: str, rng: np.random.Generator, documents: Haystack | None, new_tokens: int) -> Draft:
        """A prompt; ``documents`` may be None where they are not the haystack."""
        haystack = documents if self.haystack == "documents" and documents is not None else NOISE
        all_keys = DRAWS[self.key](rng)
        all_values = (value for value in DRAWS[self.value](rng) if value not in haystack.text)
        keys = [next(all_keys) for _ in range(self.keys)]
        values = {key: [next(all_values) for _ in range(self.values)] for key in keys}
        hidden = [
            Hidden(float(rng.random()), _sentence(self.value, key, value)) for key in keys for value in values[key]
        ]
        asked = [keys[index] for index in rng.permutation(self.keys)[: self.queries]]
        expected = tuple(value for key in asked for value in values[key])
        start = haystack.sentence_start(int(rng.integers(len(haystack.words))), 0)
        more = growing(_sentence(self.value, key, value) for key, value in zip(all_keys, all_values, strict=False))

        def text(pieces: int) -> str:
            if self.haystack == "needles":
                context = _among(more(pieces), hidden)
            else:
                context = with_hidden(haystack, start, pieces, hidden)
            return _prompt(self.value, context, asked, several=len(expected) > 1)

        return Draft(name, text, f" {', '.join(expected)}", expected, new_tokens)


def _sentence(kind: str, key: str, value: str) -> str:
    return f"One of the special magic {kind} for {key} is: {value}."


def _among(sentences: list[str], hidden: list[Hidden]) -> str:
    """``sentences`` a line each, the hidden ones at their depths."""
    count = len(sentences)
    for depth, sentence in sorted(hidden, reverse=True):
        sentences.insert(round(depth * count), sentence)
    return "\n".join(sentences)


def _prompt(kind: str, context: str, asked: list[str], *, several: bool) -> str:
    """The wording is RULER's; what is one is asked for in the singular."""
    query = asked[0] if len(asked) == 1 else f"{', '.join(asked[:-1])}, and {asked[-1]}"
    if several:
        return (
            f"Some special magic {kind} are hidden within the following text. Make sure to memorize it. "
            f"I will quiz you about the {kind} afterwards.\n{context}\n"
            f"What are all the special magic {kind} for {query} mentioned in the provided text? "
            f"The special magic {kind} for {query} mentioned in the provided text are"
        )
    one = kind.removesuffix("s")
    return (
        f"A special magic {one} is hidden within the following text. Make sure to memorize it. "
        f"I will quiz you about the {one} afterwards.\n{context}\n"
        f"What is the special magic {one} for {query} mentioned in the provided text? "
        f"The special magic {one} for {query} mentioned in the provided text is"
    )


NEEDLES: dict[str, Niah] = {
    "niah_single_1": Niah("noise"),
    "niah_single_2": Niah("documents"),
    "niah_single_3": Niah("documents", value="uuids"),
    "niah_multikey_1": Niah("documents", keys=4),
    "niah_multikey_2": Niah("needles"),
    "niah_multikey_3": Niah("needles", key="uuids", value="uuids"),
    "niah_multivalue": Niah("documents", values=4),
    "niah_multiquery": Niah("documents", keys=4, queries=4),
}


def needs_documents(task: str) -> bool:
    """True for tasks whose haystack is the request's documents."""
    return task in NEEDLES and NEEDLES[task].haystack == "documents"
