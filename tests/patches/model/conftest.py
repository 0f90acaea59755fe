"""A tiny Llama, and its patch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from transformers import PreTrainedModel

from patches import Patched, patched
from tests.models import tiny_model


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return tiny_model("llama", attn_implementation="sdpa")[1]


@pytest.fixture
def patch(llama: PreTrainedModel) -> Iterator[Patched]:
    with patched(llama) as made:
        yield made
        assert made.slots.in_use() == 0, "a forward kept a slot"
