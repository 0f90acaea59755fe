"""Answers about evaluations: plans, jobs and their units."""

from __future__ import annotations

from pydantic import BaseModel

from service.jobs.records import JobInfo, UnitDone


class UnitList(BaseModel):
    """Finished units of a job, in the order of finishing."""

    units: list[UnitDone]


class JobList(BaseModel):
    """Newest first; ``before`` the last one's id gives the next."""

    jobs: list[JobInfo]


class PlanInfo(BaseModel):
    """Units of an evaluation, and tokens that their passes read; both are the most for an evaluation in stages."""

    units: int
    tokens: int
