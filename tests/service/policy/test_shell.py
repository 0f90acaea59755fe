"""``auto`` and policies in the shell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from service.cli.shared.options import encodings, method_names
from tests.service.cli.shell import ropeway
from tests.service.policy.conftest import RANGES


def test_auto_is_an_encoding() -> None:
    ranges = [{"up_to": None, "pe": "yarn:4"}]
    assert encodings(["auto", "yarn:4"]) == [{"method": "auto"}, {"method": "yarn", "factor": 4}]
    assert encodings([json.dumps({"method": "auto", "ranges": ranges})]) == [{"method": "auto", "ranges": ranges}]
    assert method_names("au") == ["auto"]


@pytest.mark.parametrize("text", ["auto:4", '{"method": "auto", "ranges": []}'])
def test_a_wrong_auto_is_refused_before_a_model_is_loaded(text: str) -> None:
    result = ropeway("generate", "x", "--model", "/no/such/model", "--pe", text)
    assert result.exit_code == 2
    assert "--pe" in result.output


def test_generate_names_the_range(server: str) -> None:
    result = ropeway("generate", "The ropes", "--pe", "auto", "-n", "4", "--server", server)
    assert result.exit_code == 0, result.output
    assert "default on tiny" in result.stderr
    assert "auto by rule: 1 to 64 tokens" in result.stderr
    result = ropeway("generate", "The ropes", "--pe", "auto", "-n", "100", "--server", server)
    assert "dynamic_yarn on tiny" in result.stderr
    assert "auto by rule: above 64 tokens" in result.stderr


def test_perplexity_has_a_row_for_auto(server: str, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The ropes of the ways are long. " * 60)
    arguments = ("--pe", "auto", "--lengths", "64,128", "--json", "--server", server)
    result = ropeway("perplexity", str(text), *arguments)
    assert result.exit_code == 0, result.output
    (method,) = json.loads(result.stdout)["methods"]
    assert method["label"] == "auto"
    assert [found["pe"]["method"] for found in method["pe"]["ranges"]] == ["default", "dynamic_yarn"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fingerprint": "0" * 64}, "fingerprint: the policy is for the model 'tiny' with 000"),
        ({"version": 3}, "version: must be 1, not 3"),
        ({"ranges": [*RANGES, RANGES[0]]}, "range 3 must have up_to above 256"),
    ],
)
def test_a_server_does_not_start_with_a_wrong_policy(
    checkpoints: Path, policy: dict[str, Any], tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    file = tmp_path / "policy.json"
    file.write_text(json.dumps(policy | change))
    result = ropeway("serve", "--model", str(checkpoints), "--port", "0", "--policy", str(file))
    assert result.exit_code == 1
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert line.startswith(f"error: ROPEWAY_POLICY: {file}: ")
    assert message in line
    assert "Traceback" not in result.output
