"""Shared by the tests of passkey, needle and RULER: prompts without a model, and outcomes made by hand."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np

from service.evaluation.retrieval.grid import PromptsPlan
from service.evaluation.retrieval.prompts import PromptTokenizer
from service.evaluation.retrieval.unit import RetrievalUnit
from service.evaluation.unit import Outcome
from service.models.registry import ModelRegistry
from service.settings import Settings
from tests.service.conftest import tiny_tokenizer

BOS = 0
TOKENIZER = tiny_tokenizer()
PROMPTS = PromptTokenizer(TOKENIZER, BOS)
ESSAY = " ".join(
    f"The {n}th harbor was quiet. Nobody rowed past it in the {n % 7} days of fog! Would {n} more boats come?"
    for n in range(300)
)


def decoded(prompt_ids: np.ndarray) -> str:
    assert prompt_ids[0] == BOS
    return str(TOKENIZER.decode(prompt_ids[1:].tolist()))


def finish(work: Generator[Any, None, Any]) -> Any:
    """The return value of ``work``."""
    try:
        while True:
            next(work)
    except StopIteration as stop:
        return stop.value


def settings_of(folder: Path, **fields: Any) -> Settings:
    return Settings(_env_file=None, model=str(folder), dtype="float32", device="cpu", score_chunk=64, **fields)


def registry(folder: Path) -> Generator[ModelRegistry]:
    models = ModelRegistry(settings_of(folder))
    try:
        yield models
    finally:
        models.close()


def perfect(plan: PromptsPlan) -> list[Outcome]:
    """Outcomes of a model that knows every answer."""
    return [
        {
            "token_ids": unit.sample.answer_ids,
            "answer_logprobs": np.zeros(len(unit.sample.answer_ids)),
            "answer_ranks": np.ones(len(unit.sample.answer_ids), np.int64),
        }
        for unit in plan.units
        if isinstance(unit, RetrievalUnit)
    ]


def hopeless(plan: PromptsPlan) -> list[Outcome]:
    """Outcomes of a model that adds one word, and takes every token of the answer for the last."""
    wrong = np.array(TOKENIZER(" ropes", add_special_tokens=False)["input_ids"])
    return [
        {
            "token_ids": wrong,
            "answer_logprobs": np.full(len(unit.sample.answer_ids), -2.5),
            "answer_ranks": np.full(len(unit.sample.answer_ids), 300),
        }
        for unit in plan.units
        if isinstance(unit, RetrievalUnit)
    ]
