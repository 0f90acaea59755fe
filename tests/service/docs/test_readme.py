"""The README tells the truth: its table is the registry's, its files exist, its commands run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from service.cli.method_docs import readme_table
from tests.conftest import ROOT

README = (ROOT / "README.md").read_text()
COMMANDS = [block for block in re.findall(r"```sh\n(.*?)```", README, re.S) if "make" not in block]


def test_the_method_table_is_the_registrys() -> None:
    """Regenerate with: ropeway methods --markdown"""
    table = re.search(r"<!-- methods:start -->\n(.*?)\n<!-- methods:end -->", README, re.S)
    assert table is not None
    assert table[1] == readme_table()


def test_the_files_it_names_exist() -> None:
    tree = re.search(r"## What is where\n\n```\n(.*?)```", README, re.S)
    assert tree is not None
    folder = ROOT
    for line in tree[1].splitlines():
        names = re.findall(r"[\w.]+/?(?= |$)", line[:24])
        folder = ROOT / names[0] if not line.startswith(" ") else folder
        for name in names:
            assert (ROOT / name if not line.startswith(" ") else folder / name).exists(), line
    for link in re.findall(r"\]\(([\w/.]+)(?:#\w+)?\)|`([\w/]+\.(?:py|md))`", README):
        assert (ROOT / (link[0] or link[1])).exists(), link


@pytest.mark.parametrize("block", COMMANDS)
def test_its_commands_run(block: str, server: str, tmp_path: Path) -> None:
    if shutil.which("curl") is None and "curl" in block:
        pytest.skip("no curl on this machine")
    script = block.replace("localhost:8000", server.removeprefix("http://")).replace("ropeway-demo", "tiny")
    script = re.sub(
        r"^(ropeway (?:generate|perplexity|sweep|passkey).*)$", rf"\1 --server {server}", script, flags=re.M
    )
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    run = subprocess.run(
        ["bash", "-euc", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PATH": path},
    )
    assert run.returncode == 0, run.stderr
    assert '"error":{' not in run.stdout, run.stdout
    if "curve.png" in block:
        assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
        assert (tmp_path / "curve.html").stat().st_size > 100_000
    if "text/csv" in block:
        assert len(run.stdout.splitlines()) == 1 + 3 * 3
