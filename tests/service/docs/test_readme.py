"""README.md and the tutorial are correct: their methods and files exist, and their commands run."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import yaml

from patches import METHODS, parse
from service.addresses import free_port
from service.api.encodings.export import ExportRequest
from service.api.response_models.encodings import AutoChoice
from service.cli.demo import ENCODINGS
from service.cli.server import local_server
from service.evaluation.catalogue import EVALUATIONS
from service.evaluation.perplexity.results import PerplexityResult
from service.models.checkpoint.loading import DEMO
from service.policy.policy import parse_policy
from service.settings import Settings
from tests.conftest import ROOT
from tests.service.cli.shell import ropeway
from tests.service.demo import small_demo
from tests.service.docs.terminal import Terminal, blocks, installed, missing, pages, repository, terminal
from tests.service.serving import wait_for

README = (ROOT / "README.md").read_text()


def test_the_methods_it_names_exist() -> None:
    named = re.findall(r"\[`(\w+)`\]\(docs/methods\.md#(\w+)\)", README)
    assert len(named) >= 12
    assert [(name, anchor) for name, anchor in named if name != anchor or name not in METHODS] == []


def test_the_files_it_names_exist() -> None:
    tree = re.search(r"## Layout\n\n```\n(.*?)```", README, re.S)
    assert tree is not None
    folder, shown = ROOT, dict[str, set[str]]()
    for line in tree[1].splitlines():
        names = re.findall(r"[\w.]+/?(?= |$)", line[:24])
        folder = ROOT / names[0] if not line.startswith(" ") else folder
        shown.setdefault(folder.name, set()).update(name.removesuffix("/") for name in names)
        for name in names:
            assert (ROOT / name if not line.startswith(" ") else folder / name).exists(), line
    for name in ("patches", "service"):
        folders = {path.parent.name for path in (ROOT / name).glob("*/__init__.py")}
        assert folders <= shown[name], "a folder is missing in the layout"
    for link in re.findall(r"\]\(([\w/.]+)(?:#\w+)?\)|`([\w/]+\.(?:py|md))`", README):
        assert (ROOT / (link[0] or link[1])).exists(), link


UNIT = 0.1
"""Of the last printed digit: processors may round to the next."""


def test_its_first_answer_is_that_of_the_demo_model() -> None:
    request = next(block for block in blocks(ROOT / "README.md") if "localhost:8000/perplexity" in block)
    table = re.search(r"^\| perplexity \|.*\n(?:\|.*\n)+", README, re.MULTILINE)
    assert table is not None
    (_, *lengths), _, *rows = [re.findall(r"[^|` ]+", line) for line in table[0].splitlines()]
    body = json.loads(shlex.split(request)[-1])
    demo = Settings(_env_file=None, device="cpu", cache_tokens=2048, model=str(DEMO / "ropeway-demo"))
    with local_server(demo) as url:
        answer = httpx.post(f"{url}/perplexity", json=body, timeout=60).json()
    result = PerplexityResult.model_validate(answer)
    assert lengths == [f"{length:,}" for length in result.lengths]
    assert [name for name, *_ in rows] == body["methods"]
    for (_, *values), method in zip(rows, result.methods, strict=True):
        for printed, at in zip(values, method.lengths, strict=True):
            assert float(printed) == pytest.approx(round(at.perplexity, 1), abs=1.001 * UNIT), (method.label, at.length)
    assert f"{result.documents[0].tokens:,} tokens" in (ROOT / "docs/evaluations.md").read_text()


# The commands of every page

RUN = {"README.md", "tutorial.md", "clients.md"}
"""Pages whose other commands run here."""
SERVER = "make serve    # the demo models; `ropeway serve --model FOLDER_OR_ID` serves others\n"
"""Goes on, in a second terminal."""
LESS = "--stride 90000 --samples 1 --model"
"""Options of `make demo`: every encoding and length, a third of the windows and half of the passkeys, and a model. The
demo models themselves are those of `make serve`."""
MODEL = "service/models/demo/ropeway-demo"
"""Of the tutorial."""


def rehearsed(block: str) -> None:
    """A dry run of make."""
    commands = [line.partition("  #")[0] for line in block.splitlines() if line.startswith("make ")]
    assert commands
    for command in commands:
        rehearsal = [*shlex.split(command), "--dry-run", "--always-make"]  # as if nothing were installed
        run = subprocess.run(rehearsal, cwd=ROOT, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
        assert ".venv/bin/" in run.stdout


def known_to_compose(block: str) -> None:
    """Compose knows the profiles, and every one starts something."""
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"].values()
    for line in block.splitlines():
        words = shlex.split(line)
        assert words[words.index("docker") :][:2] == ["docker", "compose"]
        assert words[-1] == "up"
        asked = {words[index + 1] for index, word in enumerate(words) if word == "--profile"}
        assert asked
        assert asked <= {profile for service in services for profile in service["profiles"]}


def exported(block: str) -> None:
    """The shell's line exports the demo model, and the others ask for the same."""
    shell, curl, python = block.splitlines()
    words = shlex.split(shell.replace("MODEL", str(DEMO / "ropeway-demo")))
    shown = ropeway(*words[1:])
    assert shown.exit_code == 0, shown.output
    body = ExportRequest.model_validate_json(shlex.split(curl)[-1])
    assert (body.target, body.length) == (words[words.index("--to") + 1], int(words[words.index("--length") + 1]))
    compile(shlex.split(python)[-1], "<page>", "exec")


