"""1 to 1,000 simulated replicas: affinity, goodput, stale loads, a lost node, a surge.

Service times are those that ``simulation_times`` has recorded. Every run is the same for the same times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.replicas.simulation import experiments
from benchmarks.replicas.simulation.experiments import Bench
from benchmarks.replicas.simulation.figures import SHARE, Chart, counts, linear, seconds
from benchmarks.replicas.simulation.times import recorded
from benchmarks.timing import Report

LOAD = 0.5
COUNTS, LOADS = (1, 2, 4, 8, 16, 64, 256, 1000), (0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 1.0)
PROXIES = (1, 4, 16, 64, 128)
DELAYS = (0.0, 5.0, 30.0)
FACTOR = 2.5
Numbers = list[dict[str, Any]]


def run(quick: bool = False) -> Report:
    """Five questions of operators."""
    bench = Bench(recorded(), requests=20 if quick else 40)
    some = slice(0, 3) if quick else slice(None)
    numbers: dict[str, Numbers] = {
        "replicas": list(experiments.by_replicas(bench, COUNTS[some], LOAD)),
        "load": list(experiments.by_load(bench, 16, LOADS[some])),
        "proxies": list(experiments.by_proxies(bench, 64, PROXIES[some], LOAD)),
        "loss": list(experiments.after_a_loss(bench, 16, 4, LOAD)),
        "surge": list(experiments.after_a_surge(bench, 4, FACTOR, LOAD, DELAYS)),
    }
    report = Report(
        "simulation_scale",
        "simulated replicas with the recorded service times of one",
        ("question", "case", "cached prefixes", "first token, p99", "answer, p99", "goodput"),
    )
    for question, rows in numbers.items():
        for row in rows if question in ("replicas", "load", "proxies") else ():
            case = f"{row['policy']}, {question} {row.get('replicas', row.get('load', row.get('proxies')))}"
            goodput = f"{row['goodput']:.2f}/s"
            report.add(question, case, _percent(row["hits"]), row["first_p99_s"], row["whole_p99_s"], goodput)
    report.numbers = {"times": vars(bench.times), "rate": bench.rate, "limit_s": bench.limit_s, **numbers}
    report.pictures = {
        f"{report.name}-{name}": chart.png(numbers[name.partition("-")[0]])
        for name, chart in charts(bench, numbers).items()
    }
    report.notes += [
        f"load 1 is {bench.rate:.1f} requests a second: one replica when all prefixes are cached",
        f"goodput: answers within {bench.limit_s:.2f} s, three times a single one, per replica and second",
        "512 of 544 prompt tokens are one of 12 prefixes per replica, drawn by Zipf's law (0.9); 32 new tokens",
    ]
    return report


def charts(bench: Bench, numbers: dict[str, Numbers]) -> dict[str, Chart]:
    """Chart by the name of its picture, which begins with that of its rows."""
    replicas, load, proxies, loss, surge = numbers.values()
    busy = f"load {LOAD:g}, 8 replicas and one proxy on each node"
    x = counts("replicas", [row["replicas"] for row in replicas])
    over = "requests offered per replica and second"
    surge_text = f"4 replicas at load {LOAD:g}; at 0 s the rate is {FACTOR:g} times as high"
    loss_text = (
        f"16 replicas at load {LOAD:g}; at 0 s 4 of them end, and start again within {bench.times.start_s:.0f} s"
    )
    p99 = "time to first token, p99, s"
    return {
        "replicas-hits": Chart("Cached prefixes by replicas", busy, "replicas", "hits", "policy", x, SHARE),
        "replicas-p99": Chart(
            "Time to first token by replicas", busy, "replicas", "first_p99_s", "policy", x, _p99(replicas)
        ),
        "load": Chart(
            "Goodput by load",
            f"16 replicas; answers within {bench.limit_s:.1f} s",
            "offered",
            "goodput",
            "policy",
            linear(over, load, "offered"),
            linear("goodput per replica and second", load, "offered"),
        ),
        "proxies": Chart(
            "Time to first token by proxies",
            f"64 replicas, load {LOAD:g}: the more proxies, the less each knows",
            "proxies",
            "first_p99_s",
            "policy",
            counts("proxies", [row["proxies"] for row in proxies]),
            _p99(proxies),
        ),
        "loss": Chart(
            "A lost node", loss_text, "seconds", "first_p99_s", "policy", linear("seconds", loss, "seconds"), _p99(loss)
        ),
        "surge": Chart(
            "A surge, by the delay of autoscaling",
            surge_text,
            "seconds",
            "first_p99_s",
            "delay_s",
            linear("seconds", surge, "seconds"),
            seconds(p99, surge, "first_p99_s"),
        ),
    }


def _p99(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return seconds("time to first token, p99, s", rows, "first_p99_s")


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
