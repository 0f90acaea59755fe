"""Ten tenants attack at once for a few seconds: the checks of the siege, without its timings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.servers import siege
from benchmarks.servers.load import Served
from service.models.checkpoint.loading import DEMO
from tests.service.serving import process


@pytest.mark.slow
def test_attackers_make_no_answer_wrong_and_no_server_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def server(settings: Mapping[str, Any]) -> Iterator[Served]:
        """As the siege's own, as a fork. Its processes that draw are forks of another parent: their memory is not
        counted."""
        given = {"database_url": f"sqlite:///{tmp_path}/jobs.db", **settings, "model": str(DEMO)}
        log = tmp_path / "log"
        with process(DEMO, *(f"{name}={value}" for name, value in given.items()), log=log) as (running, url):
            yield Served(url, running.pid, log)

    monkeypatch.setattr(siege, "server", server)
    rows = {what: (value, goal) for what, value, goal, _ in siege.run(quick=True).rows}
    exact = {what: value for what, (value, goal) in rows.items() if goal in ("0", "equal")}
    assert exact == {
        "probes not answered with 200": "0",
        "a job that ran meanwhile, against the same job alone": "equal",
        "5xx other than 503 and 504": "0",
    }
    most, bound = rows["most resident memory, children included"]
    assert float(most.split()[0]) < float(bound.split()[0])
    assert "seconds from SIGTERM to the end" in rows
