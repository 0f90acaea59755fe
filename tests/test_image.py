"""The image, its health check, and the compose file."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from service.settings import Settings
from tests.service.cli.shell import ropeway
from tests.test_packaging import EXTRAS, PROJECT, ROOT, run


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