def known_to_the_command(block: str) -> None:
    """`ropeway serve`, or another one, has these options."""
    for line in block.replace("\\\n", " ").splitlines():
        _, command, *words = shlex.split(line[line.index("ropeway ") :])
        known, options = ropeway(command, "--help").output, [word for word in words if word.startswith("--")]
        if command in EVALUATIONS:
            known += ropeway(command, "--fields").output
        assert options
        assert [option for option in options if option not in known] == []


def known_to_scale(block: str) -> None:
    """`ropeway scale` has these commands and options, and every variable of ours is a setting."""
    for name in re.findall(r"\bROPEWAY_(\w+)=", block):
        assert name.lower() in Settings.model_fields, name
    for line in re.findall(r"^ropeway scale .*$", block.replace("\\\n", " "), re.MULTILINE):
        command, *options = shlex.split(line.partition(">")[0])[2:]
        known = ropeway("scale", command, "--help")
        assert known.exit_code == 0, command
        assert [option for option in options if option.startswith("--") and option not in known.output] == []


NOT_RUN: dict[str, Callable[[str], None]] = {
    "make test": rehearsed,  # this very suite
    "git clone <this repository> ropeway && cd ropeway\nmake setup": rehearsed,  # downloads; and checks, this suite too
    "ROPEWAY_MODEL=Qwen/Qwen2.5-0.5B docker compose": known_to_compose,  # an image of gigabytes
    "docker compose": known_to_compose,
    "ropeway serve --model FOLDER": known_to_the_command,  # goes on
    "ropeway search great-expectations": known_to_the_command,  # texts that are not here
    "ropeway perplexity --pe default --pe yarn:4 --lengths 256,512": known_to_the_command,  # two runs of a model
    "export RAY_AUTH_MODE": known_to_scale,  # a cluster
    "export RAY_DASHBOARD_ADDRESS": known_to_scale,
    "kubectl create secret": known_to_scale,
    "ropeway export yarn:8 --model MODEL": exported,  # a server at the default port
}
"""Beginnings of the blocks that are not run, and what is done with them instead."""


def stand_in(block: str) -> Callable[[str], None] | None:
    return next((check for beginning, check in NOT_RUN.items() if block.startswith(beginning)), None)


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_commands_that_cannot_be_run_here_are_right(page: Path) -> None:
    for block in blocks(page):
        assert subprocess.run(["bash", "-n", "-c", block], check=False).returncode == 0 or "<this repository>" in block
        if check := stand_in(block):
            check(block)
        else:
            assert page.name in RUN, f"the commands of {page.name} are not run: {block}"


