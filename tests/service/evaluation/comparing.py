"""Results to compare: perplexities of documents, shares of prompts, and what ran."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from service.evaluation.comparison import comparing
from service.evaluation.comparison.checks import Named
from service.evaluation.comparison.results import Change, ComparisonResult
from service.evaluation.results import DocumentInfo
from service.evaluation.retrieval.results import DepthMethod, DepthScore, LengthScore, PasskeyResult, SampleResult
from service.evaluation.retrieval.scores import averages
from service.evaluation.scores import Interval
from service.evaluation.setup import ModelSetup, Setup
from tests.service.results import result_of

DOCUMENTS = [
    DocumentInfo(name=f"text {at}", tokens=100_000, bytes=400_000, tokens_sha256=f"{at}" * 64) for at in range(5)
]
TOKENS = 90_000
BEFORE, AFTER = [3.0, 3.4, 2.8, 3.1, 3.7], [2.9, 3.35, 2.65, 3.02, 3.58]
"""Mean NLL of the documents under two models."""
WORSE, OTHER = [3.1, 3.5, 2.9, 3.2, 3.79], [2.9, 3.6, 2.7, 3.3, 3.6]


def compared(named: Sequence[Named], baseline: str | None = None, *, given: bool = True) -> ComparisonResult:
    """``named`` by names that are ``given``, or are their places."""
    names = [one.name for one in named]
    given_names = names if given else [""] * len(names)
    return comparing.compared([one.result for one in named], given_names, names, baseline=baseline)


def change_of(result: ComparisonResult) -> tuple[Change, Interval]:
    """The change of the second method, which has an interval."""
    change = result.methods[1].lengths[0].change
    assert change is not None
    assert change.interval is not None
    return change, change.interval


def perplexity(name: str, means: dict[str, list[float]], model: str = "tiny") -> Named:
    """Mean NLL of five documents of many tokens, by label; at 512 tokens."""
    result = result_of({label: [1.0] for label in means}, [512], models=dict.fromkeys(means, model))
    for method, nll in zip(result.methods, means.values(), strict=True):
        at = method.lengths[0]
        at.groups = [(mean * TOKENS, TOKENS) for mean in nll]
        at.perplexity = math.exp(float(np.mean(nll)))
        at.interval = Interval(low=0.9 * at.perplexity, high=1.1 * at.perplexity, kind="documents")
    result.documents, result.model = DOCUMENTS, model
    return Named(name, result)


def add_length(named: Named, length: int, nll: Sequence[float]) -> None:
    """Another length, before the others, at which the first method has the mean ``nll`` of its documents."""
    lengths = named.result.methods[0].lengths  # type: ignore[attr-defined]
    groups, mean = [(mean * TOKENS, TOKENS) for mean in nll], math.exp(float(np.mean(nll)))
    lengths.insert(0, lengths[0].model_copy(update={"length": length, "groups": groups, "perplexity": mean}))


def passkey(name: str, found: list[float], **more: Any) -> Named:
    """One method at 512 tokens whose prompts have the scores ``found``."""
    samples = [
        SampleResult(
            name=f"{at}",
            prompt_tokens=500,
            score=score,
            answer_nll=1.0,
            answer_accuracy=score,
            answer_tokens=5,
            expected=["1"],
            output="",
        )
        for at, score in enumerate(found)
    ]
    whole = averages(samples).model_dump()
    cells = [DepthScore(**whole, length=512, depth=0.5, outputs=samples)]
    method = DepthMethod(
        label="default", pe={"method": "default"}, model="tiny", cells=cells, lengths=[LengthScore(**whole, length=512)]
    )
    fields = {"samples": len(found), "seed": 0, "max_new_tokens": 5, "bos": False, "documents": [], "digits": 5} | more
    return Named(
        name,
        PasskeyResult(model="tiny", trained_length=256, lengths=[512], depths=[0.5], methods=[method], **fields),
    )


def setup_of(tokenizer: str, dtype: str = "float32", quantization: str | None = None) -> Setup:
    model = ModelSetup(
        torch="2", transformers="5", device="cpu", hardware="x", dtype=dtype, threads=1, tensor_parallel=1, products=[],
        fingerprint=dtype, score_chunk=None, tokenizer=tokenizer, eos_token_ids=[], quantization=quantization,
    )  # fmt: skip
    return Setup(ropeway="1", code="c" * 64, models={"tiny": model})
