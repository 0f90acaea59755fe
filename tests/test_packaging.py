"""Packaging: pins, the wheel, make, the image, the compose file, the settings example."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import tomllib
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from service.settings import Settings
from tests.service.cli.shell import ropeway

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


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile as (keyword, arguments), continuation lines joined, comments dropped."""
    text = re.sub(r"(?m)^\s*#.*\n", "", (ROOT / "Dockerfile").read_text())
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines if line.strip()]


def compose() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return document


def ours() -> dict[str, dict[str, Any]]:
    """The compose services that run the image of this repository."""
    return {name: service for name, service in compose()["services"].items() if "build" in service}


def with_defaults(text: str) -> str:
    """``text`` as compose reads it where no variable is set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


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


def extras_of_the_image() -> str:
    """Extras of an image that is built without the argument."""
    (argument,) = [rest for keyword, rest in instructions() if keyword == "ARG" and rest.startswith("EXTRAS=")]
    return shlex.split(argument)[0].removeprefix("EXTRAS=")


class TestImage:
    def test_every_base_is_an_exact_tag_or_an_earlier_stage(self) -> None:
        stages: set[str] = set()
        for arguments in (rest for keyword, rest in instructions() if keyword == "FROM"):
            image, _, stage = arguments.partition(" AS ")
            assert image in stages or re.fullmatch(r"python:3\.\d+\.\d+-slim-[a-z]+(@sha256:[0-9a-f]{64})?", image)
            stages.add(stage)
        assert len(stages) >= 2

    def test_last_user_is_a_fixed_number_and_not_root(self) -> None:
        user = [rest for keyword, rest in instructions() if keyword == "USER"][-1]
        assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user)

    def test_dockerignore_lets_every_copied_path_through(self) -> None:
        ignore = (ROOT / ".dockerignore").read_text().splitlines()
        assert "*" in ignore
        copies = [rest.split()[:-1] for keyword, rest in instructions() if keyword == "COPY"]
        binds = [re.findall(r"type=bind,source=([^, ]+)", rest) for keyword, rest in instructions() if keyword == "RUN"]
        needed = {path for paths in [*copies, *binds] for path in paths}
        assert needed - {line[1:] for line in ignore if line.startswith("!")} == set()
        assert [path for path in needed if not (ROOT / path).exists()] == []

    @pytest.mark.parametrize("given", [None, "shared scale"])
    def test_it_has_the_extras_of_its_argument(self, given: str | None, tmp_path: Path) -> None:
        (command,) = [rest for keyword, rest in instructions() if keyword == "RUN" and "requirements.txt" in rest][:1]
        shutil.copy(ROOT / "pyproject.toml", tmp_path)
        program, extras = shlex.split(command.partition(" > ")[0])[2], given or extras_of_the_image()
        environment = os.environ | {"EXTRAS": extras}
        listed = subprocess.run(
            [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        )
        names = {Requirement(line).name for line in listed.stdout.splitlines()}
        wanted = {Requirement(line).name for extra in extras.split() for line in EXTRAS[extra]}
        assert {"fastapi"} | wanted <= names
        assert "ray" in names or "scale" not in extras.split()

    def test_by_itself_it_has_every_extra_that_a_setting_of_one_server_asks_for(self) -> None:
        asked = {"postgresql", "shared", "otel", "quantization"}
        assert {*re.findall(r"extra `?(\w+)`?\)", (ROOT / ".env.example").read_text())} - {"scale"} <= asked
        assert asked | {"adapters", "parallel"} == {*extras_of_the_image().split()}

    def test_the_entry_point_is_a_command_and_its_settings_listen_on_the_exposed_port(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        last = dict(instructions())
        program, *arguments = json.loads(last["ENTRYPOINT"])
        assert program in PROJECT["scripts"]
        assert ropeway(*arguments, "--help").exit_code == 0
        monkeypatch.chdir(tmp_path)
        for name, value in (pair.split("=", 1) for pair in shlex.split(last["ENV"])):
            monkeypatch.setenv(name, value)
        assert Settings().port == int(last["EXPOSE"])


@pytest.fixture
def ready_server(request: pytest.FixtureRequest) -> Iterator[int]:
    """Port of a server that answers /health/ready with ``request.param`` and anything else with 404."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(request.param if self.path == "/health/ready" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


