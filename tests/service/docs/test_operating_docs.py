"""docs/operating.md is true: its codes are those of the service, its files fit the image and the settings."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest
import yaml

from service.api.http.streaming import PING_S
from service.jobs.records import JobState
from service.settings import Settings
from tests.conftest import ROOT
from tests.service.cli.shell import succeeded
from tests.test_image import instructions

TEXT = (ROOT / "docs/operating.md").read_text(encoding="utf-8")
ERRORS = [[cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(r"^\| `.*$", TEXT, re.M)]
DEFAULTS = Settings.model_construct()


def block(language: str) -> str:
    (text,) = re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.S | re.M)
    return str(text)


def refused(path: Path) -> Iterator[tuple[int, str]]:
    """(status, code) of every refusal whose code is a literal in a source file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        name = getattr(node.func, "id", ast.unparse(node.func)) if isinstance(node, ast.Call) else ""
        if name not in ("ApiError", "OtherSetup", "bad_request", "super().__init__"):
            continue
        assert isinstance(node, ast.Call)
        given = [keyword.value for keyword in node.keywords if keyword.arg == "code"]
        given += [] if name.startswith("super") else node.args[2:3]
        if not given:
            continue
        status = ast.Constant(400) if name == "bad_request" else node.args[0]
        if isinstance(given[0], ast.Constant) and isinstance(status, ast.Constant):
            yield int(str(status.value)), str(given[0].value)


COMPUTED = {
    *((400, "invalid_value"), (404, "not_found"), (405, "method_not_allowed"), (499, "client_disconnected")),
    (499, "client_too_slow"),
    *((409, f"job_{state}") for state in get_args(JobState) if state != "done"),
}
"""Codes that are no literal where a refusal is made, with their status."""


def test_the_table_of_errors_has_every_code_with_its_status() -> None:
    shown = [(int(status), code) for codes, status, *_ in ERRORS for code in re.findall(r"`(\w+)`", codes)]
    made = {pair for path in (ROOT / "service").rglob("*.py") for pair in refused(path)}
    assert len(made) > 30
    assert len(shown) == len(set(shown))
    assert set(shown) == made | COMPUTED


def test_codes_that_alert_are_those_of_the_rules() -> None:
    rules = yaml.safe_load((ROOT / "service/monitoring/alerts.yml").read_text(encoding="utf-8"))["groups"][0]["rules"]
    alerting = {
        (code, rule["alert"])
        for rule in rules
        for codes in re.findall(r'reason=~"([\w|]+)"', rule["expr"])
        for code in codes.split("|")
    }
    assert {(codes.strip("`"), alert.strip("`")) for codes, _, _, alert in ERRORS if alert} == alerting
    named = set(re.findall(r"`(Ropeway\w+)`", TEXT))
    assert named <= {rule["alert"] for rule in rules}


def test_the_manifest_fits_the_image_and_the_settings(client: httpx.Client) -> None:
    pod: dict[str, Any] = yaml.safe_load(block("yaml"))["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    image = dict(instructions())
    user, group = map(int, image["USER"].split(":"))
    context = pod["securityContext"]
    assert (context["runAsUser"], context["runAsGroup"], context["fsGroup"]) == (user, group, group)
    assert container["ports"] == [{"containerPort": int(image["EXPOSE"])}]
    assert pod["terminationGracePeriodSeconds"] > DEFAULTS.shutdown_grace_s + 10
    assert pod["enableServiceLinks"] is False, "or ROPEWAY_PORT is the address of a Service"
    for variable in container["env"]:
        assert variable["name"].removeprefix("ROPEWAY_").lower() in Settings.model_fields
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = container[probe]["httpGet"]
        assert asked["port"] == int(image["EXPOSE"])
        assert client.get(asked["path"]).status_code == 200
    mounted = {mount["mountPath"]: mount.get("readOnly", False) for mount in container["volumeMounts"]}
    written = [value for value in shlex.split(image["ENV"].replace("=", " ")) if value.startswith("/")]
    assert written
    assert all(any(value.startswith(path) for path, closed in mounted.items() if not closed) for value in written)
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_the_proxy_takes_as_large_bodies_and_as_long_answers_as_the_server() -> None:
    nginx = block("nginx")
    (size,) = re.findall(r"client_max_body_size (\d+)m;", nginx)
    assert int(size) << 20 == max(DEFAULTS.max_body_bytes, DEFAULTS.max_prompt_bytes)
    (seconds,) = re.findall(r"proxy_read_timeout (\d+)s;", nginx)
    assert int(seconds) == DEFAULTS.max_timeout_s
    assert "proxy_buffering off;" in nginx
    assert PING_S == 5


def test_the_unit_waits_for_the_end_and_sets_settings() -> None:
    unit = block("ini")
    (seconds,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.M)
    assert int(seconds) > DEFAULTS.shutdown_grace_s + 10
    assert "KillMode=mixed\n" in unit
    names = re.findall(r"ROPEWAY_(\w+)=", unit)
    assert names
    assert all(name.lower() in Settings.model_fields for name in names)


def test_its_commands_for_keys_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for line in block("text").splitlines():
        _, *words = re.split(r"\s{2,}", line)[0].split()
        assert succeeded(*words)
    assert Path("keys").read_text() == "", "the last one revokes it"


def test_the_settings_that_it_names_are_settings() -> None:
    named = set(re.findall(r"\bROPEWAY_([A-Z_]+)", TEXT)) - {"URL", "API_KEY"}
    assert {name.lower() for name in named} <= Settings.model_fields.keys()


def test_a_prompt_of_131072_tokens_takes_what_it_says() -> None:
    per_token, tokens = 2 * 32 * 8 * 128 * 2, 131_072
    assert f"a token {per_token >> 10} KiB" in " ".join(TEXT.split())
    cache, weights = per_token * tokens >> 30, round(8.03e9 * 2 / (1 << 30))
    assert (cache, weights) == (16, 15)
    assert f"| {cache / 0.7:.0f} GiB beside the weights" in TEXT
