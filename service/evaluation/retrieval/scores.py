"""Scores of continuations, and averages over samples."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from service.evaluation.retrieval.prompts import Sample
from service.evaluation.retrieval.results import Averages, SampleResult
from service.evaluation.scores import Interval
from service.evaluation.statistics.proportion import wilson
from service.evaluation.unit import Outcome
from service.sharing.stopping import check_wanted

OUTPUT_CHARACTERS = 200


def first_integer(output: str, expected: Sequence[str]) -> float:
    """1 when the first integer of ``output`` is the expected one, as published with the passkey prompt."""
    found = re.search(r"\d+", output)
    return float(found is not None and found.group() == expected[0])


def recall(output: str, expected: Sequence[str]) -> float:
    """The share of the expected strings that are in ``output``, in any case of letters (RULER, arXiv:2404.06654)."""
    lower = output.lower()
    return sum(string.lower() in lower for string in expected) / len(expected)


def sample_result(sample: Sample, outcome: Outcome, tokenizer: Any, score: Any) -> SampleResult:
    """One sample's numbers; ``score`` is one of the functions above."""
    check_wanted()
    output = tokenizer.decode(outcome["token_ids"].tolist(), skip_special_tokens=True)
    return SampleResult(
        name=sample.name,
        prompt_tokens=len(sample.prompt_ids),
        score=score(output, sample.expected),
        answer_nll=float(-outcome["answer_logprobs"].mean()),
        answer_accuracy=float((outcome["answer_ranks"] == 1).mean()),
        answer_tokens=len(sample.answer_ids),
        expected=list(sample.expected),
        output=output[:OUTPUT_CHARACTERS],
    )


def averages(samples: Sequence[SampleResult]) -> Averages:
    """Means over at least one sample, every sample counting alike."""
    scores = [sample.score for sample in samples]
    return Averages(
        samples=len(samples),
        score=float(np.mean(scores)),
        interval=interval(scores),
        answer_nll=float(np.mean([sample.answer_nll for sample in samples])),
        answer_accuracy=float(np.mean([sample.answer_accuracy for sample in samples])),
    )


def interval(scores: Sequence[float]) -> Interval:
    """95 % interval of the mean of scores in [0, 1]: Wilson's where all are 0 or 1.

    Partial scores vary less than a proportion with the same mean, so its interval is wide enough for them. Their sum is
    rounded down for the lower end and up for the upper one.
    """
    total = math.fsum(scores)
    low, high = wilson(math.floor(total), len(scores)), wilson(math.ceil(total), len(scores))
    return Interval(low=low.low, high=high.high, kind="samples")