class TestHealthcheck:
    def commands(self) -> list[list[str]]:
        image = next(rest for keyword, rest in instructions() if keyword == "HEALTHCHECK")
        services = [service["healthcheck"]["test"] for service in ours().values()]
        assert {test[0] for test in services} == {"CMD"}
        return [json.loads(image.split("CMD", 1)[1]), *(test[1:] for test in services)]

    def test_image_and_compose_ask_the_same(self) -> None:
        first, *others = self.commands()
        assert others == [first] * len(ours())

    @pytest.mark.parametrize(("ready_server", "healthy"), [(200, True), (503, False)], indirect=["ready_server"])
    def test_tells_ready_from_not_ready_behind_a_proxy(self, ready_server: int, healthy: bool) -> None:
        program, *arguments = self.commands()[0]
        assert program == "python"
        # Nothing listens on port 9: a request through the proxy would fail.
        environment = {"ROPEWAY_PORT": str(ready_server), "http_proxy": "http://127.0.0.1:9", "no_proxy": ""}
        assert (run(sys.executable, *arguments, **environment).returncode == 0) is healthy


class TestCompose:
    def test_ports_are_published_on_the_loopback_address_unless_asked_otherwise(self) -> None:
        published = [port for service in compose()["services"].values() for port in service.get("ports", ())]
        assert len(published) >= len(ours())
        assert [port for port in map(with_defaults, published) if not port.startswith("127.0.0.1:")] == []

    def test_it_builds_the_extras_of_the_image_and_the_tag_that_kubernetes_starts_from(self) -> None:
        assert {with_defaults(service["build"]["args"]["EXTRAS"]) for service in ours().values()} == {
            extras_of_the_image()
        }
        assert f"#EXTRAS={extras_of_the_image()}\n" in (ROOT / ".env.example").read_text()
        guide = (ROOT / "docs" / "scaling.md").read_text()
        assert re.findall(r"^FROM (\S+)$", guide, re.MULTILINE) == [compose()["services"]["ropeway"]["image"]]
        assert f'EXTRAS="{extras_of_the_image()} scale" docker compose --profile gpu build' in guide

    def test_our_containers_run_without_privileges(self) -> None:
        for service in ours().values():
            assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
            assert not {"privileged", "user", "cap_add"} & service.keys()

    def test_a_profile_starts_one_server(self) -> None:
        services = compose()["services"]
        assert all("profiles" in service for service in services.values()), "only what was asked for starts"
        for profile, server in (("gpu", "ropeway"), ("cpu", "ropeway-cpu")):
            started = [name for name, service in services.items() if {profile, "monitoring"} & {*service["profiles"]}]
            assert sorted(started) == sorted([server, "prometheus", "grafana"])

    def test_every_variable_has_a_default_and_a_line_in_the_example(self) -> None:
        example = (ROOT / ".env.example").read_text()
        used = re.findall(r"\$\{(\w+)([^}]*)\}", (ROOT / "docker-compose.yml").read_text())
        assert used
        for name, default in used:
            assert default.startswith(":-"), name
            assert f"#{name}=" in example, name

    @pytest.mark.parametrize("name", ours())
    def test_the_server_accepts_its_environment(
        self, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.chdir(tmp_path)  # away from a developer's own .env
        given = {key: with_defaults(value) for key, value in ours()[name]["environment"].items() if value is not None}
        fields = {key.removeprefix("ROPEWAY_").lower() for key in given if key.startswith("ROPEWAY_")}
        assert fields - Settings.model_fields.keys() == set()
        for key, value in given.items():
            monkeypatch.setenv(key, value)
        assert Settings().model_fields_set >= fields

    @pytest.mark.parametrize("name", ours())
    def test_every_server_serves_a_model_of_the_hub_or_of_the_folder(self, name: str) -> None:
        environment, volumes = ours()[name]["environment"], ours()[name]["volumes"]
        assert (environment["ROPEWAY_MODEL"], environment["HF_TOKEN"]) == ("${ROPEWAY_MODEL:-demo}", None)
        assert "${MODELS_DIR:-./models}:/models:ro" in volumes

    def test_every_server_shows_how_to_mount_the_files_of_its_settings(self) -> None:
        text = (ROOT / "docker-compose.yml").read_text()
        shown = re.findall(r"^      # - \S+:/config:ro # for (.*)$", text, re.MULTILINE)
        assert len(shown) == len(ours())
        assert all("ROPEWAY_API_KEYS_FILE=/config/" in why and "ROPEWAY_POLICY=/config/" in why for why in shown)

    @pytest.mark.parametrize("name", ours())
    def test_every_path_written_to_is_mounted(self, name: str) -> None:
        service = ours()[name]
        mounted = [*service["tmpfs"], *(volume.split(":")[1] for volume in service["volumes"])]
        environment = next(rest for keyword, rest in instructions() if keyword == "ENV" and "HF_HOME" in rest)
        paths = [value for value in shlex.split(environment.replace("=", " ")) if value.startswith("/")]
        assert paths
        assert [path for path in paths if not path.startswith(tuple(mounted))] == []


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
