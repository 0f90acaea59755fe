"""Synthetic recall: rows whose later tokens repeat earlier ones, so that a small model learns to look back.

An episode is one task. Most episodes are short, which teaches copying early; some fill the row, which teaches it at
every distance. The tasks are random tokens repeated (induction, arXiv:2209.11895) and stretches of text repeated.
Others are values hidden in text (passkeys, arXiv:2305.16300) and key-value pairs (associative recall,
arXiv:2312.04927). Every row is a pure function of the seed and its number.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from tokenizers import Tokenizer

from service.models.training.tokenizer import special_ids

SHORTEST = 16
"""Tokens of the shortest episode."""

IGNORED = -100
"""Target of a token that nothing predicts; ``cross_entropy`` leaves it out."""

STATEMENTS = (
    ("The {name} is {value}. Remember it. {value} is the {name}.", "What is the {name}? The {name} is {value}."),
    ("One of the special {name}s for {key} is: {value}.", "The special {name} for {key} mentioned above is {value}."),
    ("Do not forget that the {name} of {key} is {value}.", "The {name} of {key} is {value}."),
    ("The {name} of {key} is {value}.", "What is the {name} of {key}? It is {value}."),
    ("{key}: {value}.", "{key}: {value}."),
)
WORDINGS = (0.6, 0.1, 0.1, 0.1, 0.1)
"""Of the statements: the first, the published passkey, repeats its words and is the hardest to answer."""

NAMES = ("pass key", "magic number", "number", "secret number", "code", "password", "answer", "key", "address", "age")
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""Of the published passkey prompt, as the introduction is."""

INTRODUCTION = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)

Episode = tuple[list[int], list[bool]]
"""Token ids, and for each whether it counts as a target."""


class RecallRows:
    """Rows of ``context`` token ids; ``text`` is a flat array of ids that gives stretches of text."""

    def __init__(self, text: np.ndarray, tokenizer: Tokenizer, context: int, seed: int) -> None:
        self.text, self.tokenizer, self.context, self.seed = text, tokenizer, context, seed
        self.first_word = max(special_ids(tokenizer)) + 1
        self.filler, self.introduction = self._ids(" " + FILLER), self._ids(INTRODUCTION + "\n")
        whole = (token[1:] for token in tokenizer.get_vocab() if token[:1] == "Ġ" and token[1:].isalpha())
        self.words = sorted(word for word in whole if len(word) > 3)

    def row(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids and targets, int64 [context], of row ``number``; targets are ids or ``IGNORED``."""
        draw = np.random.default_rng([self.seed, 1, number])
        ids: list[int] = []
        counted: list[bool] = []
        while len(ids) < self.context:
            length = round(float(np.exp(draw.uniform(np.log(SHORTEST), np.log(1.5 * self.context)))))
            task = TASKS[int(draw.choice(len(TASKS), p=SHARES))]
            episode = task(self, draw, min(length, self.context - len(ids)))
            ids += episode[0]
            counted += episode[1]
        row = np.array(ids[: self.context], dtype=np.int64)
        return row, np.where(counted[: self.context], row, IGNORED)

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def _stretch(self, draw: np.random.Generator, length: int) -> list[int]:
        start = int(draw.integers(0, len(self.text) - length))
        return [int(token) for token in self.text[start : start + length]]

    def repeated_text(self, draw: np.random.Generator, length: int) -> Episode:
        """A stretch of text, other text, and the stretch again."""
        size = int(draw.integers(4, max(5, length // 2 + 1)))
        between = int(draw.integers(0, max(1, length - 2 * size + 1)))
        again = self._stretch(draw, size)
        ids = [*again, *self._stretch(draw, between), *again]
        return ids, [True] * len(ids)

    def repeated_tokens(self, draw: np.random.Generator, length: int) -> Episode:
        """Random tokens twice or more; nothing predicts them the first time."""
        size = int(draw.integers(4, max(5, length // 2 + 1)))
        tokens = draw.integers(self.first_word, self.tokenizer.get_vocab_size(), size).tolist()
        ids = (tokens * -(-length // size))[:length]
        return ids, [False] * size + [True] * (len(ids) - size)

    def hidden(self, draw: np.random.Generator, length: int) -> Episode:
        """Up to four values in a text that has nothing to do with them, and a question for each."""
        statements, questions = self._facts(draw, int(draw.integers(1, 5)), length)
        room = max(0, length - sum(map(len, statements)) - sum(map(len, questions)))
        ids, counted = [], []
        if draw.random() < 0.3 and room > len(self.introduction):
            ids, counted = list(self.introduction), [True] * len(self.introduction)
            room -= len(ids)
        filled = draw.random() < 0.4
        around = (self.filler * (room // len(self.filler) + 1))[:room] if filled else self._stretch(draw, room)
        places = np.sort(draw.integers(0, room + 1, len(statements)))
        start = 0
        for place, statement in zip(places.tolist(), statements, strict=True):
            part = [*around[start:place], *statement]
            ids, counted = [*ids, *part], [*counted, *[True] * (place - start), *[False] * len(statement)]
            start = place
        asked = [token for i in draw.permutation(len(questions)) for token in questions[i]]
        rest = around[start:]
        return [*ids, *rest, *asked], [*counted, *[True] * (len(rest) + len(asked))]

    def _facts(self, draw: np.random.Generator, count: int, length: int) -> tuple[list[list[int]], list[list[int]]]:
        """Statements and questions of up to ``count`` facts under one wording, as many as fit into ``length``."""
        statement, question = STATEMENTS[int(draw.choice(len(STATEMENTS), p=WORDINGS))]
        count = count if "{key}" in statement else 1
        name, keys = str(draw.choice(NAMES)), draw.choice(self.words, count, replace=False)
        said: list[list[int]] = []
        asked: list[list[int]] = []
        for key in keys.tolist():
            facts = {"name": name, "key": key, "value": self._value(draw)}
            pair = self._ids(" " + statement.format(**facts)), self._ids("\n" + question.format(**facts))
            if said and sum(map(len, (*said, *asked, *pair))) > length:
                break
            said.append(pair[0])
            asked.append(pair[1])
        return said, asked

    def _value(self, draw: np.random.Generator) -> str:
        if draw.random() < 0.7:
            return "".join(map(str, draw.integers(0, 10, int(draw.integers(2, 9)))))
        return " ".join(map(str, draw.choice(self.words, int(draw.integers(1, 4)))))

    def pairs(self, draw: np.random.Generator, length: int) -> Episode:
        """Keys with their values, then some of the keys again, each with its value."""
        count = max(2, length // 12)
        keys = draw.choice(self.words, count, replace=False)
        numbers = draw.random() < 0.5
        values = [str(draw.integers(0, 10_000)) if numbers else str(draw.choice(self.words)) for _ in keys]
        order = draw.permutation(count)[: max(1, count // 2 + 1)]
        said = self._ids("".join(f" {key}: {value}." for key, value in zip(keys, values, strict=True)))
        asked = self._ids("".join(f" {keys[i]}: {values[i]}." for i in order))
        return [*said, *asked], [*[False] * len(said), *[True] * len(asked)]


TASKS: tuple[Callable[[RecallRows, np.random.Generator, int], Episode], ...] = (
    RecallRows.repeated_text,
    RecallRows.repeated_tokens,
    RecallRows.hidden,
    RecallRows.pairs,
)
SHARES = (0.1, 0.1, 0.65, 0.15)
"""Of the tasks, in episodes."""
