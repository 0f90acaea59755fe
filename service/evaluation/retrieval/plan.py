"""Passkey and needle: grids of lengths and depths.

Passkey: Mohtashami and Jaggi, arXiv:2305.16300, with the prompt and the score of jquesnelle/yarn's eval/passkey.py.
The filler is cut between words; the scripts cut it anywhere. Needle: Kamradt's LLMTest_NeedleInAHaystack, with
RULER's recall in place of a language model's opinion.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from service.evaluation.checks import InvalidEvaluation, affordable, bos_of, documents_of, subjects_of
from service.evaluation.retrieval.grid import (
    PromptsPlan,
    check_fits,
    check_grid,
    eos_of,
    grid_lengths,
    haystack_of,
    samples_of,
)
from service.evaluation.retrieval.haystack import FILLER, Haystack, Hidden, with_hidden
from service.evaluation.retrieval.prompts import Draft, PromptTokenizer
from service.evaluation.retrieval.request import DepthRequest, NeedleRequest, PasskeyRequest
from service.evaluation.retrieval.results import (
    DepthMethod,
    DepthScore,
    NeedleResult,
    PasskeyResult,
    SampleResult,
)
from service.evaluation.retrieval.scores import first_integer, recall
from service.evaluation.unit import Outcome, Subject
from service.models.registry import ModelRegistry
from service.settings import Settings
from service.sharing.stopping import check_wanted

TASK = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
QUESTION = "What is the pass key? The pass key is"


@dataclass(frozen=True, eq=False)
class DepthPlan(PromptsPlan):
    """Prompts in the order of depths, ``request.samples`` at each."""

    request: PasskeyRequest | NeedleRequest
    depths: list[float]
    max_new_tokens: int

    def result(self, outcomes: Sequence[Outcome]) -> PasskeyResult | NeedleResult:
        request = self.request
        score = first_integer if isinstance(request, PasskeyRequest) else recall
        measured = self.measured(outcomes, score)
        fields: dict[str, Any] = self.in_every_result() | {
            "depths": self.depths,
            "samples": request.samples,
            "seed": request.seed,
            "max_new_tokens": self.max_new_tokens,
            "methods": [self._method(*pair) for pair in zip(self.subjects, measured, strict=True)],
        }
        if isinstance(request, PasskeyRequest):
            return PasskeyResult(**fields, digits=request.digits)
        asked = {"needle": request.needle, "question": request.question, "answer": answer_of(request)}
        return NeedleResult(**fields, **asked, expected=request.expected)

    def _method(self, subject: Subject, by_length: dict[int, list[SampleResult]]) -> DepthMethod:
        cells = self.cells(by_length, self.depths, self.request.samples)
        return DepthMethod(
            **subject.described(self.lengths[-1]),
            cells=[DepthScore(depth=depth, **fields) for depth, fields in cells],
            lengths=self.lengths_of(by_length),
        )


def passkey_drafts(request: PasskeyRequest, haystack: Haystack, *, published: bool) -> list[Draft]:
    """Prompts by depth and sample. The ``published`` filler begins at its start, documents at any sentence."""
    new_tokens = request.max_new_tokens or request.digits + 5
    drafts = []
    for depth, sample, rng in _grid(request):
        start = 0 if published else _start(haystack, rng)
        key = _key(request.digits, rng, haystack)
        hidden = f"The pass key is {key}. Remember it. {key} is the pass key."

        def text(words: int, depth: float = depth, start: int = start, hidden: str = hidden) -> str:
            before = round(depth * words)
            after = haystack.cut(start + before, words - before)
            return "\n".join((TASK, haystack.cut(start, before), hidden, after, QUESTION))

        drafts.append(Draft(_name(depth, sample), text, f" {key}", (key,), new_tokens))
    return drafts


def needle_drafts(request: NeedleRequest, haystack: Haystack) -> list[Draft]:
    """Prompts by depth and sample: other samples begin elsewhere in the documents.

    Raises:
        InvalidEvaluation: when the haystack has an expected string already.
    """
    lower = haystack.text.lower()
    for index, string in enumerate(request.expected):
        if string.lower() in lower:
            raise InvalidEvaluation(f"expected.{index}", f"{string!r} is in the input without the needle")
    answer = answer_of(request)
    drafts = []
    for depth, sample, rng in _grid(request):
        start = _start(haystack, rng)

        def text(words: int, depth: float = depth, start: int = start) -> str:
            return f"{with_hidden(haystack, start, words, [Hidden(depth, request.needle)])}\n\n{request.question}"

        expected = tuple(request.expected)
        drafts.append(Draft(_name(depth, sample), text, f" {answer}", expected, request.max_new_tokens))
    return drafts


def _grid(request: DepthRequest) -> Iterator[tuple[float, int, np.random.Generator]]:
    """Every depth and sample with its own random numbers: more of either leave the others as they are."""
    for depth in sorted(set(request.depths)):
        for sample in range(request.samples):
            check_wanted()
            yield depth, sample, np.random.default_rng([request.seed, round(depth * 10**6), sample])


def _name(depth: float, sample: int) -> str:
    return f"depth {depth:g}, sample {sample}"


def _start(haystack: Haystack, rng: np.random.Generator) -> int:
    return haystack.sentence_start(int(rng.integers(len(haystack.words))), 0)


def _key(digits: int, rng: np.random.Generator, haystack: Haystack) -> str:
    """Digits of which the first is not 0, and which are not in the haystack."""
    for _ in range(1000):
        key = "".join(map(str, [rng.integers(1, 10), *rng.integers(0, 10, digits - 1)]))
        if key not in haystack.text:
            return key
    raise InvalidEvaluation("digits", f"the input is full of numbers: {digits} digits are too few for a new one")


def answer_of(request: NeedleRequest) -> str:
    """The text whose likelihood after the question is measured."""
    return request.answer or _answer(request.needle, request.expected)


def _answer(needle: str, expected: Sequence[str]) -> str:
    found = [re.search(re.escape(string), needle, re.IGNORECASE) for string in expected]
    spans = [match.span() for match in found if match is not None]
    if len(spans) < len(expected):
        return ", ".join(expected)
    return needle[min(start for start, _ in spans) : max(stop for _, stop in spans)]


def plan_of(request: PasskeyRequest | NeedleRequest, models: ModelRegistry, settings: Settings) -> DepthPlan:
    """Everything is checked here, before a token reaches the model.

    Raises:
        UnknownModel: for a model that is not served.
        InvalidEvaluation: for anything else that cannot be run as asked.
    """
    served = models.get(request.model)
    lengths = grid_lengths(request.length_values(), served, settings)
    subjects = subjects_of(request.methods, served, models, settings, longest=lengths[-1])
    depths = sorted(set(request.depths))
    check_grid(lengths, len(depths) * request.samples, subjects, settings)
    published = request.input is None
    documents = [] if request.input is None else documents_of(request, served, settings)
    haystack = Haystack(FILLER, between=" ") if published else haystack_of(request.texts(), documents)
    if isinstance(request, PasskeyRequest):
        drafts = passkey_drafts(request, haystack, published=published)
    else:
        drafts = needle_drafts(request, haystack)
    tokenizer = PromptTokenizer(served.tokenizer, bos_of("auto", served))
    check_fits({request.evaluation: drafts}, lengths[0], tokenizer)
    plan = DepthPlan(
        model=served.name,
        trained_length=served.trained_length,
        subjects=subjects,
        lengths=lengths,
        documents=documents,
        samples=samples_of(drafts, lengths, tokenizer),
        tokenizer=tokenizer,
        eos_token_ids=eos_of(subjects, models),
        chunk=settings.score_chunk,
        request=request,
        depths=depths,
        max_new_tokens=drafts[0].new_tokens,
    )
    least = min(len(sample.answer_ids) for sample in plan.samples[lengths[0]])
    if isinstance(request, PasskeyRequest) and plan.max_new_tokens < least:
        raise InvalidEvaluation("max_new_tokens", f"must be at least {least}, the tokens of a key")
    affordable(plan, settings)
    return plan