def test_the_list_of_what_is_not_run_is_no_longer_than_it_must_be() -> None:
    every = [block for page in pages() for block in blocks(page)]
    assert all(any(block.startswith(beginning) for block in every) for beginning in NOT_RUN)
    assert SERVER in every


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(bool(missing()), reason=f"not on this machine: {', '.join(missing())}")
def test_commands_run_in_a_fresh_terminal_one_after_another(tmp_path: Path) -> None:
    """With nothing prepared but what `make` would download."""
    (tmp_path / "source").mkdir()
    source, home = repository(tmp_path / "source"), tmp_path
    port = free_port()
    clone, less = tmp_path / "ropeway", f"{LESS} {small_demo(tmp_path)}"
    with terminal(tmp_path, home, ARGS=less) as first, terminal(tmp_path, home, ROPEWAY_PORT=str(port)) as second:
        for number, block in enumerate(blocks(ROOT / "README.md")):
            script = block.replace("<this repository>", str(source)).replace("localhost:8000", f"localhost:{port}")
            if number == 0:
                script = cloned(first, script, clone)
            if stand_in(block):
                continue
            if block == SERVER:
                second.begin(f"cd {clone}\n{script}")
                wait_for(lambda: answers(f"http://localhost:{port}/health/ready"), 120)
                continue
            code, printed = first.run(script)
            assert code == 0, f"{block}\n{printed}"
            assert '"error":{' not in printed, f"{block}\n{printed}"
            if "make demo" in block:
                assert all(f" {name} " in printed for name in ENCODINGS["generate"])
            if "text/csv" in block:
                assert len(printed.splitlines()) == 1 + 3 * 3
    demonstrated(clone / "demo-output")
    assert (clone / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert (clone / "curve.html").stat().st_size > 100_000
    assert (clone / "sweep.html").stat().st_size > 100_000


def demonstrated(output: Path) -> None:
    """`make demo` measured every encoding, on the same tokens at every length, and stopped its server."""
    result = PerplexityResult.model_validate_json((output / "result.json").read_text())
    assert result.lengths == [256, 512, 1024, 2048]
    assert [document.name for document in result.documents] == ["persuasion"]
    scored = {(at.tokens_scored, at.windows) for method in result.methods for at in method.lengths}
    assert len(scored) == 1
    assert min(windows for _, windows in scored) >= 2
    measured = [method.pe["requested"] for method in result.methods]
    assert measured == [name.partition(":")[0] for name in ENCODINGS["perplexity"]]
    for picture in ("curve", "recall"):
        assert (output / f"{picture}.png").read_bytes().startswith(b"\x89PNG")
        assert "plotly.js" in (output / f"{picture}.html").read_text(encoding="utf-8")
    assert len((output / "table.csv").read_text().splitlines()) == 1 + 4 * len(result.methods)
    assert "Uvicorn running" in (log := (output / "server.log").read_text())
    assert "Finished server process" in log


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(bool(missing()), reason=f"not on this machine: {', '.join(missing())}")
def test_the_tutorial_runs_from_a_fresh_terminal(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    source, clone, port = repository(tmp_path / "source"), tmp_path / "ropeway", free_port()
    model = tmp_path / "another"  # no command may name the one of the page
    (small_demo(tmp_path) / "ropeway-demo").rename(model)
    with terminal(tmp_path, tmp_path, ROPEWAY_PORT=str(port)) as shell:
        for number, block in enumerate(blocks(ROOT / "docs/tutorial.md")):
            script = block.replace("<this repository>", str(source)).replace("localhost:8000", f"localhost:{port}")
            script = script.replace(f"MODEL={MODEL}\n", f"MODEL={model}\n")
            code, printed = shell.run(cloned(shell, script, clone) if number == 0 else script)
            assert code == 0, f"{block}\n{printed}"
            assert '"error":{' not in printed, f"{block}\n{printed}"
    assert (clone / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert (clone / "report.html").stat().st_size > 100_000
    assert sorted(path.name for path in (clone / MODEL).iterdir()) == sorted(path.name for path in model.iterdir())


@pytest.mark.slow
def test_the_commands_for_clients_run() -> None:
    shown = dict[str, str]()
    with local_server(Settings(_env_file=None, cache_tokens=4096)) as url:
        for block in blocks(ROOT / "docs/clients.md"):
            script = block.replace("http://localhost:8000", url).replace("localhost:8000", url)
            script = script.replace("python -", f"{sys.executable} -")
            run = subprocess.run(["bash", "-e", "-c", script], capture_output=True, text=True, check=False)
            assert run.returncode == 0, f"{block}\n{run.stderr}"
            assert '"error":{' not in run.stdout, f"{block}\n{run.stdout}"
            shown[block] = run.stdout

    def printed(by: str) -> str:
        (text,) = (text for block, text in shown.items() if by in block)
        return text

    assert json.loads(printed('{"choice"'))["choices"][0]["message"]["content"] in ("yes", "no")
    assert re.search(r"kind='(bowline|hitch)' is_wet=(True|False)", printed("class Knot"))
    assert "name='tie'" in printed("tool_choice=")
    *events, last = re.findall(r"^data: (.*)$", printed('"stream": true'), re.M)
    assert last == "[DONE]"
    kinds = [("text" in event, "finish_reason" in event) for event in map(json.loads, events)]
    assert kinds.count((False, True)) == 2, "one end for each encoding"
    assert set(kinds) == {(True, False), (False, True)}


def cloned(shell: Terminal, script: str, clone: Path) -> str:
    """The rest of a page's first block, after its first line has made the ``clone`` and packages are installed."""
    clone_line, rest = script.split("\n", 1)
    assert shell.run(clone_line)[0] == 0
    installed(clone)
    return rest


def test_bodies_that_pages_show_are_valid() -> None:
    found = [text for page in pages() for text in re.findall(r"^```json\n(.*?)^```$", page.read_text(), re.S | re.M)]
    assert len(found) >= 3
    for text in found:
        body = json.loads(text)
        if "ranges" in body:
            assert parse_policy(body)
        elif "rope_parameters" in body:
            assert parse(body["rope_parameters"])
        elif "source" in body:
            assert AutoChoice.model_validate(body)
        else:
            assert EVALUATIONS[body["evaluation"]].request.model_validate(body)


def answers(url: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(url).status_code == 200
    return False
