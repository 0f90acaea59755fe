"""`ropeway scale` on a Ray cluster of this machine; each test is skipped where Ray is absent."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from service.addresses import free_port
from tests.service.conftest import TEXT
from tests.service.jobs.postgres import postgres_server
from tests.service.scale.outcomes import ENDLESS, SETTINGS, endless, outcome
from tests.service.serving import SHORT, token_ids, wait_for

pytestmark = [
    pytest.mark.timeout(900),  # each replica starts in its own time
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: the extra `scale` has it"),
]

CLIENTS = 6
"""Clients that send one request after another."""

BIG_JOB: dict[str, Any] = {
    "evaluation": "perplexity",
    "input": TEXT,
    "methods": [{"method": "linear", "factor": 1.0 + number} for number in range(40)],
    "protocol": "sliding",
    "stride": 2,
    "lengths": [64],
    "reuse": False,
}
"""Minutes of work for the tiny model."""

ASKED = 200
"""Requests of each test under load, at least."""


@dataclass(frozen=True)
class Cluster:
    """A Ray cluster of one machine: its dashboard, the service's port and the environment of commands."""

    dashboard: str
    url: str
    environment: dict[str, str]
    settings: tuple[str, ...]

    def ropeway(self, *arguments: str, stdin: str = "") -> str:
        """Output of `ropeway scale`."""
        command = [sys.executable, "-m", "service.cli", "scale", *arguments]
        done = subprocess.run(
            command, input=stdin, env=self.environment, capture_output=True, text=True, check=False, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def deploy(self, *settings: str) -> None:
        """Deploy the tiny models with these settings."""
        given = [f"--set={setting}" for setting in (*self.settings, *settings)]
        self.ropeway("apply", "-", stdin=self.ropeway("config", *given))

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.ropeway("status", "--json"))
        return found

    def replicas(self) -> list[dict[str, Any]] | None:
        """All replicas as Serve lists them; None while the application does not run."""
        headers = {"authorization": f"Bearer {self.environment['RAY_AUTH_TOKEN']}"}
        answer = httpx.get(f"{self.dashboard}/api/serve/applications/", headers=headers, timeout=30).raise_for_status()
        application = answer.json()["applications"]["ropeway"]
        assert application["status"] != "DEPLOY_FAILED", application["message"]
        if application["status"] != "RUNNING":
            return None
        found: list[dict[str, Any]] = application["deployments"]["ropeway"]["replicas"]
        return found

    def ready(self, count: int, without: frozenset[str] = frozenset()) -> frozenset[str]:
        """Wait for so many running replicas, none of them in ``without``, and no other; their ids."""
        found: set[str] = set()

        def are_ready() -> bool:
            time.sleep(0.3)
            replicas = self.replicas() or []
            found.clear()
            found.update(replica["replica_id"] for replica in replicas)
            states = {replica["state"] for replica in replicas}
            return len(found) == count and states == {"RUNNING"} and not found & without

        wait_for(are_ready, 180)
        return frozenset(found)

    def running(self) -> int:
        """Requests that replicas work on, some seconds ago."""
        return sum(replica["running"] or 0 for replica in self.status()["replicas"])


@contextmanager
def ray_head(folder: Path, dashboard: int, environment: dict[str, str]) -> Iterator[None]:
    """`ray start --head` on loopback."""
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--num-cpus=3", "--port=0"]
    command = [*ray, "--node-ip-address=127.0.0.1", "--object-store-memory=80000000", f"--dashboard-port={dashboard}"]
    log = folder / "ray.log"
    with log.open("wb") as file:
        running = psutil.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
    try:
        wait_for(lambda: "Ray runtime started" in log.read_text() or running.poll() is not None, 120)
        assert running.poll() is None, log.read_text()
        yield
    finally:
        for process in [*running.children(recursive=True), running]:
            if process.is_running():
                process.kill()
        running.wait()


