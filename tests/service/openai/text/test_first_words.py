"""Answers begin as the text goes on, also under tokenizers like Llama 2's. They drop a first word's space."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import httpx
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
from tests.service.openai.conftest import answer

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
    pieces = Pieces(TextStream(llama2, [" rope"], context=prompt))
    piece = pieces.take(Generation(answer[:1]))
    assert (piece.text, piece.finish_reason) == ("", "stop"), "a stop string that begins with the space"


def test_a_first_word_of_all_has_none(llama2: Any) -> None:
    answer = ids_of(llama2, "▁rope", "s")
    for context in ([], ids_of(llama2, "<bos>")):
        assert TextStream(llama2, context=context).push(answer, final=True) == "ropes"


@pytest.mark.parametrize("silent", [1, 3, 40])
def test_a_word_behind_special_tokens_keeps_its_space(llama2: Any, silent: int) -> None:
    prompt = ids_of(llama2, "<bos>", "▁the")
    answer = ids_of(llama2, "▁rope", *["<bos>"] * silent, "▁is", "▁the", "<bos>", "s")
    stream = TextStream(llama2, context=prompt)
    pieces = [stream.push(answer[: n + 1], final=n == len(answer) - 1) for n in range(len(answer))]
    assert pieces == [" rope", *[""] * silent, " is", " the", "", "s"]
    assert "the" + "".join(pieces) == llama2.decode([*prompt, *answer], skip_special_tokens=True)
    stopped = TextStream(llama2, [" is"], context=prompt)
    assert [stopped.push(answer[: n + 1], final=False) for n in range(silent + 2)] == [" rope", *[""] * (silent + 1)]
    assert stopped.stopped


def test_special_tokens_without_end_are_not_decoded_again_and_again(llama2: Any) -> None:
    answer = ids_of(llama2, "▁rope", *["<bos>"] * 500, "▁is")
    stream, decoded = TextStream(llama2), list[int]()

    def decode(ids: list[int], **options: Any) -> str:
        decoded.append(len(ids))
        return str(llama2.decode(ids, **options))

    stream._tokenizer = SimpleNamespace(decode=decode, convert_ids_to_tokens=llama2.convert_ids_to_tokens)
    text = "".join(stream.push(answer[: n + 1], final=n == len(answer) - 1) for n in range(len(answer)))
    assert (text.replace(" ", ""), max(decoded) < 80) == ("ropeis", True)


def test_a_byte_before_a_broken_character_is_given_once(llama2: Any) -> None:
    answer = ids_of(llama2, "▁the", "<0x0A>", "<0xF0>")
    stream = TextStream(llama2, context=ids_of(llama2, "▁the"))
    assert [stream.push(answer[: n + 1], final=n == 2) for n in range(3)] == [" the", "\n", "\ufffd"]
    goes_on = TextStream(llama2, context=ids_of(llama2, "▁the"))
    answer = ids_of(llama2, "<0x0A>", *(f"<0x{byte:02X}>" for byte in "é".encode()), "s")
    assert [goes_on.push(answer[: n + 1], final=n == 3) for n in range(4)] == ["\n", "", "é", "s"]


def test_a_character_that_the_prompt_has_begun(llama2: Any) -> None:
    first, second = (f"<0x{byte:02X}>" for byte in "é".encode())
    stream = TextStream(llama2, context=ids_of(llama2, "▁the", first))
    assert stream.push(ids_of(llama2, second, "s"), final=True) == "és"


@pytest.mark.parametrize("cut", range(1, 17))
def test_characters_in_a_row(llama2: Any, cut: int) -> None:
    """Wherever the tokens that are read with the answer begin: bytes in a row are decoded as one."""
    spelled_out = [*ids_of(llama2, "▁the"), *ids_of(llama2, *(f"<0x{byte:02X}>" for byte in "😀😀😀😀".encode()))]
    prompt, answer = spelled_out[:cut], spelled_out[cut:]
    stream = TextStream(llama2, context=prompt)
    shown = "".join(stream.push(answer[: n + 1], final=n + 1 == len(answer)) for n in range(len(answer)))
    assert shown == "😀" * (4 - (cut - 1) // 4)


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
    names = TokenNames(own)
    spelled_out = [bytes(names.bytes_of(token) or []) for token in ids[1:]]
    begun = b"".join(spelled_out[: cut - 1]).decode(errors="ignore")
    rest = b"".join(spelled_out).decode()[len(begun) :]
    assert shown == (rest.removeprefix(" ") if cut == 1 and own is llama2 else rest)


def test_bytes_of_tokens_join_to_the_text(llama2: Any, tokenizer: Any) -> None:
    """Parts of characters too, as SentencePiece and as byte-level BPE spell them."""
    names, words = TokenNames(llama2), ids_of(llama2, "▁rope", "▁", "<0xC3>", "<0xA9>", "s")
    assert [names(word) for word in words] == [" rope", " ", "bytes:\\xc3", "bytes:\\xa9", "s"]
    assert bytes(byte for word in words for byte in names.bytes_of(word) or []).decode() == " rope és"
    text = "The naïve ropes of 東京 🪢"
    of_bytes = TokenNames(tokenizer)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert bytes(byte for each in ids for byte in of_bytes.bytes_of(each) or []).decode() == text
    assert bytes_to_unicode() == {byte: letter for letter, byte in BYTE_LEVEL.items()}


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_a_served_answer_goes_on_with_the_prompt(http: httpx.Client, tokenizer: Any, path: str) -> None:
    ids = tokenizer("The rope of 東", add_special_tokens=False)["input_ids"]
    body = {"prompt": ids[:-1], "logit_bias": {str(ids[-1]): 100}, "max_tokens": 1, "max_new_tokens": 1}
    del body["max_tokens" if path == "/generate" else "max_new_tokens"]
    got = answer(http, path, **body)
    assert "\ufffd" in tokenizer.decode(ids[-1:])
    assert (got["results"] if path == "/generate" else got["choices"])[0]["text"] == "東"
