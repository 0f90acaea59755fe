"""`ropeway scale` without a cluster: what it prints, sends, reads and refuses."""

from __future__ import annotations

import copy
import json
import os
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from service.cli.commands import app
from service.scale import autoscaling, private_names
from service.scale.cluster import SECRET, as_yaml, serve_config, settings_on_node
from service.scale.options import InvalidScale
from service.settings import Settings
from tests.conftest import ROOT
from tests.service.scale.dashboard import DETAILS, METRICS, Dashboard, answers

CUDA = ("--set", "device=cuda")


def scale(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, ["scale", *arguments], input=stdin)


def config(*arguments: str) -> dict[str, Any]:
    """The printed configuration of `ropeway scale config`, parsed."""
    result = scale("config", *CUDA, *arguments)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = yaml.safe_load(result.stdout)
    return found


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No .env, no setting in the environment, and no address of a cluster."""
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith(("ROPEWAY_", "RAY_")):
            monkeypatch.delenv(name)


class TestConfig:
    def test_names_the_application_and_its_settings(self) -> None:
        found = config("--set", "replicas=3", "--set", "threads=4", "--set", "max_queue=7", "--set", "port=9000")
        (application,) = found["applications"]
        assert application["args"]["settings"] == {"device": "cuda", "threads": 4, "max_queue": 7}
        (deployment,) = application["deployments"]
        assert deployment["num_replicas"] == 3
        assert deployment["ray_actor_options"] == {"num_cpus": 4, "num_gpus": 1}
        assert found["http_options"]["port"] == 9000

    def test_a_given_default_is_printed(self) -> None:
        """The environment of a node would replace it otherwise."""
        default = Settings.model_fields["max_queue"].default
        (application,) = config("--set", f"max_queue={default}")["applications"]
        assert application["args"]["settings"]["max_queue"] == default

    def test_a_change_of_scale_changes_no_argument_of_replicas(self) -> None:
        (few,) = config("--set", "replicas=2")["applications"]
        (many,) = config("--set", "max_replicas=9", "--set", "affinity_slack=2")["applications"]
        assert few["args"] == many["args"]
        assert few["deployments"] != many["deployments"]

    def test_secrets_are_named_and_not_printed(self) -> None:
        result = scale("config", *CUDA, "--set", "database_url=postgresql://me:word@host/x", "--set", "api_keys=word")
        assert "word" not in result.output
        assert "ROPEWAY_DATABASE_URL, ROPEWAY_API_KEYS" in result.stderr

    @pytest.mark.parametrize(
        ("given", "named"),
        [
            ((), "ROPEWAY_DEVICE"),
            ((*CUDA, "--set", "port=0"), "ROPEWAY_PORT"),
            ((*CUDA, "--set", "key_concurrency=1"), "ROPEWAY_KEY_CONCURRENCY"),
            ((*CUDA, "--set", "replicas=0"), "ROPEWAY_REPLICAS"),
            ((*CUDA, "--set", "no=1"), "NAME=VALUE"),
            ((*CUDA, "--kuberay"), "--image"),
            ((*CUDA, "--image", "a"), "--kuberay"),
        ],
    )
    def test_bad_input_is_refused_by_name(self, given: tuple[str, ...], named: str) -> None:
        result = scale("config", *given)
        assert result.exit_code in (1, 2)
        assert named in result.output

    def test_the_environment_of_a_node_completes_the_settings(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ROPEWAY_DATABASE_URL", "postgresql://host/x")
        (application,) = config("--set", "cors_origins=https://a,https://b", "--set", "adapters=x=/y")["applications"]
        found = settings_on_node(application["args"]["settings"])
        assert (found.cors_origins, found.adapters) == (("https://a", "https://b"), {"x": Path("/y")})
        assert found.database_url == "postgresql://host/x"

    @pytest.mark.parametrize("given", [{}, {"database_url": "sqlite:///x"}])
    def test_nodes_share_a_database(self, given: dict[str, str]) -> None:
        with pytest.raises(InvalidScale, match="ROPEWAY_DATABASE_URL: postgresql"):
            settings_on_node(given)

    def test_the_manifest_of_kuberay(self) -> None:
        arguments = ("--set", "max_replicas=4", "--set", "threads=3", "--set", "shutdown_grace_s=60")
        spec = config("--kuberay", "--image", "a/b:1", *arguments)["spec"]
        inner = yaml.safe_load(spec["serveConfigV2"])
        assert inner == config("--set", "host=0.0.0.0", *arguments)
        (workers,) = spec["rayClusterConfig"]["workerGroupSpecs"]
        assert [workers[name] for name in ("minReplicas", "replicas", "maxReplicas")] == [1, 1, 4]
        pod = workers["template"]["spec"]
        assert workers["rayStartParams"] == {"num-cpus": "3"}
        assert pod["containers"][0]["resources"]["limits"] == {"cpu": "4", "memory": "16Gi", "nvidia.com/gpu": "1"}
        (deployment,) = inner["applications"][0]["deployments"]
        assert pod["terminationGracePeriodSeconds"] > deployment["graceful_shutdown_timeout_s"] > 60

    @pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: the extra `scale` has it")
    @pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's own
    @pytest.mark.parametrize("given", [("--set", "replicas=2"), ("--set", "max_replicas=4")])
    def test_serve_reads_it(self, given: tuple[str, ...]) -> None:
        from ray.serve.schema import ServeDeploySchema

        for found in (
            config(*given),
            yaml.safe_load(config("--kuberay", "--image", "a", *given)["spec"]["serveConfigV2"]),
        ):
            schema = ServeDeploySchema.model_validate(found)
            assert schema.applications[0].import_path == "service.scale.deployment:build"
            written = schema.applications[0].deployments[0].model_dump(exclude_unset=True)
            assert written.keys() == found["applications"][0]["deployments"][0].keys()


@pytest.fixture
def target() -> Iterator[str]:
    """HOST:PORT of a node's metrics."""

    class Metrics(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(METRICS.encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Metrics) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


class TestCluster:
    def test_what_is_printed_is_deployed(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        dashboard, file = Dashboard(DETAILS), tmp_path / "config.yaml"
        answers(monkeypatch, dashboard)
        file.write_text(scale("config", *CUDA).stdout)
        assert scale("apply", str(file)).exit_code == 0
        assert scale("apply", "-", stdin=file.read_text()).exit_code == 0
        assert dashboard.deployed == [config(), config()]

    @pytest.mark.parametrize("text", ["", "words", "a: [", "- a"])
    def test_a_file_without_a_configuration_is_refused(self, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
        dashboard = Dashboard(DETAILS)
        answers(monkeypatch, dashboard)
        result = scale("apply", "-", stdin=text)
        assert (result.exit_code, dashboard.deployed) == (1, [])
        assert "error:" in result.stderr

    def test_the_status_joins_states_and_numbers(self, monkeypatch: pytest.MonkeyPatch, target: str) -> None:
        answers(monkeypatch, Dashboard(DETAILS, target, "127.0.0.1:1"))
        assert json.loads(scale("status", "--json").stdout) == {
            "state": "DEPLOYING",
            "message": "one replica starts",
            "wanted": 2,
            "queued": 5,
            "replicas": [
                {"id": "aaa", "node": "10.0.0.1", "pid": 7, "state": "RUNNING", "running": 3},
                {"id": "bbb", "node": None, "pid": None, "state": "STARTING", "running": None},
            ],
            "proxies": {"10.0.0.1": "HEALTHY"},
            "unread": ["127.0.0.1:1"],
        }
        table = scale("status")
        assert "one replica starts" in table.stdout
        assert "127.0.0.1:1" in table.stderr

    @pytest.mark.parametrize(
        ("ending", "shown"),
        [
            ("service.scale.reasons.NotStarted: ROPEWAY_MODEL: none\n", "ROPEWAY_MODEL: none"),
            ("service.scale.reasons.NotStarted: not this\nValueError: other: this", "Failed to update"),
            ("RuntimeError: ROPEWAY_MODEL: none", "Failed to update"),
            ("", "Failed to update"),
        ],
    )
    def test_the_status_has_the_reason_of_a_replica(
        self, monkeypatch: pytest.MonkeyPatch, ending: str, shown: str
    ) -> None:
        details = copy.deepcopy(DETAILS)
        application = details["applications"]["ropeway"]
        application["message"] = "Failed to update"
        application["deployments"]["ropeway"]["message"] = f"Error:\nTraceback\n  File\n{ending}"
        answers(monkeypatch, Dashboard(details))
        assert json.loads(scale("status", "--json").stdout)["message"] == shown

    def test_a_cluster_without_the_application(self, monkeypatch: pytest.MonkeyPatch) -> None:
        answers(monkeypatch, Dashboard({"proxies": {}, "applications": {}}))
        result = scale("status")
        assert result.exit_code == 1
        assert "ropeway scale apply" in result.stderr

    def test_the_address_is_a_dashboard(self) -> None:
        result = scale("status", "--address", "10.0.0.1:6379")
        assert result.exit_code == 2
        assert "http://HOST:8265" in " ".join(result.stderr.split())

    @pytest.mark.parametrize("command", [("status",), ("apply", "-")])
    def test_an_absent_extra_is_a_clear_error(self, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]) -> None:
        def absent(name: str) -> str:
            raise PackageNotFoundError(name)

        monkeypatch.setattr(private_names, "version", absent)
        result = scale(*command, stdin="a: b")
        assert result.exit_code == 1
        assert "install the extra `scale`" in result.stderr

    @pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: the extra `scale` has it")
    def test_no_cluster_is_a_clear_error(self) -> None:
        result = scale("status", "--address", "http://127.0.0.1:1")
        assert result.exit_code == 1
        assert "127.0.0.1:1" in result.stderr

    @pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: the extra `scale` has it")
    @pytest.mark.parametrize("command", [("status",), ("apply", "-")])
    def test_a_cluster_that_asks_for_a_token_is_a_clear_error(self, command: tuple[str, ...]) -> None:
        class Refusing(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(401)
                self.end_headers()
                self.wfile.write(b"Unauthorized: Missing authentication token")

            def log_message(self, *_: object) -> None:
                pass

        with HTTPServer(("127.0.0.1", 0), Refusing) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            result = scale(*command, "--address", f"http://127.0.0.1:{server.server_port}", stdin="a: b")
            server.shutdown()
        assert (result.exit_code, type(result.exception)) == (1, SystemExit)
        assert "RAY_AUTH_TOKEN" in result.stderr


@pytest.mark.parametrize(
    ("requests", "jobs", "replicas"), [(64.0, {}, 2.0), (0.0, {"a": 5.0, "b": 6.0}, 0.1875), (64.0, {"a": 32.0}, 3.0)]
)
def test_a_job_counts_as_a_request(requests: float, jobs: dict[str, float], replicas: float) -> None:
    """Each replica reports the jobs of the database that all share: they count once."""
    metrics = {autoscaling.JOBS: jobs} if jobs else {}
    config = SimpleNamespace(target_ongoing_requests=32.0)
    context = SimpleNamespace(total_num_requests=requests, aggregated_metrics=metrics, config=config)
    assert autoscaling.by_work(context) == (replicas, {})


def test_autoscaling_counts_jobs() -> None:
    (application,) = config("--set", "max_replicas=4")["applications"]
    (deployment,) = application["deployments"]
    assert deployment["autoscaling_config"]["policy"] == {"policy_function": autoscaling.POLICY}


@pytest.mark.parametrize("is_file", [True, False], ids=["a file", "below a file"])
def test_a_folder_for_ray_that_takes_no_files_is_one_line(
    is_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" if is_file else tmp_path / "file" / "ray"
    monkeypatch.setenv("RAY_TMPDIR", str(folder))
    monkeypatch.setattr(private_names, "require_ray", lambda: None)
    result = CliRunner().invoke(app, ["serve", "--replicas", "2", "--set", "port=0"])
    assert result.exit_code == 1
    assert f"error: RAY_TMPDIR: {str(folder)!r} must be a folder that takes files: " in result.stderr.replace("\n", " ")
    assert "Traceback" not in result.output


def test_no_setting_with_a_password_is_printed() -> None:
    """An address may hold one; so may a setting that is yet to come."""
    addresses = [name for name in Settings.model_fields if name.endswith(("_url", "_endpoint", "_keys"))]
    assert set(addresses) == set(SECRET)
    given = {name: "https://user:hunter2@host:4318" for name in addresses if name != "database_url"}
    given["database_url"] = "postgresql://user:hunter2@host/jobs"
    settings = Settings(_env_file=None, model="/models/llama", device="cpu", replicas=2, **given)
    assert "hunter2" not in as_yaml(serve_config(settings))


def test_the_guide_gives_replicas_every_secret() -> None:
    """The manifest has none of them."""
    guide = (ROOT / "docs/scaling.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"kubectl create secret generic ropeway((?:.*\\\n)*.*)", guide)
    assert set(re.findall(r"ROPEWAY_(\w+)=", command)) == {name.upper() for name in SECRET}
