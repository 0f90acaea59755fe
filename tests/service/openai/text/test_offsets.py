"""Offsets of tokens in texts are the same in a prompt, as text or ids, and in an answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

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


def sentencepiece() -> Any:
    """As Llama 2's: a space is put before a text, and all that is no word is bytes."""
    spellings = ["<unk>", "\u2581", "\u2581x", "x", "a", *(f"<0x{byte:02X}>" for byte in range(256))]
    kind = models.BPE({word: number for number, word in enumerate(spellings)}, [("\u2581", "x")], byte_fallback=True)
    made = Tokenizer(kind)
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    stripped = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(stripped)
    return PreTrainedTokenizerFast(tokenizer_object=made)


@pytest.mark.parametrize("text", ["日本", "a x", "x a", " x", "  a", "\n日 x", " "])
def test_a_space_that_is_put_before_a_text_has_no_character(text: str) -> None:
    tokenizer = sentencepiece()
    prompt = read_prompt(text, tokenizer, with_text=True)
    as_ids = read_prompt(prompt.token_ids, tokenizer, with_text=True)
    assert (as_ids.text, as_ids.starts) == (text, prompt.starts)


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
