"""Version, completion, and help with the defaults and ranges of requests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, get_type_hints

import pytest
from pydantic import BaseModel

from patches import METHODS
from service.api.generation.generate import GenerateRequest
from service.cli.generate import generate
from service.cli.serve import serve
from service.settings import Settings
from tests.conftest import ROOT
from tests.service.cli.shell import ropeway


def options_of(command: Callable[..., None]) -> dict[str, Any]:
    """Every parameter as typer knows it."""
    hints = get_type_hints(command, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items() if hasattr(hint, "__metadata__")}


def test_the_version_is_that_of_the_package() -> None:
    assert ropeway("--version").stdout == f"ropeway {version('ropeway')}\n"


@pytest.mark.parametrize(
    ("command", "sent"),
    [(serve, Settings), (generate, GenerateRequest)],
    ids=["serve", "generate"],
)
def test_help_shows_the_defaults_and_ranges_of_what_is_sent(
    command: Callable[..., None], sent: type[BaseModel]
) -> None:
    shown, schema = 0, sent.model_json_schema()
    for name, option in options_of(command).items():
        field = schema["properties"].get(name, {})
        if field.get("default") is not None:
            assert type(field["default"])(option.show_default) == field["default"], name
            shown += 1
        kinds = [kind for kind in field.get("anyOf", [field]) if kind.get("type") in ("integer", "number")]
        for kind in kinds:
            assert option.min == kind.get("minimum", kind.get("exclusiveMinimum")), name
            assert option.max == kind.get("maximum"), name
    assert shown >= 2


@pytest.mark.parametrize("command", ["generate", "sweep", "models", "export", "report", "jobs list", "jobs cancel"])
def test_help_of_what_asks_a_server_names_the_variable_of_its_key(command: str) -> None:
    shown = re.sub(r"[\s│]+", " ", ropeway(*command.split(), "--help").stdout)
    assert "ROPEWAY_API_KEY" in shown
    assert ("ROPEWAY_URL" in shown) == command.startswith(("jobs", "report")), "others start a server of their own"


def test_every_setting_is_listed_with_its_default_and_its_range() -> None:
    shown = " ".join(ropeway("serve", "--settings").stdout.split())
    assert [name for name in Settings.model_fields if name not in shown] == []
    assert re.search(r" port integer from 0 .*? 8000 Port to ", shown)
    assert "--settings" in ropeway("serve", "--help").stdout


def completed(line: str) -> list[str]:
    """Completions that bash offers after ``line``."""
    environment = {
        **os.environ,
        "_ROPEWAY_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split()) - 1),
    }
    command = [sys.executable, "-m", "service.cli"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return run.stdout.split()


def test_a_shell_completes_commands_and_methods() -> None:
    assert completed("ropeway per") == ["perplexity"]
    assert completed("ropeway generate --pe ya") == [name for name in METHODS if name.startswith("ya")]
    assert completed("ropeway methods self") == ["self_extend"]
    assert "--install-completion" in ropeway("--help").stdout
