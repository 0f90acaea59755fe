# ruff: noqa: RUF001 (marks of other scripts are the subject)
"""Prompts from texts of all scripts: pieces of text without blanks, and prompts that fill their lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers, trainers
from tokenizers import models as kinds
from transformers import PreTrainedTokenizerFast

from service.evaluation.catalogue import EVALUATIONS
from service.evaluation.checks import InvalidEvaluation
from service.evaluation.retrieval.haystack import Haystack, Hidden, with_hidden
from service.evaluation.retrieval.plan import passkey_drafts
from service.evaluation.retrieval.prompts import PromptTokenizer, Sample
from service.evaluation.retrieval.request import PasskeyRequest
from service.models.registry import ModelRegistry
from tests.service.evaluation.prompting import ESSAY, settings_of

CHINESE = "子曰：“学而时习之，不亦说乎？有朋自远方来，不亦乐乎？”船在港口里等了很久。没有人划过那片雾！"
JAPANESE = "港は静かだった。「だれも霧の中を漕いでいない」と彼は言った。ボートはもう来ないのだろうか？"
THAI = "ท่าเรือเงียบสงบไม่มีใครพายเรือผ่านหมอกที่นั่นมาหลายวันแล้วจะมีเรือมาอีกหรือไม่"
TEXTS = [pytest.param(text * 20, id=name) for name, text in (("zh", CHINESE), ("ja", JAPANESE), ("th", THAI))]
REQUESTS = {
    "passkey": {"depths": [0, 0.5, 1], "samples": 1},
    "needle": {"depths": [0, 0.5, 1], "samples": 1},
    "ruler": {"tasks": ["niah_single_2"], "samples": 2},
}


def samples(models: ModelRegistry, evaluation: str, text: str, length: int) -> list[Sample]:
    kind = EVALUATIONS[evaluation]
    fields: dict[str, Any] = {"input": text, "lengths": [length], **REQUESTS[evaluation]}
    plan: Any = kind.plan(kind.request.model_validate(fields), models, settings_of(Path()))
    found: list[Sample] = plan.samples[length]
    return found


@pytest.mark.parametrize("evaluation", REQUESTS)
@pytest.mark.parametrize("text", TEXTS)
def test_prompts_without_blanks_are_full_and_differ(models: ModelRegistry, evaluation: str, text: str) -> None:
    found = samples(models, evaluation, text, 1024)
    assert all(1000 < sample.length <= 1024 for sample in found)
    assert len({sample.text for sample in found}) == len(found)


@given(st.text() | st.text("学て。「”ーกำน้ क្ʻ👨‍👩‍👧é \n.a"))
def test_pieces_are_the_text_at_borders_of_characters(text: str) -> None:
    whole = text.strip()
    words = Haystack(text, between="").words
    assert "".join(words) == whole
    borders = {found.end() for found in regex.finditer(r"\X", whole)} | {0}
    end = 0
    for word in words:
        assert end in borders or whole[end].isspace()
        end += len(word)


def test_marks_stay_with_the_character_before_them() -> None:
    assert Haystack("他说：“好。” ราคา 2024年", between="").words == [
        *("他", "说：", "“", "好。”"),
        *(" ร", "า", "ค", "า"),
        *(" 2024", "年"),
    ]


def test_words_of_english_stay_whole() -> None:
    text = f"{ESSAY} {'=' * 100} naïve—unbelievable—words"
    assert Haystack(text, between="").words == regex.findall(r"\s*\S+", text)
    assert [len(word) for word in Haystack("=" * 250, between="").words] == [100, 100, 50]


def test_a_token_may_have_several_pieces() -> None:
    tokenizer = Tokenizer(kinds.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([CHINESE] * 4, trainer)
    prompts = PromptTokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer), None)
    (draft,) = passkey_drafts(PasskeyRequest(depths=[0.5], samples=1), Haystack(CHINESE), published=False)
    sample = prompts.sample(draft, 1024)
    assert sample.pieces > 1024
    assert 1000 < sample.length <= 1024


@pytest.mark.parametrize("evaluation", REQUESTS)
def test_a_length_that_no_prompt_fills_is_refused(models: ModelRegistry, evaluation: str) -> None:
    stacked = " ".join(["x" + "\u0301" * 2000] * 20)
    with pytest.raises(InvalidEvaluation, match=r"^lengths: the prompt '.*' fills \d+ of 1024 tokens") as error:
        samples(models, evaluation, stacked, 1024)
    assert str(error.value).endswith("its next piece is too long: use other lengths, or input of shorter words")


@pytest.mark.parametrize(
    ("text", "before"),
    [
        ("नाव आई। वह गई। रात हुई। हवा चली।", "नाव आई। वह गई।"),
        ("船来了。“他走了。”天黑了。风起了！", "船来了。“他走了。”"),
        ("船が来た。「誰？」夜が来た。風が吹く。", "船が来た。「誰？」"),
        ("أين القارب؟ ذهب۔ جاء الليل. هبت الريح.", "أين القارب؟ ذهب۔"),
        ("Նավը եկավ։ Նա գնաց։ Գիշեր է։ Քամի է։", "Նավը եկավ։ Նա գնաց։"),
        ("ጀልባ መጣ። የት ሄደ፧ ሌሊት ነው። ነፋስ ነው።", "ጀልባ መጣ። የት ሄደ፧"),
        ("« Un bateau. » « Il part !» La nuit vient. Le vent se lève.", "« Un bateau. » « Il part !»"),
    ],
)
def test_sentences_of_any_script_end(text: str, before: str) -> None:
    haystack = Haystack(text)
    words = len(haystack.words)
    depth = (len(Haystack(before).words) + 1) / words
    assert with_hidden(haystack, 0, words, [Hidden(depth, "X.")]).startswith(f"{before} X. ")


LISTS = [
    pytest.param(" ".join(f"harbor{n}" for n in range(3000)), id="words"),
    pytest.param("\n".join(f"2026-01-01T00:00:{n} INFO unit={n} done" for n in range(800)) + "\nThe end.", id="log"),
    pytest.param(THAI * 30, id="th"),
]


@pytest.mark.parametrize("text", LISTS)
def test_without_sentences_the_depth_is_kept(text: str) -> None:
    haystack = Haystack(text)
    for depth in (0.03, 0.25, 0.5, 0.9):
        prompt = with_hidden(haystack, 10, 400, [Hidden(depth, " X. ")])
        before = prompt.split(" X. ")[0]
        assert len(Haystack(before).words) == round(depth * 400)


@pytest.mark.parametrize("text", LISTS)
def test_without_sentences_samples_begin_anywhere(models: ModelRegistry, text: str) -> None:
    kind = EVALUATIONS["needle"]
    request = kind.request.model_validate({"input": text, "lengths": [512], "depths": [1], "samples": 4})
    plan: Any = kind.plan(request, models, settings_of(Path()))
    assert len({sample.text for sample in plan.samples[512]}) == 4


def test_a_text_with_sentences_keeps_its_first_one_whole() -> None:
    haystack = Haystack(ESSAY)
    assert haystack.has_sentences
    assert with_hidden(haystack, 0, 30, [Hidden(0.1, "X.")]).startswith("X. The 0th harbor")
