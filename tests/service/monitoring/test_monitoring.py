"""Queries of Prometheus and Grafana, against the metrics of the live server."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

import service
from service.engine.metrics import EngineMetrics
from service.metrics import Metrics
from tests.conftest import ROOT

MONITORING = Path(service.__file__).parent / "monitoring"
DASHBOARD: dict[str, Any] = json.loads((MONITORING / "grafana/dashboards/ropeway.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
VARIABLES = DASHBOARD["templating"]["list"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
PROMETHEUS: dict[str, Any] = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
ALERTS = [
    rule for group in yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"] for rule in group["rules"]
]
ENDINGS = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
ADDED_BY_PROMETHEUS = {"job", "instance"}


@pytest.fixture(scope="module")
def metrics(server: str) -> dict[str, set[str]]:
    """Names that can be queried, with the labels of those that have samples."""
    body = {"prompt": [5, 6, 7], "pe": {"method": "yarn", "factor": 2}, "max_new_tokens": 4}
    httpx.post(f"{server}/generate", json=body).raise_for_status()
    httpx.post(f"{server}/perplexity", json={"input": [5, 6, 7] * 20, "lengths": [32]}, timeout=60).raise_for_status()
    httpx.get(f"{server}/nowhere")
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(httpx.get(f"{server}/metrics").text):
        found |= {family.name + ending: set() for ending in ENDINGS.get(family.type, ())}
        for sample in family.samples:
            found[sample.name] = set(sample.labels)
    return found


def names(query: str) -> set[str]:
    return set(re.findall(r"\b(?:ropeway|process)_\w+", query))


def labels(query: str) -> set[str]:
    """Labels that a query selects or groups by."""
    grouped = [name.strip() for group in re.findall(r"\bby \(([^)]*)\)", query) for name in group.split(",")]
    return {*grouped, *re.findall(r'(\w+)(?:=~|!~|!=|=)"', query)}


def test_the_reading_itself() -> None:
    query = 'sum by (le, a) (rate(ropeway_x_bucket{b=~"$m",c="d"}[$__rate_interval]))'
    assert (names(query), labels(query)) == ({"ropeway_x_bucket"}, {"le", "a", "b", "c"})


@pytest.mark.parametrize("query", [*QUERIES, *(variable["definition"] for variable in VARIABLES)])
def test_what_a_panel_asks_for_exists(query: str, metrics: dict[str, set[str]]) -> None:
    asked = names(query)
    assert asked
    assert asked <= metrics.keys()
    known = set().union(*(metrics[name] for name in asked))
    if known:  # a counter of what has never happened has no samples
        assert labels(query) - ADDED_BY_PROMETHEUS <= known
    for left, right in ("()", "{}", "[]"):
        assert query.count(left) == query.count(right)


def test_every_metric_of_ours_has_a_panel(metrics: dict[str, set[str]]) -> None:
    shown = set().union(*map(names, QUERIES))
    ours = {name for name in metrics if name.startswith("ropeway_")}
    ending = re.compile(r"_(bucket|sum|count|created|total)$")
    assert {ending.sub("", name) for name in ours} - {ending.sub("", name) for name in shown} == set()


def test_every_variable_is_one_of_the_dashboard() -> None:
    builtin = {"__rate_interval", "__range"}
    used = {name for query in QUERIES for name in re.findall(r"\$(\w+)", query)}
    assert used - builtin == {variable["name"] for variable in VARIABLES}


def test_panels_are_told_apart_and_do_not_overlap() -> None:
    everything = DASHBOARD["panels"]
    assert len({panel["id"] for panel in everything}) == len(everything)
    taken: set[tuple[int, int]] = set()
    for panel in everything:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken
        assert at["x"] + at["w"] <= 24
        taken |= cells


def written_by_the_compose_file(port: str | None, file: str, folder: Path) -> list[str]:
    """The targets that the command of Prometheus writes into ``file``, in ``folder``."""
    prometheus = COMPOSE["prometheus"]
    assert any(file.startswith(f"{place}/") for place in prometheus["tmpfs"]), "all else is read-only"
    command, started = prometheus["command"][0].split("&&")
    assert started.split()[:2] == ["exec", "/bin/prometheus"]
    own = command.replace(file, str(folder / "targets.json")).replace("${ROPEWAY_METRICS_PORT:-8000}", port or "8000")
    subprocess.run([*prometheus["entrypoint"], own], check=True)
    ((targets),) = json.loads((folder / "targets.json").read_text())
    found: list[str] = targets["targets"]
    return found


def test_prometheus_reads_the_services_of_the_compose_file(tmp_path: Path) -> None:
    (job,) = PROMETHEUS["scrape_configs"]
    assert job["job_name"] == "ropeway"
    ((file,),) = [config["files"] for config in job["file_sd_configs"]]
    servers = [one for one in COMPOSE.values() if "build" in one]
    for port in (None, "9464"):
        (target,) = written_by_the_compose_file(port, file, tmp_path)
        for server in servers:
            (alias,) = server["networks"]["default"]["aliases"]
            assert server["environment"]["ROPEWAY_METRICS_PORT"] is None, "handed on from where the command has it"
            assert target == f"{alias}:{port or server['environment']['ROPEWAY_PORT']}", (
                "a name without a server is down"
            )


# Alerts


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_an_alert_asks_for_what_exists(rule: dict[str, Any], metrics: dict[str, set[str]]) -> None:
    asked = names(rule["expr"])
    assert asked or rule["expr"].startswith("up{")
    assert asked <= metrics.keys()
    selected = labels(rule["expr"]) | set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"])))
    known = set().union(*(metrics[name] for name in asked)) if asked else set()
    if known:
        assert selected - ADDED_BY_PROMETHEUS <= known
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert set(rule["annotations"]) == {"summary", "action"}


def reasons_of(rules: list[dict[str, Any]]) -> set[str]:
    found = [group for rule in rules for group in re.findall(r'reason=~"([^"]+)"', rule["expr"])]
    return {name for group in found for name in group.split("|")}


def test_what_alerts_count_begins_at_zero() -> None:
    """The first failure is an increase."""
    metrics = Metrics()
    EngineMetrics(metrics, "m")
    counted = {name for rule in ALERTS for name in names(rule["expr"]) if name.endswith("_total")}
    found: dict[str, set[str]] = {name: set() for name in counted}
    for family in metrics.registry.collect():
        for sample in family.samples:
            if sample.name in counted:
                assert sample.value == 0
                found[sample.name] |= set(sample.labels.values())
    reasons = reasons_of(ALERTS)
    assert found == {"ropeway_requests_rejected_total": reasons, "ropeway_engine_restarts_total": {"m"}}


def test_reasons_that_alerts_name_are_codes_of_errors() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "service").rglob("*.py"))
    reasons = reasons_of(ALERTS)
    assert len(reasons) > 5
    assert {reason for reason in reasons if f'code="{reason}"' not in sources} == set()


def test_prometheus_is_given_the_alerts() -> None:
    (file,) = PROMETHEUS["rule_files"]
    targets = [mount.split(":")[1] for mount in COMPOSE["prometheus"]["volumes"]]
    assert {"/etc/prometheus/prometheus.yml", f"/etc/prometheus/{file}"} <= {*targets}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool on this machine")
def test_promtool_finds_no_fault_and_the_alerts_fire(tmp_path: Path) -> None:
    for file in ("prometheus.yml", "alerts.yml"):
        shutil.copy(MONITORING / file, tmp_path)
    shutil.copy(Path(__file__).parent / "alerts_test.yml", tmp_path)
    for command in (["check", "config", "prometheus.yml"], ["test", "rules", "alerts_test.yml"]):
        run = subprocess.run(["promtool", *command], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stdout + run.stderr


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    provisioning = MONITORING / "grafana/provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    asked = {panel["datasource"]["uid"] for panel in PANELS}
    asked |= {target["datasource"]["uid"] for panel in PANELS for target in panel["targets"]}
    assert asked | {variable["datasource"]["uid"] for variable in VARIABLES} == {source["uid"]}
    (provider,) = yaml.safe_load((provisioning / "dashboards/ropeway.yml").read_text())["providers"]
    mounts = [mount.split(":") for mount in COMPOSE["grafana"]["volumes"]]
    assert [source for source, target, *_ in mounts if target == provider["options"]["path"]] == [
        f"./{(MONITORING / 'grafana/dashboards').relative_to(ROOT)}"
    ]


@pytest.mark.parametrize("name", ["prometheus", "grafana"])
def test_monitoring_is_started_on_demand_and_stays_on_this_machine(name: str) -> None:
    service = COMPOSE[name]
    assert service["profiles"] == ["monitoring"]
    assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+", service["image"])
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
    assert "env_file" not in service, "the settings of the server, its keys among them, are not theirs"
    for mount in service["volumes"]:
        source, _, *mode = mount.split(":")
        if source.startswith("."):
            assert (ROOT / source).exists()
            assert mode == ["ro"]


def test_nobody_looks_without_a_login() -> None:
    assert COMPOSE["grafana"]["environment"]["GF_AUTH_ANONYMOUS_ENABLED"] == "${GRAFANA_ANONYMOUS:-false}"
