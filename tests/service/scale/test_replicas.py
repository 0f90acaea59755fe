"""Replicas on Ray Serve, started as a user starts them; each test is skipped where Ray is absent."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from service.client import Ropeway
from tests.service.scale.outcomes import ENDLESS, SETTINGS, outcome
from tests.service.serving import LONG, SHORT, serve_arguments, token_ids, wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: the extra `scale` has it"),
]


@dataclass(frozen=True)
class Started:
    """`ropeway serve` with replicas: its process, base URL and log."""

    process: psutil.Popen
    url: str
    log: Path

    def replica_of(self, request_id: str) -> int | None:
        """Process id of the replica that has taken a request."""
        found = re.search(rf"pid=(\d+)\).* prompts .*request_id={request_id}\b", self.log.read_text())
        return None if found is None else int(found[1])

    def ended(self, request_id: str) -> bool:
        """True once the work of a request has ended."""
        return re.search(rf" request .*request_id={request_id}\b", self.log.read_text()) is not None


@contextmanager
def replicas(checkpoints: Path, folder: Path, *settings: str) -> Iterator[Started]:
    """`ropeway serve --replicas 2` of the tiny models."""
    log = folder / "log"
    own = (*SETTINGS, f"database_url=sqlite:///{folder / 'jobs.db'}", *settings)
    command = [sys.executable, "-m", "service.cli", *serve_arguments(checkpoints, *own), "--replicas", "2"]
    with log.open("wb") as file:
        running = psutil.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
    started: list[psutil.Process] = []
    try:
        wait_for(lambda: "replicas_ready" in log.read_text() or running.poll() is not None, 180)
        found = re.search(r"(http://127\.0\.0\.1:\d+)", log.read_text())
        assert found, log.read_text()
        started = running.children(recursive=True)
        yield Started(running, found[1], log)
    finally:
        for process in [running, *started, *_children(running)]:
            if process.is_running():
                process.kill()
        running.wait()


def _children(process: psutil.Process) -> list[psutil.Process]:
    return process.children(recursive=True) if process.is_running() else []


def replica_processes(running: psutil.Process) -> list[psutil.Process]:
    """Processes with a model, of those that a command started."""
    return [child for child in running.children(recursive=True) if "ServeReplica" in " ".join(child.cmdline())]


@pytest.fixture(scope="module")
def two(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    with replicas(checkpoints, tmp_path_factory.mktemp("two")) as started:
        yield started


def test_both_replicas_answer_alike(two: Started) -> None:
    assert len(replica_processes(two.process)) == 2
    answers = [token_ids(two.url) for _ in range(8)]
    assert answers == [answers[0]] * 8


def test_other_machines_reach_no_port_without_the_token(two: Started) -> None:
    """Beside loopback addresses there are only the gRPC ports of Serve's replicas."""
    serve = {process.pid for process in replica_processes(two.process)}
    for process in [two.process, *two.process.children(recursive=True)]:
        listening = [c for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
        outside = [c.laddr for c in listening if c.laddr.ip.removeprefix("::ffff:") != "127.0.0.1"]
        assert len(outside) <= (process.pid in serve), (process.cmdline(), outside)


def test_metrics_are_those_of_all_replicas(two: Started) -> None:
    for number in range(8):
        httpx.post(f"{two.url}/generate", json=SHORT | {"prompt": [5, number]}, timeout=60).raise_for_status()
    answers = [httpx.get(f"{two.url}/metrics", headers={"x-request-id": "mine"}) for _ in range(4)]
    started = "process_start_time_seconds"
    found = [samples_of(answer.text) for answer in answers]
    assert [answer.headers.get_list("x-request-id") for answer in answers] == [["mine"]] * 4
    assert all(len(each[started]) == 2 and each[started] == found[0][started] for each in found)
    assert all(replica for values in found[0].values() for replica, _ in values)
    tokens = {sum(value for _, value in each["ropeway_prompt_tokens_total"]) for each in found}
    assert len(tokens) == 1
    assert tokens.pop() >= 16


def samples_of(text: str) -> dict[str, list[tuple[str, float]]]:
    """Name of a metric -> (replica, value) of its samples."""
    found: dict[str, list[tuple[str, float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels.get("replica", ""), sample.value))
    return found


def test_a_log_as_json_has_one_object_a_line(checkpoints: Path, tmp_path: Path) -> None:
    with replicas(checkpoints, tmp_path, "log_format=json") as started:
        wait_for(lambda: len(replica_processes(started.process)) == 2, 30)
        pids = {str(process.pid) for process in replica_processes(started.process)}
        httpx.post(f"{started.url}/generate", json=SHORT, headers={"x-request-id": "mine"}, timeout=60)
        wait_for(lambda: '"mine"' in started.log.read_text())
        started.process.send_signal(signal.SIGTERM)
        assert started.process.wait(60) == 0
        lines = [json.loads(line) for line in started.log.read_text().splitlines()]
    assert {line["pid"] for line in lines if line.get("request_id") == "mine"} < pids
    assert {"draining", "replicas_ready", "request"} <= {line["event"] for line in lines}
    assert not [line for line in lines if "torchao" in line["event"] or "_pytree" in line["event"]]


def test_a_stream_arrives_in_parts_with_one_request_id(two: Started) -> None:
    body = SHORT | {"max_new_tokens": 300, "stream": True}
    with httpx.stream("POST", f"{two.url}/generate", json=body, headers={"x-request-id": "mine"}, timeout=60) as answer:
        parts = list(answer.iter_raw())
    assert answer.headers.get_list("x-request-id") == ["mine"]
    assert len(parts) > 20
    assert b"".join(parts).endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("content", "status"), [(b'{"prompt": "a", "max_new_tokens": -1}', 400), (b"[" * 20000, 413), (b"{", 400)]
)
def test_refusals_pass_as_they_are(two: Started, content: bytes, status: int) -> None:
    headers = {"content-type": "application/json", "x-request-timeout-seconds": "0.001"}
    answer = httpx.post(f"{two.url}/generate", content=content, headers=headers, timeout=30)
    assert answer.status_code == status
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert len(answer.headers.get_list("x-request-id")) == 1


def test_a_client_that_leaves_ends_its_work(two: Started) -> None:
    body = ENDLESS | {"stream": True}
    with httpx.stream("POST", f"{two.url}/generate", json=body, headers={"x-request-id": "left"}, timeout=60) as answer:
        parts = answer.iter_raw()
        next(parts)
        assert not two.ended("left")
    wait_for(lambda: two.ended("left"), 5)


def test_a_killed_replica_fails_its_own_requests_in_our_words(two: Started) -> None:
    names = [f"killed-{number}" for number in range(8)]
    with ThreadPoolExecutor(9) as pool, Ropeway(two.url, max_retries=8) as client:
        sent = {
            name: pool.submit(outcome, two.url, name, ENDLESS | {"max_new_tokens": 900, "stream": number % 2 == 0})
            for number, name in enumerate(names)
        }
        retried = pool.submit(client.generate, LONG, max_new_tokens=300, ignore_eos=True)
        wait_for(lambda: all(two.replica_of(name) for name in names), 30)
        (victim, _), *_ = Counter(two.replica_of(name) for name in names).most_common()
        assert not any(two.ended(name) for name in names)
        psutil.Process(victim).kill()
        for name, request in sent.items():
            assert request.result() == ("replica_lost" if two.replica_of(name) == victim else "complete")
        assert len(retried.result().results[0].token_ids) == 300
    wait_for(lambda: len(replica_processes(two.process)) == 2, 90)


def test_without_a_replica_requests_do_not_wait(two: Started) -> None:
    for replica in replica_processes(two.process):
        replica.kill()
    with suppress(httpx.TimeoutException):
        httpx.get(f"{two.url}/health", timeout=2)  # the router learns of the loss
    for path in ("/health", "/metrics"):
        answer = httpx.get(f"{two.url}{path}", timeout=5)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_replica")
    wait_for(lambda: httpx.get(f"{two.url}/health", timeout=5).status_code == 200, 90)
    wait_for(lambda: len(replica_processes(two.process)) == 2, 90)


def ranks_of(replica: psutil.Process) -> list[psutil.Process]:
    """The processes that compute with a replica."""
    return [child for child in replica.children() if "spawn_main" in " ".join(child.cmdline())]


def test_a_replica_may_be_a_group_of_ranks(checkpoints: Path, tmp_path: Path, two: Started) -> None:
    expected = token_ids(two.url)
    with replicas(checkpoints, tmp_path, "tensor_parallel=2") as started:
        groups = {replica.pid: ranks_of(replica) for replica in replica_processes(started.process)}
        assert [len(ranks) for ranks in groups.values()] == [1, 1]
        assert [token_ids(started.url) for _ in range(4)] == [expected] * 4
        lost = next(iter(groups))
        groups[lost][0].kill()
        wait_for(lambda: not psutil.pid_exists(lost), 60)
        wait_for(lambda: sum(len(ranks_of(each)) for each in replica_processes(started.process)) == 2, 120)
        assert token_ids(started.url) == expected


def test_the_end_fails_what_outlasts_the_grace(checkpoints: Path, tmp_path: Path) -> None:
    with replicas(checkpoints, tmp_path, "shutdown_grace_s=1") as started, ThreadPoolExecutor(4) as pool:
        children = started.process.children(recursive=True)
        names = [f"late-{number}" for number in range(4)]
        sent = [
            pool.submit(outcome, started.url, name, ENDLESS | {"stream": number < 2})
            for number, name in enumerate(names)
        ]
        wait_for(lambda: all(started.replica_of(name) for name in names), 30)
        started.process.send_signal(signal.SIGTERM)
        assert [request.result() for request in sent] == ["shutting_down"] * 4
        assert started.process.wait(60) == 0
        assert not psutil.wait_procs(children, timeout=10)[1]
        assert "(raylet)" not in started.log.read_text(), "Ray reports a failure of its own end"
