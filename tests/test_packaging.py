"""Packaging: pins, the wheel, make, the settings example."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from service.settings import Settings

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
DIRECT = [Requirement(line) for line in sum(EXTRAS.values(), PROJECT["dependencies"])]
DIRECT = [requirement for requirement in DIRECT if requirement.name != PROJECT["name"]]
CUDA_WHEEL = re.compile(r"nvidia-|cuda-|triton$")  # torch names their versions itself


def pins() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): Version(version) for name, version in pairs}


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run at the repository root, free of the variables that a ``make`` around the tests exports."""
    exported = re.compile(r"MAKE|MFLAGS$|(PYTHON|VENV|PIP_FLAGS|ARGS|HADOLINT)$")
    clean = {name: value for name, value in os.environ.items() if not exported.match(name)}
    return subprocess.run(
        command, cwd=ROOT, env=clean | environment, capture_output=True, text=True, check=False, timeout=120
    )


class TestPins:
    @pytest.mark.parametrize("requirement", DIRECT, ids=lambda requirement: requirement.name)
    def test_pin_is_inside_the_supported_range(self, requirement: Requirement) -> None:
        assert requirement.specifier, "a direct dependency needs a range"
        assert pins()[canonicalize_name(requirement.name)] in requirement.specifier

    def test_whatever_gets_installed_is_pinned(self) -> None:
        pinned, waiting, seen = pins(), [requirement.name for requirement in DIRECT], set()
        while waiting:
            name = canonicalize_name(waiting.pop())
            if name in seen or CUDA_WHEEL.match(name):
                continue
            seen.add(name)
            try:
                lines = metadata.requires(name) or []
            except metadata.PackageNotFoundError:  # a tool of the dev extra: not needed to run the tests
                continue
            needed = map(Requirement, lines)
            waiting += [r.name for r in needed if r.marker is None or r.marker.evaluate({"extra": ""})]
        assert seen - pinned.keys() == set()

    def test_no_command_installs_it_from_an_index(self) -> None:
        """Nobody uploads it: a package of this name there is another one."""
        folders = [ROOT / name for name in ("benchmarks", "docs", "patches", "service", "tests")]
        texts = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".md")]
        installed = re.compile(r"pip install [^\n]*\b" + PROJECT["name"] + r"\b")
        assert [str(path) for path in texts if installed.search(path.read_text(encoding="utf-8"))] == []

    def test_no_pin_names_a_local_build(self) -> None:
        assert [name for name, version in pins().items() if version.local] == []


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built from a copy so that the tree stays clean."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for package in ("patches", "service"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index")
    built = run(*pip, "--wheel-dir", str(folder), str(folder))
    assert built.returncode == 0, built.stderr
    return zipfile.ZipFile(next(folder.glob("*.whl")))