@pytest.fixture(scope="module")
def cluster(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster with a token, whose nodes know the database by their environment."""
    folder, dashboard, port = tmp_path_factory.mktemp("cluster"), free_port(), free_port()
    with postgres_server() as database:
        own = {
            "PYTHONPATH": str(Path(__file__).resolve().parents[3]),
            "OMP_NUM_THREADS": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_DASHBOARD_ADDRESS": f"http://127.0.0.1:{dashboard}",
            "ROPEWAY_DATABASE_URL": database.format(name="postgres"),
        }
        environment = {**os.environ, **own}
        settings = (*SETTINGS, f"model={checkpoints}", f"port={port}", "device=cpu")
        with ray_head(folder, dashboard, environment):
            yield Cluster(own["RAY_DASHBOARD_ADDRESS"], f"http://127.0.0.1:{port}", environment, settings)


@pytest.fixture
def two(cluster: Cluster) -> frozenset[str]:
    """Ids of two replicas that run."""
    cluster.deploy("replicas=2")
    return cluster.ready(2)


@dataclass
class Load:
    """Clients that send short requests, every second as a stream, until ``stop`` is set."""

    url: str
    stop: threading.Event = field(default_factory=threading.Event)
    outcomes: Counter[str] = field(default_factory=Counter)

    def client(self, number: int) -> None:
        sent = 0
        while not self.stop.is_set():
            prompt = [5, 6, 7 + number, 8 + sent % 20]
            body = SHORT | {"prompt": prompt, "stream": sent % 2 == 0}
            try:
                found = outcome(self.url, f"load-{number}-{sent}", body)
            except httpx.HTTPError as error:
                found = repr(error)
            self.outcomes[found] += 1
            sent += 1


@contextmanager
def load(url: str) -> Iterator[Load]:
    """Clients for as long as the block runs, and until they have sent ``ASKED`` requests."""
    sending = Load(url)
    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(sending.client, number) for number in range(CLIENTS)]
        try:
            wait_for(lambda: sending.outcomes.total() >= ASKED / 4, 60)
            yield sending
            enough = max(ASKED, sending.outcomes.total() + ASKED / 4)
            wait_for(lambda: sending.outcomes.total() >= enough, 120)
        finally:
            sending.stop.set()
        for client in clients:
            client.result()


def test_the_status_has_what_runs(cluster: Cluster, two: frozenset[str]) -> None:
    answers = [token_ids(cluster.url) for _ in range(8)]
    assert answers == [answers[0]] * 8
    with ThreadPoolExecutor(4) as pool:
        sent = [pool.submit(outcome, cluster.url, f"counted-{n}", ENDLESS) for n in range(4)]
        wait_for(lambda: cluster.running() == 4, 40)
        status = cluster.status()
        assert {replica["id"] for replica in status["replicas"]} == two
        assert (status["wanted"], status["queued"]) == (2, 0)
        assert set(status["proxies"].values()) == {"HEALTHY"}
        assert [request.result() for request in sent] == ["complete"] * 4
    printed = cluster.ropeway("status")
    assert all(name in printed for name in two)


def test_a_redeploy_under_load_fails_no_request(cluster: Cluster, two: frozenset[str]) -> None:
    with load(cluster.url) as sending:
        cluster.deploy("replicas=2", "max_queue=100")
        cluster.ready(2, without=two)
    assert sending.outcomes.keys() == {"complete"}, sending.outcomes


def test_another_number_of_replicas_under_load_fails_no_request(cluster: Cluster, two: frozenset[str]) -> None:
    """The replica that stays is not restarted."""
    with load(cluster.url) as sending:
        cluster.deploy("replicas=1")
        (left,) = cluster.ready(1)
    assert left in two
    assert sending.outcomes.keys() == {"complete"}, sending.outcomes


def test_a_redeploy_fails_what_outlasts_the_grace(cluster: Cluster) -> None:
    cluster.deploy("replicas=2", "shutdown_grace_s=1")
    before = cluster.ready(2)
    with ThreadPoolExecutor(6) as pool:
        sent = [pool.submit(outcome, cluster.url, f"late-{n}", endless(n) | {"stream": n % 2 == 0}) for n in range(6)]
        wait_for(lambda: cluster.running() == 6, 40)
        cluster.deploy("replicas=2", "shutdown_grace_s=1", "max_queue=100")
        found = Counter(request.result() for request in sent)
    cluster.ready(2, without=before)
    assert found.keys() <= {"shutting_down", "complete"}
    assert found["shutting_down"]


def test_jobs_alone_add_a_replica(cluster: Cluster) -> None:
    """Three unfinished jobs need two replicas that aim at two requests each."""
    cluster.deploy("replicas=1")
    without_policy = cluster.ready(1)
    cluster.deploy("max_replicas=2", "target_ongoing_requests=2")
    (first,) = cluster.ready(1, without=without_policy)
    with httpx.Client(base_url=cluster.url, timeout=60) as client:
        jobs = [client.post("/jobs", json=BIG_JOB).raise_for_status().json()["id"] for _ in range(3)]
        assert first in cluster.ready(2)
        states = [client.get(f"/jobs/{job}").json()["state"] for job in jobs]
        assert set(states) <= {"queued", "running"}, states
        for job in jobs:
            client.delete(f"/jobs/{job}").raise_for_status()
