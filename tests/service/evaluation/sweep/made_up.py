"""Judges of four methods by numbers made by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from patches import parse
from service.evaluation.perplexity.results import PerplexityResult
from service.evaluation.results import EvaluationResult
from service.evaluation.scores import Interval
from service.evaluation.statistics.proportion import wilson
from service.evaluation.sweep.judging import Judge
from service.evaluation.unit import Subject
from service.models.registry import ModelRegistry
from tests.service.figures import examples
from tests.service.results import result_of

YARN = {"method": "yarn", "factor": 4.0}
LENGTHS = [64, 256]
METHODS = [{"method": "default"}, {"method": "self_extend"}, YARN, {"method": "streaming"}]


def judged(models: ModelRegistry, *curves: list[list[float]], tolerance: float = 0.1, half: float = 0.0) -> Judge:
    """Judges the four methods by perplexities at 64 and 256 tokens. Intervals reach ``half`` of a number to each side.
    So does that of its ratio to the number at the other length."""
    patch = models.default.patch
    subjects = [Subject(parse(fields), patch, "tiny") for fields in METHODS]
    return Judge(subjects, [result(subjects, curve, half) for curve in curves], 0, 64, 256, tolerance)


def result(subjects: list[Subject], curve: list[list[float]], half: float) -> PerplexityResult:
    named = {subject.label: values for subject, values in zip(subjects, curve, strict=True)}
    made = result_of(named, LENGTHS, trained_length=64, documents=[f"input[{index}]" for index in range(8)])
    made.protocol = "tail"
    hard = np.random.default_rng(0).normal(size=8)
    turns = half * np.sqrt(7) / 2.364624 * np.array([1, -1] * 4)  # Student's t of seven degrees of freedom
    for method, values in zip(made.methods, curve, strict=True):
        for at, value in zip(method.lengths, values, strict=True):
            at.interval = Interval(low=value * (1 - half), high=value * (1 + half), kind="documents")
            nll = np.log(value) + hard + (turns if at.length == LENGTHS[-1] else 0)
            at.groups = [(float(100 * of_document), 100) for of_document in nll]
    return made


def shares(models: ModelRegistry, *grids: list[list[float]], curves: Sequence[list[list[float]]] = ()) -> Judge:
    """Judges the four methods by shares found at 64 and 256 tokens, of 20 prompts; ``curves`` are perplexities."""
    subjects = [Subject(parse(fields), models.default.patch, "tiny") for fields in METHODS]
    results: list[EvaluationResult] = [result(subjects, curve, 0.0) for curve in curves]
    for grid in grids:
        found = examples.passkey([subject.label for subject in subjects])
        for method, values in zip(found.methods, grid, strict=True):
            method.lengths = [
                at.model_copy(update={"length": n, "score": value, "interval": wilson(round(20 * value), 20)})
                for at, n, value in zip(method.lengths, LENGTHS, values, strict=False)
            ]
        results.append(found)
    return Judge(subjects, results, 0, 64, 256, 0.1)
