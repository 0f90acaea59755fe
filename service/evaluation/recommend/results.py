"""The result of a recommendation."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel, Field

from service.evaluation.answers import AnsweringResult
from service.evaluation.cost import EncodingCost
from service.evaluation.formatting import percent, short_number
from service.evaluation.results import Columns, DocumentInfo, MethodInResult, Row, name_of
from service.evaluation.scores import Interval, Overview, Score, Scores

if TYPE_CHECKING:
    from service.policy.policy import Policy

OTHERS = (
    "Its perplexity is that of the ends of these windows, after repeated text. "
    "So the evaluation perplexity has other values."
)
"""For readers who compare the two."""

FEWER = "Candidates that left early read fewer windows: only their loss above the best, over shared windows, compares."
"""For readers of a table with such candidates."""

Verdict = Literal["recommended", "tied", "unsure", "worse", "dropped", "windowed", "reference"]

RecallShown = Literal["yes", "no", "unsure"]


class Memory(BaseModel):
    """``tokens`` that the cache keeps of the target length, and the ``bytes`` of their keys and values.

    Layers that attend count, and those with a window as far as it reaches. Layers that share keys count once.
    States of other layers do not count: their size is the same at any length.
    """

    tokens: int
    bytes: int


class AtLength(BaseModel):
    """One candidate at one length. ``loss`` is its mean NLL in nats plus, where recall counts, its share of repeated
    tokens not copied; ``difference`` is from the best one at that length over the windows that both have read."""

    length: int
    windows: int
    perplexity: float
    perplexity_interval: Interval | None
    recall: float = Field(description="Share of the repeated tokens that the model predicts.")
    recall_interval: Interval | None
    recall_first: float = Field(description="The same share of their first occurrence, which nothing repeats.")
    loss: float
    difference: float
    difference_interval: Interval | None
    good_enough: bool = Field(description="The difference is at most the tolerance.")


class RecommendMethod(MethodInResult):
    """One candidate. ``rounds`` is the number of rounds that it was in.

    ``verdict`` is about the target length. A ``tied`` one is no worse than the recommended one as far as its windows
    show. An ``unsure`` one is worse by more than the tolerance on average, and windows do not separate it from the
    best. A ``windowed`` one cannot be recommended beside others, because recall could not be measured. The own
    encoding is the ``reference`` alone where it ends before that length, or ``target`` cannot express it there.
    """

    request: dict[str, Any] = Field(description="The encoding as a request has it.")
    cost: EncodingCost
    memory: Memory
    window: int | None = Field(description="Most keys that a query attends to; null: all before it.")
    rounds: int
    verdict: Verdict
    lengths: list[AtLength]


class Avoid(BaseModel):
    """A candidate not to use at the target length, and why."""

    label: str
    reason: str


class Range(BaseModel):
    """The cheapest encoding that is good enough for lengths up to ``up_to`` tokens."""

    up_to: int
    label: str
    pe: dict[str, Any]


class Answer(BaseModel):
    """``label`` and ``pe`` are of the encoding to use. ``native_is_enough``: it is the checkpoint's own.

    ``confidence`` is the probability, by Student's t, that it has a lower loss than ``runner_up``. It is over
    documents, windows or quarters of the text, as the intervals, and null with fewer than three. ``runner_up`` is
    the next among the candidates of the last round. ``recall_counts``: the model surely copies within its trained
    length, so recall is a part of the loss.
    """

    label: str
    pe: dict[str, Any]
    native_is_enough: bool
    recall_counts: bool
    recall_shown: RecallShown = Field(
        "unsure",
        description="The model copies within its trained length: surely, surely not, or the windows are too few.",
    )
    keeps_quality: bool | None = Field(
        None,
        description="It is as good at the target length as the model within its trained length, but for the tolerance. "
        "Null: the windows do not show it.",
    )
    runner_up: str | None
    confidence: float | None
    tied: list[str]
    runners_up: list[str]
    exports_to: list[str] | None = Field(
        None,
        description="Systems of `POST /export` that can express it at the target length. Null: none covers the model.",
    )
    exportable: str | None = Field(
        None,
        description="The best candidate of the last round that one of these systems can express. Null: none, or only "
        "those to avoid.",
    )
    exportable_to: list[str] | None = Field(
        None, description="Systems that can express `exportable`, those without differences first."
    )
    export_differences: dict[str, list[str]] | None = Field(
        None,
        description="Differences of `exportable` in a system to the encoding here, by system; of `target` if given.",
    )
    target: str | None = Field(None, description="The system of the request: only what it can express is compared.")
    avoid: list[Avoid]
    ranges: list[Range]
    words: list[str]


class RecommendResult(AnsweringResult):
    """The answer, and the evidence of every candidate."""

    optional: ClassVar[Columns] = {
        **{f"{of}_{end}": float for of in ("perplexity", "recall", "difference") for end in ("low", "high")},
        "verdict": str,
    }

    evaluation: Literal["recommend"] = "recommend"
    fingerprint: str = Field(description="SHA-256 of the measured model's configuration and weights.")
    target_length: int
    reference_length: int = Field(description="The checkpoint's own encoding is the reference at this length.")
    lengths: list[int]
    tolerance: float
    windows: int = Field(description="Windows of the last round.")
    tail: int = Field(description="Tokens of a window that are scored for perplexity.")
    segment: int = Field(description="Tokens of a repeated segment.")
    seed: int
    bos: bool
    tokens_read: int
    tokens_of_all: int = Field(description="Tokens of all candidates in all windows at the target length.")
    documents: list[DocumentInfo]
    skipped: list[DocumentInfo] = Field([], description="Documents left out as shorter than the longest length.")
    answer: Answer
    methods: list[RecommendMethod]

    def policy(self, created: datetime) -> Policy:
        """The cheapest encoding that is good enough, by length; it ends at the target length."""
        from service.evaluation.words import measured_text
        from service.policy.policy import Calibration, parse_policy

        return parse_policy(
            {
                "version": 1,
                "model": self.model,
                "fingerprint": self.fingerprint,
                "trained_length": self.trained_length,
                "ranges": [{"up_to": found.up_to, "pe": found.pe} for found in self.answer.ranges],
                "calibration": Calibration(id=self.id or None, created=created, measured=[*self.words()]),
                "notes": [measured_text(self.documents)],
            }
        )

    def scores(self) -> Scores:
        """Perplexity by context length."""
        by_method = [
            {at.length: Score(at.perplexity, at.perplexity_interval) for at in method.lengths}
            for method in self.methods
        ]
        return Scores("perplexity", True, by_method)

    def overview(self) -> Overview:
        """One row per candidate at the target length, the best first."""
        ranked = self.ranked()
        most = max((at.windows for _, at in ranked), default=0)
        fewer = [FEWER] if any(at.windows < most for _, at in ranked) else []
        best = frozenset(row for row, (method, _) in enumerate(ranked) if method.verdict == "recommended")
        return Overview(
            columns=["method", "perplexity", "recall", "above", "windows", "verdict"],
            rows=[
                [
                    name_of(method, self),
                    short_number(at.perplexity) if at.windows == most else "-",
                    percent(at.recall) if at.windows == most else "-",
                    f"{at.difference:.3f}",
                    str(at.windows),
                    method.verdict,
                ]
                for method, at in ranked
            ],
            best=best,
            caption="\n".join([*self.answer.words[1:], OTHERS, *fewer]),
        )

    def ranked(self) -> list[tuple[RecommendMethod, AtLength]]:
        """The candidates at the target length: the recommended one, then by rounds, then by loss above the best."""
        found = [(method, at) for method in self.methods for at in method.lengths if at.length == self.target_length]
        return sorted(found, key=lambda each: (each[0].verdict != "recommended", -each[0].rounds, each[1].difference))

    def rows(self) -> list[Row]:
        """One row per candidate and length."""
        return [self._row(method, at) for method in self.methods for at in method.lengths]

    def _row(self, method: RecommendMethod, at: AtLength) -> Row:
        intervals: Row = {}
        for name in ("perplexity", "recall", "difference"):
            interval: Interval | None = getattr(at, f"{name}_interval")
            low, high = (None, None) if interval is None else (interval.low, interval.high)
            intervals |= {f"{name}_low": low, f"{name}_high": high}
        numbers = at.model_dump(include={"length", "windows", "perplexity", "recall", "recall_first"})
        compared = at.model_dump(include={"loss", "difference", "good_enough"})
        return {
            "method": method.label,
            "model": method.model,
            **numbers,
            **compared,
            **intervals,
            "rounds": method.rounds,
            "verdict": method.verdict if at.length == self.target_length else None,
            "attentions": method.cost.attentions,
            "rotated_when_read": method.cost.rotated_when_read,
            "bias": method.cost.bias,
            "cache_bytes": method.memory.bytes,
            "trained_length": self.trained_length,
        }
