"""Log-probabilities of responses: each token of a text is there, once, though readers hold texts back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, cast

import pytest

from service.api.generation.pieces import Piece, Token
from service.api.openai.responses.logprobs import TextTokens
from service.api.openai.tools.reading import FormedReader, PlainReader, Reader, TemplateReader
from service.models.text.response_templates import BUILT_IN, parsing_of
from tests.service.conftest import tiny_tokenizer
from tests.service.openai.parrot import TOOLS


def is_within(text: str, shown: str) -> bool:
    """True if ``shown`` is ``text`` and more letters between."""
    letters = iter(shown)
    return all(letter in letters for letter in text)


def readers(tokenizer: Any) -> Iterator[Reader]:
    def of_calls() -> TemplateReader:
        return TemplateReader(*parsing_of(tokenizer, "", TOOLS))

    yield PlainReader()
    yield of_calls()
    yield FormedReader(PlainReader(), of_calls(), "<tool", ["tie"])
    yield FormedReader(TemplateReader(*parsing_of(tokenizer, "", [])), of_calls(), "<tool", ["tie"])


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "mistral", "llama3_json", "plain", "stripped"])
def test_no_token_of_a_text_is_lost(name: str) -> None:
    tokenizer = tiny_tokenizer()
    hermes = BUILT_IN["hermes"]
    stripped = {**hermes, "fields": {**hermes["fields"], "content": {"content": "text"}}}
    tokenizer.response_template = stripped if name == "stripped" else BUILT_IN[name]
    draws = random.Random(1)
    parts = ["Hi", " ", "\n", "\n\n", "a", "<", "b", " <t", "<tool", "", "<think>", "</think>", "[TOOL_", "[", "{"]
    drawn = [[*draws.choices(parts, k=draws.randint(2, 7)), ""] for _ in range(60)]
    for pieces in [["<", "\n", ""], ["<tool", "a", "<", "\n", ""], *drawn]:
        for reader in readers(tokenizer):
            tokens, said, found = TextTokens(), "", list[Any]()
            for number, text in enumerate(pieces, 1):
                ends = number == len(pieces)
                part = reader.take(text, final=ends)
                piece = Piece(text, [cast(Token, (number, text))], "stop" if ends else None)
                found += tokens.take(piece, part.text, reader.behind)
                said += part.text
            assert found == sorted(set(found)), "in order, and once"
            shown = "".join(text for _, text in found)
            if "think>" in "".join(pieces):
                assert is_within(said, shown), pieces
            else:
                assert shown.strip() == said.strip(), pieces
            assert found[-1][0] == len(pieces), "the end has a token too"
