"""SIGKILL at random moments: no finished unit is lost or there twice, and the result is that of one run."""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from sqlalchemy import select

from service.evaluation.catalogue import plan_of
from service.evaluation.perplexity.request import PerplexityRequest
from service.jobs.database.tables import FinishedUnit
from service.jobs.storage.store import JobStore
from service.models.registry import ModelRegistry
from service.settings import Settings
from tests.forks.process import Forked, forked
from tests.service.jobs import server
from tests.service.jobs.bench import in_one_run, result_of
from tests.service.serving import SMALL, wait_for

Rows = dict[tuple[int, int], tuple[Any, ...]]


class Server(NamedTuple):
    process: Forked
    ready: Path
    log: Path

    def works(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        return self.ready.exists()


def request_of(n: int) -> PerplexityRequest:
    """25 units of 13 chunks each; every other job takes no outcomes of others."""
    documents = [[(n + start + i) % 380 + 2 for i in range(200)] for start in range(5)]
    methods = [{"method": "default"}, *({"method": "linear", "factor": float(factor)} for factor in range(2, 6))]
    body = {"input": documents, "methods": methods, "lengths": [200], "reuse": n % 2 == 0}
    return PerplexityRequest.model_validate(body)


def finished_units(store: JobStore) -> Rows:
    """(job, position) -> whatever must not change once it is there."""
    columns = (FinishedUnit.number, FinishedUnit.key, FinishedUnit.seconds, FinishedUnit.reused)
    with store.database.reading() as session:
        rows = session.execute(select(FinishedUnit.job, FinishedUnit.position, *columns)).all()
    assert len({row[:2] for row in rows}) == len(rows)
    return {(row[0], row[1]): tuple(row[2:]) for row in rows}


@pytest.mark.slow
@pytest.mark.parametrize(("url", "kills"), [("sqlite", 3), ("postgresql", 4)], indirect=["url"])
def test_killed_servers_lose_nothing(url: str, kills: int, checkpoints: Path, tmp_path: Path) -> None:
    """Three servers on one database; a random one is killed and begins again."""
    settings = Settings(_env_file=None, **SMALL | {"model": str(checkpoints / "tiny"), "score_chunk": 16})
    settings = settings.model_copy(update={"threads": torch.get_num_threads(), "lease_s": 2.0})
    registry, store, chance = ModelRegistry(settings), JobStore(url), random.Random(20)
    jobs: list[tuple[str, PerplexityRequest]] = []
    before: Rows = {}

    def add() -> None:
        request = request_of(len(jobs))
        plan = plan_of(request, registry, settings)
        tenant = f"tenant{len(jobs) % 2}"
        job = store.add(tenant, request, models=["tiny"], units=len(plan.units), tokens=plan.tokens)
        jobs.append((job.id, request))

    def unfinished() -> int:
        found = [store.get(f"tenant{n % 2}", job_id) for n, (job_id, _) in enumerate(jobs)]
        assert not [job.error for job in found if job.error]
        return sum(job.state != "done" for job in found)

    def begun(name: str) -> Server:
        ready, log = tmp_path / f"ready{name}", tmp_path / f"log{name}"
        return Server(forked(server.serve, url, settings, ready, log=log), ready, log)

    running = [begun(f"first{n}") for n in range(3)]
    for kill in range(kills):
        while unfinished() < 2:
            add()
        wait_for(lambda: sum(one.works() for one in running) >= 2, 60)  # the third may still begin
        wait_for(lambda: len(finished_units(store)) > len(before))  # noqa: B023 - called in this round
        time.sleep(chance.uniform(0, 0.1))
        place = chance.choice([place for place, one in enumerate(running) if one.works()])
        running[place].process.kill()
        running[place].process.wait()
        found = finished_units(store)
        assert before.items() <= found.items()
        before = found
        running[place] = begun(f"{kill}")
    wait_for(lambda: unfinished() == 0, 60)
    for one in running:
        one.process.kill()
        one.process.wait()
    assert_complete(store, registry, settings, jobs)
    store.close()
    registry.close()


def assert_complete(
    store: JobStore, registry: ModelRegistry, settings: Settings, jobs: list[tuple[str, PerplexityRequest]]
) -> None:
    """Every unit of every job is finished once, and the result is that of one run."""
    for n, (job_id, request) in enumerate(jobs):
        plan = plan_of(request, registry, settings)
        done = store.done_units(job_id)
        assert [unit.number for unit in done] == list(range(1, len(plan.units) + 1))
        assert Counter((unit.label, unit.name) for unit in done) == Counter(
            (unit.subject.label, unit.name) for unit in plan.units
        )
        assert result_of(store, f"tenant{n % 2}", job_id).numbers() == in_one_run(plan)
