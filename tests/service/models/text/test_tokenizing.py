"""A long text has the tokens that the tokenizer's own call gives, on whichever path."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoTokenizer

from service.models.checkpoint import loading
from service.models.text.tokenizing import SMALL, tokenized
from tests.service.conftest import TEXT, tiny_tokenizer

LONG = "Half a pair \u00e9\u0301, a space  before,\ttabs, <s> and </s>, 12 345. " * (SMALL // 40)


def demo_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(next(path for path in sorted(loading.DEMO.iterdir()) if path.is_dir()))


@pytest.mark.parametrize("make", [tiny_tokenizer, demo_tokenizer])
@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("text", [LONG, TEXT * (SMALL // len(TEXT) + 1)])
def test_long_texts_have_the_tokens_of_a_call(make: Any, special: bool, text: str) -> None:
    tokenizer = make()
    tokenizer("cut", truncation=True, max_length=1)  # what an earlier call left behind
    ids = tokenized(tokenizer, text, add_special_tokens=special)
    assert ids == tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
    assert len(ids) > 1000


class _Shouting(type(demo_tokenizer())):  # type: ignore[misc]
    """A tokenizer that changes the text before the library's call."""

    def __call__(self, text: str, **options: Any) -> Any:
        return super().__call__(text.upper(), **options)


def test_a_tokenizer_with_a_call_of_its_own_is_called() -> None:
    tokenizer = demo_tokenizer()
    plain = tokenized(tokenizer, LONG)
    tokenizer.__class__ = _Shouting
    assert tokenized(tokenizer, LONG) == tokenizer(LONG, verbose=False)["input_ids"] != plain
