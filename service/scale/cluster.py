"""Serve's configuration for an existing Ray cluster, and the RayService of KubeRay around it. No Ray here."""

from __future__ import annotations

from typing import Any

import yaml

from service.env_file import UnreadableFile
from service.environment import misspelt, unknown
from service.scale.options import NAME, QUIET, InvalidScale, bounds, check, deployment, http_options
from service.scale.private_names import FOR_PROXIES, TESTED
from service.settings import Settings

BUILDER = "service.scale.deployment:build"

SECRET = ("database_url", "shared_url", "api_keys", "otel_endpoint")
"""Settings that may hold a password. Replicas read them from the environment of their node; no file repeats them."""

OF_SERVE = ("host", "port", "replicas", "min_replicas", "max_replicas", "target_ongoing_requests", "affinity_slack")
"""Settings that only Serve follows. They are no arguments of replicas, which would restart for another number."""

FROM_POD = 30
"""Seconds of a pod beyond the end of its replica."""


def serve_config(settings: Settings) -> dict[str, Any]:
    """Serve's configuration of the application (``ServeDeploySchema``), as JSON values.

    Raises:
        InvalidScale: naming a setting that a cluster cannot follow.
    """
    check(settings)
    if settings.device == "auto":
        raise InvalidScale("ROPEWAY_DEVICE: cuda or cpu for a cluster, whose nodes may differ, not auto")
    if settings.port == 0:
        raise InvalidScale("ROPEWAY_PORT: between 1 and 65535 for a cluster, not 0")
    given = settings.model_dump(mode="json", exclude_unset=True, exclude={*SECRET, *OF_SERVE})
    return {
        "proxy_location": "EveryNode",
        "http_options": http_options(settings.host, settings.port),
        "controller_options": {"runtime_env": {"env_vars": FOR_PROXIES}},
        "logging_config": QUIET,
        "applications": [
            {
                "name": NAME,
                "route_prefix": "/",
                "import_path": BUILDER,
                "args": {"settings": given},
                "deployments": [_deployment(settings)],
            }
        ],
    }


def _deployment(settings: Settings) -> dict[str, Any]:
    """Serve's options of the deployment on a cluster: ``threads`` processors and, on CUDA, one GPU per replica."""
    return deployment(settings, num_cpus=settings.threads or 1, num_gpus=int(settings.device.startswith("cuda")))


def settings_on_node(given: dict[str, Any]) -> Settings:
    """Settings of the configuration, completed by the environment of this node.

    Raises:
        InvalidScale: for a misspelt variable or an unreadable file of them, without a database that all nodes share,
            and as ``check``.
    """
    try:
        slips = misspelt(unknown())
    except UnreadableFile as error:
        raise InvalidScale(str(error)) from None
    if slips:
        raise InvalidScale("; ".join(slips))
    settings = Settings(**given)
    check(settings)
    if not (settings.database_url or "").startswith("postgresql"):
        raise InvalidScale("ROPEWAY_DATABASE_URL: postgresql://... in the environment of every node, for their jobs")
    return settings


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as a block."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def as_yaml(values: dict[str, Any]) -> str:
    """``values`` as YAML, in their order."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False)


def rayservice(settings: Settings, config: dict[str, Any], image: str, memory: str) -> dict[str, Any]:
    """The RayService of KubeRay with ``config`` from ``serve_config``. A pod has one replica and ``memory``."""
    actor = _deployment(settings)
    least, most = bounds(settings)
    cpus, gpus = (actor["ray_actor_options"][name] for name in ("num_cpus", "num_gpus"))
    limits = {"cpu": str(cpus + 1), "memory": memory} | ({"nvidia.com/gpu": str(gpus)} if gpus else {})
    grace_s = int(actor["graceful_shutdown_timeout_s"]) + FROM_POD
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {"name": NAME},
        "spec": {
            "serveConfigV2": as_yaml(config),
            "rayClusterConfig": {
                "rayVersion": f"{TESTED}.0",
                "authOptions": {"mode": "token"},
                "enableInTreeAutoscaling": settings.max_replicas is not None,
                "headGroupSpec": {
                    "rayStartParams": {"num-cpus": "0"},
                    "template": _pod("head", image, {"cpu": "2", "memory": "4Gi"}, grace_s, settings.port),
                },
                "workerGroupSpecs": [
                    {
                        "groupName": "replicas",
                        "replicas": settings.replicas,
                        "minReplicas": least,
                        "maxReplicas": most,
                        "rayStartParams": {"num-cpus": str(cpus)},
                        "template": _pod("worker", image, limits, grace_s, settings.port),
                    }
                ],
            },
        },
    }


def _pod(kind: str, image: str, limits: dict[str, str], grace_s: int, port: int) -> dict[str, Any]:
    container = {
        "name": f"ray-{kind}",
        "image": image,
        "env": [{"name": "RAY_USAGE_STATS_ENABLED", "value": "0"}],
        "envFrom": [{"secretRef": {"name": NAME}}],
        "ports": [{"name": "serve", "containerPort": port}],
        "resources": {"limits": limits, "requests": dict(limits)},
    }
    return {"spec": {"terminationGracePeriodSeconds": grace_s, "containers": [container]}}
