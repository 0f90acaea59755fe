"""docs/serving.md is true: its tests exist, its metrics are served, its settings are settings."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from service.settings import Settings
from service.sharing.limits import SCHEMES
from tests.conftest import ROOT

TEXT = (ROOT / "docs/serving.md").read_text(encoding="utf-8")
PROMISES, METRICS, SETTINGS = (
    [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()[2:]]
    for table in re.findall(r"(?:^\|.*\n)+", TEXT, re.M)
)


def functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_promise_of_ours_links_to_tests_that_exist() -> None:
    assert len(PROMISES) > 20
    for promise, *peers, ours, tests in PROMISES:
        assert len(peers) == 5
        assert all(peers), promise
        assert ours
        links = re.findall(r"\[`(test_\w+)`\]\(([^)]+)\)", tests)
        assert links, promise
        for name, file in links:
            assert name in functions(ROOT / "docs" / file), f"{promise}: {name} in {file}"


def test_every_metric_is_named_and_served(server: str) -> None:
    families = text_string_to_metric_families(httpx.get(f"{server}/metrics").text)
    served = {family.name + ("_total" if family.type == "counter" else "") for family in families}
    named = {name for row in METRICS for name in re.findall(r"`(\w+)`", row[0])}
    assert named == {name for name in served if name.startswith("ropeway_") and not name.endswith("_created")}


def test_every_scheme_of_the_shared_store_is_named() -> None:
    assert set(re.findall(r"`(redis\w*|valkey\w*)://`", TEXT)) == SCHEMES.keys()


def test_every_setting_is_one() -> None:
    named = {name for row in SETTINGS for name in re.findall(r"`(\w+)`", row[0])}
    assert named
    assert named <= Settings.model_fields.keys()
