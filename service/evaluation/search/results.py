"""The result of a search."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, Field

from service.evaluation.answers import AnsweringResult
from service.evaluation.formatting import short_number
from service.evaluation.results import Columns, DocumentInfo, MethodInResult, Row, name_of
from service.evaluation.scores import ENDS, Group, Interval, Overview, Score, Scores, interval_columns

FOUND = "search"
"""Label of the encoding with the factors that were found."""

Measure = Literal["search_loss", "factor", "best_loss", "median_loss", "perplexity", "times_search"]


class HeldOut(BaseModel):
    """One method on the held-out windows. ``times_search`` is its perplexity divided by that of the search."""

    perplexity: float
    interval: Interval | None
    times_search: float
    times_search_interval: Interval | None = Field(description="95 % interval of the ratio, over the same windows.")
    groups: list[Group] = Field(description="(NLL sum, windows) of the pieces of text that count as independent.")


class SearchMethod(MethodInResult):
    """The encoding that was found, or one to compare it with. ``search_loss`` is over the windows of the search."""

    request: dict[str, Any] = Field(description="The encoding as a request has it.")
    factors: list[float] | None = Field(
        description="Factor of each rotating pair, the fastest first; null: it is no frequency schedule."
    )
    search_loss: float
    held_out: HeldOut | None


class Generation(BaseModel):
    """``best``: the least loss up to this generation. ``median``: that of its ``candidates``, all new ones."""

    candidates: int
    best: float
    median: float


class Answer(BaseModel):
    """``label`` and ``pe`` are of the best encoding on the held-out windows; without these, on those of the search."""

    label: str
    pe: dict[str, Any]
    surely_beats: list[str] = Field(
        description="Compared encodings with a higher perplexity than the search by the 95 % interval of the ratio."
    )
    words: list[str]


class SearchResult(AnsweringResult):
    """The factors that were found, their comparison on held-out text, and the course of the search."""

    optional: ClassVar[Columns] = {"index": int, **ENDS}

    evaluation: Literal["search"] = "search"
    fingerprint: str = Field(description="SHA-256 of the measured model's configuration and weights.")
    target_length: int
    windows: int
    held_out: int
    population: int
    seed: int
    bos: bool
    tokens_read: int
    documents: list[DocumentInfo]
    skipped: list[DocumentInfo] = Field([], description="Documents left out as shorter than the target length.")
    pe: dict[str, Any] = Field(description="The encoding that was found, as a request has it.")
    generations: list[Generation]
    answer: Answer
    methods: list[SearchMethod] = Field(description="The encoding that was found, then those compared with it.")

    def scores(self) -> Scores:
        """Perplexity on the held-out windows."""
        by_method = [
            {} if at is None else {self.target_length: Score(at.perplexity, at.interval, at.groups)}
            for at in (method.held_out for method in self.methods)
        ]
        return Scores("perplexity", True, by_method)

    def overview(self) -> Overview:
        """One row per method, the best first."""
        ranked = self.ranked()
        return Overview(
            columns=["method", "perplexity", "95 % interval", "of the search's", "search loss"],
            rows=[self._shown(method) for method in ranked],
            best=frozenset([0]),
            caption="\n".join(self.answer.words[1:]),
        )

    def ranked(self) -> list[SearchMethod]:
        """The methods by their perplexity on held-out windows, else by the loss of the search."""
        return sorted(self.methods, key=lambda one: one.held_out.perplexity if one.held_out else one.search_loss)

    def _shown(self, method: SearchMethod) -> list[str]:
        at, loss = method.held_out, f"{method.search_loss:.4f}"
        if at is None:
            return [name_of(method, self), "-", "-", "-", loss]
        ends = "-" if at.interval is None else f"{short_number(at.interval.low)} to {short_number(at.interval.high)}"
        return [name_of(method, self), short_number(at.perplexity), ends, f"{at.times_search:.3f}", loss]

    def rows(self) -> list[Row]:
        """One row per number. ``index`` is the pair of a factor, or the generation of a loss, from 1 on."""
        found: list[Row] = []
        for number, generation in enumerate(self.generations, 1):
            found.append(self._row(self.methods[0], "best_loss", generation.best, number))
            found.append(self._row(self.methods[0], "median_loss", generation.median, number))
        for method in self.methods:
            found.append(self._row(method, "search_loss", method.search_loss))
            if (at := method.held_out) is not None:
                found.append(self._row(method, "perplexity", at.perplexity, interval=at.interval))
                found.append(self._row(method, "times_search", at.times_search, interval=at.times_search_interval))
            found += [self._row(method, "factor", factor, pair) for pair, factor in enumerate(method.factors or ())]
        return found

    def _row(
        self,
        method: MethodInResult,
        measure: Measure,
        value: float,
        index: int | None = None,
        interval: Interval | None = None,
    ) -> Row:
        return {
            "method": method.label,
            "model": method.model,
            "length": self.target_length,
            "measure": measure,
            "index": index,
            "value": value,
            **interval_columns(interval, ENDS),
            "trained_length": self.trained_length,
        }
