"""Answers begin as the text goes on, also under tokenizers like Llama 2's. They drop a first word's space."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from service.api.generation.pieces import Pieces
from service.api.generation.text import TextStream
from service.api.generation.token_names import BYTE_LEVEL, TokenNames
from service.engine.generation import Generation

WORDS = ["▁the", "▁rope", "s", "▁", "▁is", ".", "\n"]


@pytest.fixture(scope="module", name="llama2")
def _llama2() -> Any:
    """Words with their space, bytes for all else, and a decoder that strips one space at the start."""
    spellings = ["<bos>", *WORDS, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(spellings)}, [], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    stripped = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(stripped)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>")


def ids_of(tokenizer: Any, *words: str) -> list[int]:
    return [int(tokenizer.convert_tokens_to_ids(word)) for word in words]


def test_the_first_word_keeps_its_space(llama2: Any) -> None:
    prompt, answer = ids_of(llama2, "<bos>", "▁the"), ids_of(llama2, "▁rope", "s", "▁is")
    assert llama2.decode(answer) == "ropes is", "alone"
    stream = TextStream(llama2, context=prompt)
    assert [stream.push(answer[: n + 1], final=n == 2) for n in range(3)] == [" rope", "s", " is"]
    pieces = Pieces(llama2, [" rope"], context=prompt)
    piece = pieces.take(Generation(answer[:1]))
    assert (piece.text, piece.finish_reason) == ("", "stop"), "a stop string that begins with the space"


def test_a_first_word_of_all_has_none(llama2: Any) -> None:
    answer = ids_of(llama2, "▁rope", "s")
    for context in ([], ids_of(llama2, "<bos>")):
        assert TextStream(llama2, context=context).push(answer, final=True) == "ropes"


def test_a_character_that_the_prompt_has_begun(llama2: Any) -> None:
    first, second = (f"<0x{byte:02X}>" for byte in "é".encode())
    stream = TextStream(llama2, context=ids_of(llama2, "▁the", first))
    assert stream.push(ids_of(llama2, second, "s"), final=True) == "és"


def test_a_replacement_character_of_the_prompt_is_not_repeated(llama2: Any) -> None:
    context = ids_of(llama2, *(f"<0x{byte:02X}>" for byte in "\ufffd".encode()))
    assert TextStream(llama2, context=context).push(ids_of(llama2, "▁is"), final=True) == " is"


CHARACTERS = [*"the rope", "s", " ", "é", "東", "😀", "\n"]


def spelled(text: str) -> list[str]:
    """Words where there are some, and bytes for all else."""
    words = [[word] if (word := letter.replace(" ", "▁")) in WORDS else None for letter in text]
    bytes_ = [[f"<0x{byte:02X}>" for byte in letter.encode()] for letter in text]
    return [part for word, raw in zip(words, bytes_, strict=True) for part in word or raw]


@given(
    st.lists(st.sampled_from(CHARACTERS), min_size=1, max_size=12),
    st.data(),
    st.lists(st.integers(1, 3), max_size=12),
    st.booleans(),
)
def test_prompt_and_answer_are_one_text(
    llama2: Any, tokenizer: Any, text: list[str], data: Any, sizes: list[int], by_bytes: bool
) -> None:
    """Wherever the prompt ends, also inside a character."""
    if by_bytes:
        own, ids = tokenizer, tokenizer("".join(text), add_special_tokens=False)["input_ids"]
    else:
        own, ids = llama2, ids_of(llama2, *spelled("".join(text)))
    ids = [own.bos_token_id, *ids]
    cut = data.draw(st.integers(1, len(ids)))
    before, answer = ids[:cut], ids[cut:]
    stream, shown, at = TextStream(own, context=before), "", 0
    for size in [*sizes, len(ids)]:
        at = min(at + size, len(answer))
        shown += stream.push(answer[:at], final=at == len(answer))
        if at == len(answer):
            break
    begun = own.decode(before, skip_special_tokens=True)
    assert begun.rstrip("\ufffd") + shown == own.decode(ids, skip_special_tokens=True) or shown == ""


def test_bytes_of_tokens_join_to_the_text(llama2: Any, tokenizer: Any) -> None:
    """Parts of characters too, as SentencePiece and as byte-level BPE spell them."""
    names, words = TokenNames(llama2), ids_of(llama2, "▁rope", "▁", "<0xC3>", "<0xA9>", "s")
    assert [names(word) for word in words] == [" rope", " ", "<0xC3>", "<0xA9>", "s"]
    assert bytes(byte for word in words for byte in names.bytes_of(word) or []).decode() == " rope és"
    text = "The naïve ropes of 東京 🪢"
    of_bytes = TokenNames(tokenizer)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert bytes(byte for each in ids for byte in of_bytes.bytes_of(each) or []).decode() == text
    assert bytes_to_unicode() == {byte: letter for letter, byte in BYTE_LEVEL.items()}
