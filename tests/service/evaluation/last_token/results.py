"""The result of the toy evaluation."""

from __future__ import annotations

import math
from typing import Literal

from service.evaluation.results import EvaluationResult, MethodInResult, Row
from service.evaluation.scores import Score, Scores
from service.evaluation.words import best_method


class LastTokenMethod(MethodInResult):
    nll: dict[int, float]


class LastTokenResult(EvaluationResult):
    evaluation: Literal["last_token"] = "last_token"
    methods: list[LastTokenMethod]

    def rows(self) -> list[Row]:
        return [{"method": m.label, "length": n, "nll": nll} for m in self.methods for n, nll in m.nll.items()]

    def scores(self) -> Scores:
        by_method = [{n: Score(math.exp(nll), None) for n, nll in method.nll.items()} for method in self.methods]
        return Scores("last perplexity", True, by_method)

    def sentences(self) -> list[str]:
        return best_method(self)
