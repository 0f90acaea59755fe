"""The result of a comparison: the methods of several results, each beside its partner."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import BaseModel, Field

from service.evaluation.formatting import listed
from service.evaluation.results import (
    Columns,
    DocumentInfo,
    EvaluationResult,
    MethodInResult,
    Partial,
    Row,
    documents_text,
)
from service.evaluation.scores import INTERVAL, Beside, Changes, Group, Interval, Score, Scores, interval_columns
from service.evaluation.words import best_method

Verdict = Literal["better", "worse", "equal", "unsure"]

SURE: tuple[Verdict, ...] = ("better", "worse")

MOST_SENTENCES = 6
"""Pairs that the answer has in words; the table has all."""


class Source(BaseModel):
    """A result that was compared; ``id`` is empty for a job's."""

    name: str
    default_name: str = Field(description="The name that it has when none is given.")
    model: str
    trained_length: int
    id: str = ""
    partial: Partial | None = Field(None, description="Of a job that ended early.")


class Change(BaseModel):
    """A number beside that of the partner at the same length, with the 95 % interval of this comparison."""

    value: float = Field(description="Of perplexities, the ratio to the partner's; of shares, the difference from it.")
    interval: Interval | None = Field(description="Null with too little text for one.")
    verdict: Verdict = Field(
        description="`better` and `worse` are sure by the interval. Perplexities are `equal` up to rounding, shares on "
        "each prompt."
    )


class ComparedLength(BaseModel):
    """One method at one length."""

    length: int
    value: float
    interval: Interval | None
    pieces: list[Group] | None = Field(
        description="(NLL sum, tokens) of the documents, or of the quarters of one; null for shares."
    )
    change: Change | None = Field(description="Null without a partner at this length.")


class ComparedMethod(MethodInResult):
    """A method of one of the results, by a ``name`` that no other method has."""

    name: str
    source: str = Field(description="The name of its result.")
    partner: str | None = Field(description="The name of the method that it is compared with.")
    lengths: list[ComparedLength]


class ComparisonResult(EvaluationResult):
    """The numbers of several results of one evaluation. ``trained_length`` is that of the first one."""

    optional: ClassVar[Columns] = {
        **INTERVAL,
        "partner": str,
        "change": float,
        "change_low": float,
        "change_high": float,
        "verdict": str,
    }

    evaluation: Literal["comparison"] = "comparison"
    compared: str = Field(description="The evaluation of the results.")
    measure: str
    lower_is_better: bool
    sources: list[Source]
    shared_lengths: list[int] = Field(description="The lengths that all results have.")
    documents: list[DocumentInfo]
    notes: list[str] = Field(description="Differences between the results that may explain differences of numbers.")
    methods: list[ComparedMethod]

    def scores(self) -> Scores:
        by_method = [
            {at.length: Score(at.value, at.interval, at.pieces) for at in method.lengths} for method in self.methods
        ]
        return Scores(self.measure, self.lower_is_better, by_method)

    def sentences(self) -> list[str]:
        """The best of all, each method against its partner at the longest length, and what differs beside them."""
        changes = [text for method in self.methods for text in self._changes(method)]
        more = len(changes) - MOST_SENTENCES
        best = best_method(self, self.shared_lengths[-1])
        return [
            # Of shares, only the changes below are paired.
            *(best if self.lower_is_better else best[:1]),
            *changes[:MOST_SENTENCES],
            *([f"{more} more {'is' if more == 1 else 'are'} in the table of all numbers."] if more > 0 else []),
            *self.cautions(),
        ]

    def cautions(self) -> list[str]:
        return self.notes

    def title(self) -> str:
        documents = f": {documents_text(self.documents)}" if self.documents else ""
        return f"{self.scores().title} of {self.of()} by context length{documents}"

    def of(self) -> str:
        """The names of the results."""
        return listed([source.name for source in self.sources])

    def against(self) -> str:
        """The partner of all methods, or the result with the partners."""
        partners = {method.partner for method in self.methods if method.partner is not None}
        return partners.pop() if len(partners) == 1 else self.sources[0].name

    def names(self) -> list[str]:
        return [method.name for method in self.methods]

    def changed(self) -> list[ComparedMethod]:
        """The methods with a partner at any length."""
        return [method for method in self.methods if any(at.change for at in method.lengths)]

    def changes(self) -> Changes | None:
        """The ratio to the partner, or the difference from it in points."""
        changed = self.changed()
        if not changed:
            return None
        by_method = [{at.length: self._beside(at.change) for at in one.lengths if at.change} for one in changed]
        kind, level = ("ratio", "below 1") if self.lower_is_better else ("difference in points", "above 0")
        title = f"{self.scores().title} against {self.against()} by context length: {kind}"
        mark = f'"*": the 95 % interval excludes {level[-1]}; {level} is better'
        return Changes(self._scoped(title), mark, [method.name for method in changed], by_method)

    def text_of(self, change: Change) -> str:
        """The change with its interval: "0.912 (0.887 to 0.938) times" or "+12 points (+3 to +21)"."""
        text, ends, _ = self._beside(change)
        within = f" ({ends[0]} to {ends[1]})" if ends else ""
        return f"{text}{within} {'times' if self.lower_is_better else 'points'}"

    def rows(self) -> list[Row]:
        """One row per method and length."""
        return [self._row(method, at) for method in self.methods for at in method.lengths]

    def _beside(self, change: Change) -> Beside:
        write, ends = ratio_text if self.lower_is_better else points_text, change.interval
        interval = (write(ends.low), write(ends.high)) if ends else None
        return Beside(write(change.value), interval, change.verdict in SURE)

    def _changes(self, method: ComparedMethod) -> list[str]:
        """A method against its partner at the longest length of both, and at others with another sure verdict."""
        found = [(at.length, at.change) for at in reversed(method.lengths) if at.change is not None]
        return [
            self._changed(method, length, change)
            for length, change in found
            if change is found[0][1] or (change.verdict in SURE and change.verdict != found[0][1].verdict)
        ]

    def _changed(self, method: ComparedMethod, length: int, change: Change) -> str:
        equal = "equal" if self.lower_is_better else "equal on each prompt"
        unsure = "by the 95 % interval not surely different" if change.interval else "too little text for an interval"
        verdict = {"equal": equal, "unsure": unsure}.get(change.verdict, f"surely {change.verdict}")
        if self.lower_is_better:
            relation = f"has {self.text_of(change)} the {self.measure} of {method.partner}"
        else:
            relation = f"differs from {method.partner} by {self.text_of(change)}"
        return f"At {length:,} tokens, {method.name} {relation}: {verdict}."

    def _row(self, method: ComparedMethod, at: ComparedLength) -> Row:
        change = at.change
        beside = change.interval if change else None
        return {
            "method": method.label,
            "model": method.model,
            "length": at.length,
            "source": method.source,
            "name": method.name,
            "measure": self.measure,
            "value": at.value,
            **interval_columns(at.interval),
            "partner": method.partner,
            "change": change.value if change else None,
            "change_low": beside.low if beside else None,
            "change_high": beside.high if beside else None,
            "verdict": change.verdict if change else None,
            "trained_length": next(s.trained_length for s in self.sources if s.name == method.source),
        }


def ratio_text(value: float) -> str:
    """A ratio of perplexities in few characters."""
    return f"{value:.3f}" if value < 100 else f"{value:.3g}"


def points_text(value: float) -> str:
    """A difference of shares in points of a percent, with its sign."""
    return f"{100 * value:+.3g}"
