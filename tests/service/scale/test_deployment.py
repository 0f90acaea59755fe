"""The end of one replica, without Serve; each test is skipped where Ray is absent."""

from __future__ import annotations

import asyncio
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from service.api.http.access import ApiKeys
from service.api.http.scope import Traffic
from service.jobs.database.calls import StoreCalls
from service.jobs.storage.store import JobStore
from service.scale import private_names
from service.settings import Settings
from tests.service.jobs.adding import add

pytestmark = [
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: the extra `scale` has it"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Ray's own
]


@pytest.mark.parametrize(("grace_s", "refused_after_s"), [(5.0, 0.8), (0.1, 0.1)])
async def test_a_replica_without_requests_takes_late_ones_for_a_while(
    monkeypatch: pytest.MonkeyPatch, grace_s: float, refused_after_s: float
) -> None:
    """Proxies learn of its end after it."""
    from service.scale import deployment

    monkeypatch.setattr(private_names, "is_stopping", lambda: True)
    monkeypatch.setattr(deployment, "LATE_S", 0.4)
    traffic = Traffic()
    app = SimpleNamespace(state=SimpleNamespace(traffic=traffic, models=SimpleNamespace(stop=lambda: None)))
    began = time.monotonic()
    ending = asyncio.create_task(deployment._drain_at_the_end(app, grace_s))  # type: ignore[arg-type]
    traffic.in_flight = 1
    asyncio.get_running_loop().call_later(0.4, setattr, traffic, "in_flight", 0)
    await traffic.drained.wait()
    assert refused_after_s - 0.1 < time.monotonic() - began < refused_after_s + 0.6
    await ending


async def test_a_replica_reports_the_unfinished_jobs(tmp_path: Path) -> None:
    from service.scale.deployment import Ropeway

    store, calls = JobStore(f"sqlite:///{tmp_path / 'jobs.db'}"), StoreCalls()
    replica = Ropeway(Settings(_env_file=None))
    assert await replica.record_autoscaling_stats() == {"unfinished_jobs": 0}
    state = SimpleNamespace(jobs=store, store_calls=calls, keys=ApiKeys((), None))
    replica._app = SimpleNamespace(state=state)  # type: ignore[assignment]
    add(store)
    assert await replica.record_autoscaling_stats() == {"unfinished_jobs": 1}
    calls.close()
    store.close()
