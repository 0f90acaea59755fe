"""A sweep job on one server and on two that share a database: time, CPU time of each, same result.

Three servers run all the time: one has a database to itself, two have a common one. Both cases take turns, so that a
busy machine slows both alike.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.replicas.simulation.processes import cpu_s
from benchmarks.replicas.simulation_times import SETTINGS
from benchmarks.servers.load import Served, server
from benchmarks.timing import Report, interleaved
from service.client import Ropeway

GOAL = 0.65
METHODS: list[dict[str, Any]] = [
    {"method": "default"},
    {"method": "linear", "factor": 2.0},
    {"method": "self_extend", "group_size": 4, "neighbor_window": 32},
]
DOCUMENTS, TOKENS, LENGTHS = 12, 900, (256, 512)


def run(quick: bool = False) -> Report:
    """The same job in turn; nothing is reused between jobs."""
    report = Report(
        "job_sharing",
        f"a sweep as a job on two servers against one (goal {GOAL}), demo model, one thread each",
        ("what", "one server", "two servers", "two / one"),
    )
    documents = [[(a * 7 + i) % 1900 + 3 for i in range(TOKENS)] for a in range(2 if quick else DOCUMENTS)]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cases = {name: Case(_servers(stack, folder / f"{name}.db", count)) for name, count in (("one", 1), ("two", 2))}
        timings = interleaved(
            {name: lambda case=case: case.run(documents) for name, case in cases.items()},
            rounds=1 if quick else 3,
        )
    ratio = f"{timings.ratio('two', 'one'):.2f} ({timings.spread('two', 'one')})"
    report.add("seconds", timings.median("one"), timings.median("two"), ratio)
    one, two = (case.cpu_s for case in cases.values())
    seconds = [f"{min(pair):.1f} and {max(pair):.1f}" for pair in two]
    report.add("CPU seconds of all servers", _mean(one), _mean(two), f"{_mean(two) / _mean(one):.2f}")
    report.add("CPU seconds of each server of a pair", "", "; ".join(seconds), "")
    found = {name: len(case.results) for name, case in cases.items()}
    equal = cases["one"].results == cases["two"].results
    report.add("different results", found["one"], found["two"], "the same" if equal else "NOT the same")
    return report


@dataclass
class Case:
    """Servers with a common database. Each run appends their CPU seconds; ``results`` are hashes of the numbers."""

    servers: Sequence[Served]
    cpu_s: list[list[float]] = field(default_factory=list)
    results: set[str] = field(default_factory=set)

    def run(self, documents: list[list[int]]) -> None:
        """Submit the sweep to the first server and wait for its result."""
        before = [cpu_s(served.pid) for served in self.servers]
        with Ropeway(self.servers[0].url) as client:
            evaluation = {"evaluation": "perplexity", "input": documents, "protocol": "sliding", "stride": 200}
            job = client.submit("sweep", methods=METHODS, lengths=list(LENGTHS), evaluations=[evaluation], reuse=False)
            for _ in client.follow(job.id):
                pass
            result = client.result(job.id)
        after = [cpu_s(served.pid) for served in self.servers]
        self.cpu_s.append([b - a for a, b in zip(before, after, strict=True)])
        numbers = json.dumps(result.numbers(), sort_keys=True, default=str)
        self.results.add(hashlib.sha256(numbers.encode()).hexdigest())


def _servers(stack: ExitStack, database: Path, count: int) -> list[Served]:
    settings = SETTINGS | {"database_url": f"sqlite:///{database}"}
    return [stack.enter_context(server(settings)) for _ in range(count)]


def _mean(cpu_s: list[list[float]]) -> float:
    return sum(map(sum, cpu_s)) / len(cpu_s)
