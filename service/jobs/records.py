"""Job status returned to clients."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from service.evaluation.results import Prompt, Row
from service.evaluation.tables import csv_text

JobState = Literal["queued", "running", "done", "failed", "cancelled"]

UNFINISHED: tuple[JobState, ...] = ("queued", "running")

ENDED_EARLY: tuple[JobState, ...] = ("failed", "cancelled")


class AtWork(NamedTuple):
    """A unit at work in this process: ``tokens`` done since ``began``, in seconds of ``time.perf_counter``."""

    tokens: int
    began: float


class JobError(BaseModel):
    code: str
    message: str


class JobInfo(BaseModel):
    """A job and how far it has got. Times are UTC; tokens are those that the passes of its units read.

    The totals of an evaluation in stages are the most that it can take, until all stages are known.

    ``tokens_done`` and ``seconds`` count the units at work in this process too. ``seconds`` were spent measuring,
    whatever the clock says; ``seconds_left`` is an estimate from both.
    """

    model_config = ConfigDict(protected_namespaces=())

    id: str
    evaluation: str
    model: str | None = Field(description="As it was requested; the default model when absent.")
    models: list[str] = Field(default_factory=list, description="The served models that its units run on.")
    not_served: list[str] = Field(
        default_factory=list,
        description="Those of a queued job that the answering server does not serve: it waits for one that does.",
    )
    stalled: str | None = Field(
        None, description="The reason that an unfinished job waits for the database, at the answering server."
    )
    state: JobState
    created_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None
    units_total: int
    units_done: int = 0
    units_reused: int = Field(
        0, description="Units whose outcome was in the store already: of another job, or of an equal unit of this one."
    )
    tokens_total: int
    tokens_done: int = 0
    tokens_reused: int = Field(0, description="Tokens of the units in `units_reused`: `seconds` has no time of theirs.")
    seconds: float = 0.0
    seconds_left: float | None = Field(None, description="Absent until tokens were read, and after the end.")
    error: JobError | None = None
    request: dict[str, Any] = Field(description="The body; in listings without documents if long.")
    links: dict[str, str] = Field(
        default_factory=dict, description="Of a job that has ended: the files that it has, as they are now."
    )
    # For the server alone.
    has_result: bool = Field(False, exclude=True, description="In the database; clients see it as links.")
    queued_at: datetime | None = Field(
        None, exclude=True, description="By submission or resumption; former jobs lack it."
    )
    tokens_moved: int = Field(0, exclude=True, description="Unread ones that the store's call has queued or cancelled.")

    @property
    def may_have_partial(self) -> bool:
        """True if it ended early, with finished units and without a stored result."""
        return self.state in ENDED_EARLY and self.units_done > 0 and not self.has_result


def units_table(units: Sequence[UnitDone]) -> str:
    """Units as CSV: a column for every number that any of them has in its summary."""
    names = list(dict.fromkeys(name for unit in units for name in unit.summary))
    rows: list[Row] = [
        unit.model_dump(exclude={"summary"}) | {name: unit.summary.get(name) for name in names} for unit in units
    ]
    return csv_text(rows)


class UnitDone(BaseModel):
    """One finished unit; ``number`` counts from 1 in the order of finishing."""

    model_config = ConfigDict(from_attributes=True)

    number: int
    label: str
    name: str
    length: int
    reused: bool
    seconds: float
    summary: dict[str, float]
    prompt: Prompt = None
    position: int = Field(0, exclude=True, description="Its place in the plan.")
