"""Offsets of tokens in texts are the same in a prompt, as text or ids, and in an answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import service.models
from service.api.generation.pieces import Pieces
from service.api.generation.prompts import read_prompt
from service.api.generation.text import TextStream
from service.engine.generation import Generation
from tests.service.conftest import tiny_tokenizer

HALF = "\ufffd"
"""A part of a character as text."""

DEMO = Path(service.models.__file__).parent / "demo" / "ropeway-demo"


@pytest.fixture(params=["tiny", "demo"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return tiny_tokenizer() if request.param == "tiny" else AutoTokenizer.from_pretrained(DEMO)


@pytest.mark.parametrize("text", ["plain words", "Ünï 你好 😀 once", "ñññ x", "a😀😀b"])
def test_a_token_begins_behind_the_text_before_it(tokenizer: Any, text: str) -> None:
    prompt = read_prompt(text, tokenizer, with_text=True, add_special_tokens=False)
    ids = prompt.token_ids
    as_ids = read_prompt(ids, tokenizer, with_text=True)
    pieces, found = Pieces(TextStream(tokenizer)), list[int]()
    for stop in range(1, len(ids) + 1):
        piece = pieces.take(Generation(ids[:stop], [], "stop" if stop == len(ids) else None))
        found += [token.start for token in piece.tokens]
    assert prompt.starts == as_ids.starts == found
    before = [tokenizer.decode(ids[:place]) for place in range(len(ids))]
    assert found == [len(text.rstrip(HALF)) + text.endswith(HALF) for text in before]


def test_a_byte_that_begins_no_character_is_one(tokenizer: Any) -> None:
    half = next(token_id for token_id in range(len(tokenizer)) if tokenizer.decode([token_id]) == HALF)
    ids = [half, *tokenizer(" x", add_special_tokens=False)["input_ids"]]
    found = read_prompt(ids, tokenizer, with_text=True)
    assert found.text == f"{HALF} x"
    assert found.starts[:2] == [0, 1]
