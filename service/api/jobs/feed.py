"""News of jobs: one lookup serves all followers of a job, less often the more there are."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from service.jobs.records import JobInfo, UnitDone

AT_MOST_EVERY_S = 0.1
"""Between two events of one job, which gets further with every chunk."""

PER_FOLLOWER_S = 0.0025
"""Added to that for every stream of the server: sending takes time on the one event loop."""


@dataclass
class News:
    """The state of a job and its finished units, as JSON. A change of ``info.tokens_done`` or ``info.stalled`` is
    progress."""

    info: JobInfo
    info_json: str
    units: list[tuple[int, str]] = field(default_factory=list)


@dataclass
class _Followed:
    followers: int = 0
    looked_at: float = 0.0
    news: News | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class JobFeed:
    """``info`` and ``units`` look a job up in the store: (tenant, job id), and for units those after a number."""

    def __init__(
        self,
        info: Callable[[str, str], Awaitable[JobInfo]],
        units: Callable[[str, int], Awaitable[list[UnitDone]]],
    ) -> None:
        self._info, self._units = info, units
        self._jobs: dict[tuple[str, str], _Followed] = {}

    @contextmanager
    def following(self, tenant: str, job_id: str) -> Iterator[None]:
        """Inside, ``news`` of the job is remembered."""
        key = tenant, job_id
        followed = self._jobs.setdefault(key, _Followed())
        followed.followers += 1
        try:
            yield
        finally:
            followed.followers -= 1
            if not followed.followers:
                del self._jobs[key]

    @property
    def pause_s(self) -> float:
        """Seconds between two looks of a follower."""
        return AT_MOST_EVERY_S + PER_FOLLOWER_S * sum(followed.followers for followed in self._jobs.values())

    async def news(self, tenant: str, job_id: str) -> News:
        """The job, at most ``AT_MOST_EVERY_S`` old. Call it inside ``following``.

        Raises:
            UnknownJob, StoreOutOfReach: from the store.
        """
        followed = self._jobs[tenant, job_id]
        asked_at = time.monotonic()
        async with followed.lock:
            if followed.news is None or followed.looked_at < asked_at - AT_MOST_EVERY_S:
                looked_at = time.monotonic()
                info = await self._info(tenant, job_id)
                known = [] if followed.news is None else followed.news.units
                new = await self._units(job_id, known[-1][0] if known else 0)
                units = [*known, *((unit.number, unit.model_dump_json()) for unit in new)]
                followed.news = News(info, info.model_dump_json(), units)
                followed.looked_at = looked_at
            return followed.news
