"""Prompts by length, for several methods: the common part of passkey, needle and RULER plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from service.evaluation.checks import InvalidEvaluation, at_most, check_cost, server_takes
from service.evaluation.cost import Cost
from service.evaluation.documents import BUILT_IN, Document, doubling_lengths
from service.evaluation.retrieval.haystack import Haystack
from service.evaluation.retrieval.prompts import Draft, PromptTokenizer, Sample
from service.evaluation.retrieval.results import LengthScore, SampleResult
from service.evaluation.retrieval.scores import averages, sample_result
from service.evaluation.retrieval.unit import RetrievalUnit
from service.evaluation.unit import Outcome, Plan, Subject, Unit
from service.models.registry import ModelRegistry, ServedModel
from service.settings import Settings

Name = TypeVar("Name")

DEFAULT_REACH = 4
"""Default lengths stop at this many times the trained length: a grid has many prompts at each."""
LEAST_FILLED = 0.75
"""Least share of a length that each of its prompts fills. Filler comes in whole words or sentences."""


@dataclass(frozen=True, eq=False)
class PromptsPlan(Plan):
    """``samples`` are the prompts by length, the same for every method. ``eos_token_ids`` end a continuation, by
    model. ``chunk`` is the most tokens between two generation steps."""

    model: str
    trained_length: int
    subjects: list[Subject]
    lengths: list[int]
    documents: list[Document]
    samples: dict[int, list[Sample]]
    tokenizer: PromptTokenizer = field(repr=False)
    eos_token_ids: dict[str, tuple[int, ...]]
    chunk: int | None

    @property
    def cost(self) -> Cost:
        samples = [sample for length in self.lengths for sample in self.samples[length]]
        one = Cost(sum(sample.tokens for sample in samples), len(samples), len(samples))
        return one.times(len(self.subjects))

    @cached_property
    def units(self) -> Sequence[Unit]:
        return [
            RetrievalUnit(
                subject=subject,
                length=length,
                name=sample.name,
                sample=sample,
                eos_token_ids=self.eos_token_ids[subject.model],
                chunk=self.chunk,
            )
            for subject in self.subjects
            for length in self.lengths
            for sample in self.samples[length]
        ]

    def measured(
        self, outcomes: Sequence[Outcome], score: Callable[[str, Sequence[str]], float]
    ) -> list[dict[int, list[SampleResult]]]:
        """Per method: the results of every length's prompts, in their order."""
        remaining, tokenizer = iter(outcomes), self.tokenizer.tokenizer
        return [
            {
                length: [sample_result(sample, next(remaining), tokenizer, score) for sample in self.samples[length]]
                for length in self.lengths
            }
            for _ in self.subjects
        ]

    def cells(
        self, by_length: dict[int, list[SampleResult]], names: Sequence[Name], each: int
    ) -> Iterator[tuple[Name, dict[str, Any]]]:
        """A depth or task, and fields of its score: ``each`` samples at every length."""
        for length, results in by_length.items():
            for index, name in enumerate(names):
                group = results[index * each : (index + 1) * each]
                yield name, {**dict(averages(group)), "length": length, "outputs": group}

    def lengths_of(self, by_length: dict[int, list[SampleResult]]) -> list[LengthScore]:
        """Scores over all prompts of each length."""
        return [LengthScore(**dict(averages(results)), length=length) for length, results in by_length.items()]

    def in_every_result(self) -> dict[str, Any]:
        """Fields that all these results have."""
        return {
            "model": self.model,
            "trained_length": self.trained_length,
            "lengths": self.lengths,
            "bos": self.tokenizer.bos is not None,
            "documents": [document.info for document in self.documents],
        }


def grid_lengths(wanted: Sequence[int] | None, served: ServedModel, settings: Settings) -> list[int]:
    """Sorted lengths; doublings of the trained length where none are given.

    Raises:
        InvalidEvaluation: for too many, or one that the server does not take.
    """
    if wanted is None:
        longest = min(DEFAULT_REACH * served.trained_length, served.engine.scores.most)
        return doubling_lengths(served.trained_length, longest)
    lengths = sorted(set(wanted))
    server_takes(lengths[-1], served, settings)
    at_most("lengths", len(lengths), settings.max_lengths)
    return lengths


def check_grid(lengths: Sequence[int], prompts: int, subjects: Sequence[Subject], settings: Settings) -> None:
    """Refuse a grid far beyond the server's limits, before any prompt is written.

    Raises:
        InvalidEvaluation: when ``prompts`` at every length have more tokens than the server allows.
    """
    passes = len(lengths) * prompts
    check_cost(Cost(sum(lengths) * prompts, passes, passes).times(len(subjects)), settings)


def check_fits(drafts: dict[str, list[Draft]], length: int, tokenizer: PromptTokenizer) -> None:
    """Every draft must fit into the shortest ``length``; ``drafts`` are by the name of their task.

    Raises:
        InvalidEvaluation: naming the smallest lengths that would do.
    """
    smallest = {name: max(tokenizer.smallest(draft) for draft in group) for name, group in drafts.items()}
    too_long = [f"{name} needs at least {least}" for name, least in smallest.items() if least > length]
    if too_long:
        raise InvalidEvaluation("lengths", f"{length} tokens are too few: {', '.join(too_long)}")


def samples_of(drafts: Sequence[Draft], lengths: Sequence[int], tokenizer: PromptTokenizer) -> dict[int, list[Sample]]:
    """Every draft at every length, which it must fit.

    Raises:
        InvalidEvaluation: for a length that a prompt does not fill, as its next piece of text is too long.
    """
    samples = {length: [tokenizer.sample(draft, length) for draft in drafts] for length in lengths}
    for length, group in samples.items():
        least = min(group, key=lambda sample: sample.length)
        if least.length < LEAST_FILLED * length:
            why = f"the prompt {least.name!r} fills {least.length} of {length} tokens, and its next piece is too long"
            raise InvalidEvaluation("lengths", f"{why}: use other lengths, or input of shorter words")
    return samples


def haystack_of(texts: Sequence[str | list[int]], documents: Sequence[Document]) -> Haystack:
    """The documents of a request one after another, each up to its cut; ``texts`` are its ``input``.

    Raises:
        InvalidEvaluation: when they have no word.
    """
    parts = [_text_of(given, document) for given, document in zip(texts, documents, strict=True)]
    haystack = Haystack("\n\n".join(parts))
    if not haystack.words:
        raise InvalidEvaluation("input", "has no words to hide anything in")
    return haystack


def _text_of(given: str | list[int], document: Document) -> str:
    """The text of a document, up to the cut."""
    if not isinstance(given, str):
        text: str = document.tokenizer.decode(document.token_ids, skip_special_tokens=True)
        return text
    text = BUILT_IN[given]() if given in BUILT_IN else given
    return text if document.cut_from is None else text.encode()[: document.total_bytes].decode(errors="ignore")


def eos_of(subjects: Sequence[Subject], models: ModelRegistry) -> dict[str, tuple[int, ...]]:
    """Tokens that end a continuation, by the model of each subject."""
    return {subject.model: models.get(subject.model).engine.eos_token_ids for subject in subjects}
