"""Settings of replicas, the deployment that they ask for, and refusals before Ray starts."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from typing import Any

import pytest
from typer.testing import CliRunner

from service.cli.commands import app
from service.scale import private_names
from service.scale.options import InvalidScale, bounds, check, deployment, is_scaled
from service.settings import Settings


def settings(**given: Any) -> Settings:
    return Settings(_env_file=None, **given)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (False, 1, 1)),
        ({"replicas": 3}, (True, 3, 3)),
        ({"max_replicas": 4}, (True, 1, 4)),
        ({"replicas": 2, "min_replicas": 2, "max_replicas": 5}, (True, 2, 5)),
    ],
)
def test_the_bounds_of_replicas(given: dict[str, Any], expected: tuple[bool, int, int]) -> None:
    check(settings(**given))
    assert (is_scaled(settings(**given)), *bounds(settings(**given))) == expected


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"replicas": 3, "max_replicas": 2}, "ROPEWAY_REPLICAS: between 1 and 2, not 3"),
        ({"replicas": 2, "min_replicas": 2}, "ROPEWAY_MIN_REPLICAS: only with"),
        ({"min_replicas": 2}, "ROPEWAY_MIN_REPLICAS: only with ROPEWAY_MAX_REPLICAS"),
        ({"min_replicas": 3, "max_replicas": 2}, r"ROPEWAY_MIN_REPLICAS: at most ROPEWAY_MAX_REPLICAS \(2\), not 3"),
        ({"replicas": 2, "metrics_port": 9000}, "ROPEWAY_METRICS_PORT"),
        ({"replicas": 2, "key_concurrency": 3}, "ROPEWAY_KEY_CONCURRENCY"),
        ({"replicas": 2, "key_tokens_per_minute": 3}, "ROPEWAY_KEY_TOKENS_PER_MINUTE"),
    ],
)
def test_settings_that_replicas_cannot_follow(given: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidScale, match=named):
        check(settings(**given))


def test_the_deployment_follows_the_settings() -> None:
    fixed = deployment(settings(replicas=3, shutdown_grace_s=7, max_connections=50, affinity_slack=2), num_gpus=1)
    assert (fixed["num_replicas"], fixed["max_ongoing_requests"]) == (3, 50)
    assert fixed["graceful_shutdown_timeout_s"] > 7
    assert fixed["ray_actor_options"]["num_gpus"] == 1
    assert deployment(settings(tensor_parallel=2), num_gpus=1)["ray_actor_options"]["num_gpus"] == 2
    assert fixed["request_router_config"]["request_router_kwargs"] == {"slack": 2}
    scaled = deployment(settings(replicas=2, max_replicas=9, target_ongoing_requests=5))
    assert "num_replicas" not in scaled
    assert scaled["autoscaling_config"] == {
        "min_replicas": 1,
        "max_replicas": 9,
        "initial_replicas": 2,
        "target_ongoing_requests": 5,
        "policy": {"policy_function": "service.scale.autoscaling:by_work"},
    }


def serve(monkeypatch: pytest.MonkeyPatch, installed: str | None, *options: str) -> str:
    """Output of `ropeway serve` with this version of Ray, or without Ray."""

    def version(name: str) -> str:
        if installed is None:
            raise PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(private_names, "version", version)
    result = CliRunner().invoke(app, ["serve", *options])
    assert result.exit_code == 1
    return " ".join(result.output.split())


def test_an_absent_extra_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "replicas need Ray Serve: install the extra `scale`" in serve(monkeypatch, None, "--replicas", "2")


def test_another_minor_version_is_refused_with_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = serve(monkeypatch, "2.61.0", "--replicas", "2")
    assert "2.61.0" in printed
    assert private_names.TESTED in printed


def test_settings_are_checked_before_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = serve(monkeypatch, None, "--replicas", "2", "--set", "key_concurrency=1")
    assert "ROPEWAY_KEY_CONCURRENCY" in printed


def test_a_least_number_alone_starts_no_plain_server(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = serve(monkeypatch, None, "--set", "min_replicas=1")
    assert "ROPEWAY_MIN_REPLICAS: only with ROPEWAY_MAX_REPLICAS" in printed


def test_zero_replicas_name_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "ROPEWAY_REPLICAS" in serve(monkeypatch, None, "--set", "replicas=0")
