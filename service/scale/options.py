"""The deployment that settings ask for, as plain values: no Ray here."""

from __future__ import annotations

from typing import Any

from service.scale.autoscaling import POLICY
from service.settings import Settings

NAME = "ropeway"
"""Name of the Serve application and of its one deployment."""

ROUTER = "service.scale.proxy.router:AffinityRouter"

QUIET = {"enable_access_log": False, "log_level": "WARNING"}
"""Serve's own log: the service logs each request itself."""

FAILING_S = 2.0
"""Seconds between the failure of what runs at the end of a grace and the end of the replica."""


class InvalidScale(ValueError):
    """Settings that replicas cannot follow; the message names them."""


def is_scaled(settings: Settings) -> bool:
    """True if these settings ask for more than the one process that needs no Ray, or try to."""
    return settings.replicas > 1 or settings.max_replicas is not None or settings.min_replicas is not None


def check(settings: Settings) -> None:
    """Refuse settings that each replica would follow by itself.

    Raises:
        InvalidScale: naming the setting and the allowed values.
    """
    if settings.min_replicas is not None and settings.max_replicas is None:
        raise InvalidScale("ROPEWAY_MIN_REPLICAS: only with ROPEWAY_MAX_REPLICAS, which turns autoscaling on")
    least, most = bounds(settings)
    if least > most:
        raise InvalidScale(f"ROPEWAY_MIN_REPLICAS: at most ROPEWAY_MAX_REPLICAS ({most}), not {least}")
    if not least <= settings.replicas <= most:
        raise InvalidScale(f"ROPEWAY_REPLICAS: between {least} and {most}, not {settings.replicas}")
    if settings.metrics_port:
        raise InvalidScale("ROPEWAY_METRICS_PORT: unset or 0 with replicas, which cannot share one port")
    for name in ("key_concurrency", "key_tokens_per_minute"):
        if getattr(settings, name) is not None and settings.shared_url is None:
            raise InvalidScale(f"ROPEWAY_{name.upper()}: only with ROPEWAY_SHARED_URL: each replica grants it in full")


def bounds(settings: Settings) -> tuple[int, int]:
    """Least and most replicas; the same number without autoscaling."""
    if settings.max_replicas is None:
        return settings.replicas, settings.replicas
    return settings.min_replicas or 1, settings.max_replicas


def http_options(host: str, port: int) -> dict[str, Any]:
    """Serve's options of its proxies."""
    return {"host": host, "port": port, "keep_alive_timeout_s": 75}


def deployment(settings: Settings, *, num_cpus: int = 1, num_gpus: int = 0) -> dict[str, Any]:
    """Serve's options of the deployment, JSON values: ``num_cpus`` for each replica, ``num_gpus`` for each rank.

    The ranks are children of the replica's process, so that Ray places them together, on one node.
    """
    options: dict[str, Any] = {
        "name": NAME,
        "max_ongoing_requests": settings.max_connections,
        # Our own admission refuses with 429. Serve would queue without a bound.
        "max_queued_requests": settings.max_connections,
        "graceful_shutdown_timeout_s": settings.shutdown_grace_s + 2 * FAILING_S,
        "graceful_shutdown_wait_loop_s": 0.2,
        "health_check_period_s": 5.0,
        "health_check_timeout_s": 30.0,
        "ray_actor_options": {"num_cpus": num_cpus, "num_gpus": num_gpus * settings.tensor_parallel},
    }
    least, most = bounds(settings)
    options["request_router_config"] = {
        "request_router_class": ROUTER,
        "request_router_kwargs": {"slack": settings.affinity_slack},
    }
    if settings.max_replicas is None:
        return options | {"num_replicas": settings.replicas}
    return options | {
        "autoscaling_config": {
            "min_replicas": least,
            "max_replicas": most,
            "initial_replicas": settings.replicas,
            "target_ongoing_requests": settings.target_ongoing_requests,
            "policy": {"policy_function": POLICY},
        }
    }