@pytest.mark.slow
class TestWheel:
    def test_has_every_file_of_both_packages(self, wheel: zipfile.ZipFile) -> None:
        files = [path for package in ("patches", "service") for path in (ROOT / package).rglob("*") if path.is_file()]
        expected = {str(path.relative_to(ROOT)) for path in files if "__pycache__" not in path.parts}
        assert expected - set(wheel.namelist()) == set()

    def test_has_nothing_else(self, wheel: zipfile.ZipFile) -> None:
        tops = {name.split("/")[0] for name in wheel.namelist()}
        assert tops == {"patches", "service", f"ropeway-{PROJECT['version']}.dist-info"}

    def test_declares_the_console_script_and_carries_the_licence(self, wheel: zipfile.ZipFile) -> None:
        info = f"ropeway-{PROJECT['version']}.dist-info"
        assert "ropeway = service.cli:app" in wheel.read(f"{info}/entry_points.txt").decode()
        assert b"Apache License" in wheel.read(f"{info}/licenses/LICENSE")


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
class TestMake:
    def targets(self) -> set[str]:
        phony = re.search(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert phony
        return set(phony[1].split())

    @pytest.mark.parametrize("command", [("make",), ("make", "help")], ids=" ".join)
    def test_help_lists_every_target_with_a_description(self, command: tuple[str, ...]) -> None:
        printed = run(*command)
        assert printed.returncode == 0, printed.stderr
        assert set(re.findall(r"^  make (\S+) +\S+", printed.stdout, re.MULTILINE)) == self.targets()

    @pytest.mark.parametrize(
        ("target", "installs", "last"),
        [
            ("demo", ".", "ropeway demo"),
            ("serve", ".", "ropeway serve"),
            ("test", ".[test]", "python -m pytest -n 3 --dist worksteal"),
            ("test-fast", ".[test]", "python -m pytest -n 3 --dist worksteal -m not slow"),
            ("check", ".[dev]", "python -m pytest -n 3 --dist worksteal"),
            ("train-demo", ".", "python -m service.models.training"),
            ("bench", ".", "python -m benchmarks"),
        ],
    )
    def test_target_starts_from_nothing(self, tmp_path: Path, target: str, installs: str, last: str) -> None:
        venv = tmp_path / "venv"
        printed = run("make", "-n", target, f"VENV={venv}", f"PYTHON={sys.executable}", "PIP_FLAGS=--pre", "WORKERS=3")
        lines = [" ".join(shlex.split(line)) for line in printed.stdout.splitlines()]
        install = f"{venv}/bin/python -m pip install --no-compile --pre -c constraints.txt -e {installs}"
        assert install in lines
        assert any(line.startswith(f"{sys.executable} -m venv {venv}") for line in lines[: lines.index(install)])
        assert lines[-1].removeprefix("PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 ") == f"{venv}/bin/{last}"

    def test_second_call_installs_nothing(self, tmp_path: Path) -> None:
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "python").touch()
        (tmp_path / ".installed-test").touch()
        assert "pip install" not in run("make", "-n", "test", f"VENV={tmp_path}").stdout

    @pytest.mark.parametrize("with_uv", [True, False])
    def test_ci_runs_make_test_at_the_root(self, tmp_path: Path, with_uv: bool) -> None:
        root, commands = tmp_path / "root", tmp_path / "commands"
        python = f'#!/bin/sh\ncase "$*" in *uv==*) exit {int(not with_uv)}; esac\n'
        # The script itself would look for a browser in the network.
        for path, script in {
            commands / "make": '#!/bin/sh\necho "$PWD: $*"\ntest "$1" != test || exit 7\n',
            commands / "apt-get": "#!/bin/sh\nexit 1\n",
            root / ".venv/bin/python": python,
        }.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(script)
            path.chmod(0o755)
        shutil.copytree(ROOT / ".ci", root / ".ci")
        environment = os.environ | {"PATH": f"{commands}{os.pathsep}{os.environ['PATH']}"}
        command = [str(root / ".ci" / "run")]
        ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        by_uv = (
            ".venv/.installed-test INSTALL=.venv/bin/uv pip install -q --python .venv/bin/python -c constraints.txt -e"
        )
        targets = [".venv/bin/python", *([by_uv] if with_uv else []), ".venv/.installed-test", "test"]
        assert ran.stdout.splitlines() == [f"{root}: {target}" for target in targets]
        assert ran.returncode == 7


class TestSettingsExample:
    def shown(self) -> dict[str, str]:
        lines = re.findall(r"^#(ROPEWAY_\w+)=(.*)$", (ROOT / ".env.example").read_text(), re.MULTILINE)
        return {name.removeprefix("ROPEWAY_").lower(): value for name, value in lines}

    def test_shows_every_setting(self) -> None:
        assert self.shown().keys() == Settings.model_fields.keys()

    def test_shows_the_defaults(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.chdir(tmp_path)  # away from a developer's own .env
        for name, value in self.shown().items():  # an empty one is unset, but that of keys is refused
            if value or name != "api_keys_file":
                monkeypatch.setenv(f"ROPEWAY_{name.upper()}", value)
        assert Settings() == Settings.model_construct()
