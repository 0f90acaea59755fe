"""Every private or alpha name of Ray that the service uses, for one tested minor version."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

TESTED = "2.60"
"""Minor version of Ray whose names these are."""

PROXY_MIDDLEWARE = "service.scale.proxy.middleware:middleware"

AFFINITY_HEADER = "x-ropeway-affinity"
"""Request header between our middleware in the proxy and the router."""

FOR_PROXIES = {
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": PROXY_MIDDLEWARE,
    "RAY_SERVE_SESSION_ID_HEADER_KEY": AFFINITY_HEADER,
}
"""Environment of Serve's controller and proxies. Proxies have that of the controller."""


class RayUnusable(RuntimeError):
    """Ray is absent, or a version with other private names."""


def require_ray() -> None:
    """Raises:
    RayUnusable: naming the extra, or both versions.
    """
    try:
        installed = version("ray")
    except PackageNotFoundError:
        raise RayUnusable("replicas need Ray Serve: install the extra `scale`") from None
    if not installed.startswith(f"{TESTED}."):
        raise RayUnusable(f"Ray {installed} has other private names than Ray {TESTED}, for which this is written")


def prepare_private_cluster() -> None:
    """Set the environment of a cluster that only this process and its children may enter. Call it before Ray is
    imported, which reads it once.

    Raises:
        RayUnusable: when Ray could not write where ``RAY_TMPDIR`` says.
    """
    _check_folder()
    os.environ.update(FOR_PROXIES, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Every log line of a replica appears at once, also one that another replica has written.
    os.environ.update(RAY_DEDUP_LOGS="0", RAY_COLOR_PREFIX="0", RAY_FLUSH_DRIVER_LOGS="1")


def _check_folder() -> None:
    """Raises:
    RayUnusable: for a ``RAY_TMPDIR`` that is no folder, cannot be made, or takes no files.
    """
    folder = os.environ.get("RAY_TMPDIR")
    if not folder:
        return
    try:
        os.makedirs(folder, exist_ok=True)  # as Ray does
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise RayUnusable(f"RAY_TMPDIR: {folder!r} must be a folder that takes files: {error.strerror}") from None


def loopback() -> str:
    """The loopback address for a cluster of one machine. Ray would replace it by an address that others reach."""
    from ray._private import services

    services.resolve_ip_for_localhost = lambda host: host
    return "127.0.0.1"


def keep_signals() -> None:
    """Leave SIGTERM to this process. Ray would set its own handler as it starts, twice, which exits with 15."""
    from ray._private import utils

    utils.set_sigterm_handler = lambda _: None


def print_lines_of_replicas(show: Callable[[dict[str, Any]], None]) -> None:
    """Hand lines of Ray's other processes to ``show`` instead of printing them: ``lines`` of the process ``pid``."""
    from ray._private import worker

    worker.print_worker_logs = lambda told, *_, **__: show(told)


def is_stopping() -> bool:
    """True in a replica that Serve has begun to stop. Serve has no hook for it, and cuts what runs at the end."""
    return bool(_replica()._shutting_down)


def router_class() -> Any:
    """The experimental router whose loop retries a request until a replica accepts it."""
    from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter

    return ConsistentHashRouter


def update_replicas(router: Any, replicas: list[Any]) -> None:
    """Hand the running replicas to the base of all routers, past the ring of the experimental one."""
    from ray.serve.request_router import RequestRouter

    RequestRouter.update_replicas(router, replicas)


def session_of(pending_request: Any) -> str:
    """The header of a pending request that ``AFFINITY_HEADER`` names, or ""; a refused request waits before the next
    attempt."""
    if pending_request is None:
        return ""
    pending_request.routing_context.should_backoff = True
    return str(pending_request.metadata.session_id)


def queue_length(router: Any, replica: Any) -> int:
    """Requests of a replica that the router knows of."""
    return router._replica_queue_len_cache.get(replica.replica_id) or 0


def require_names() -> None:
    """Raises:
    RayUnusable: in a replica without the names above.
    """
    try:
        is_stopping()
    except (AttributeError, KeyError) as error:
        raise RayUnusable(f"this Ray lacks a private name of Ray {TESTED}: {error}") from error


def _replica() -> Any:
    import ray

    worker = ray._private.worker.global_worker
    return worker.actors[worker.core_worker.get_actor_id()]._replica_impl


class ClusterUnusable(RuntimeError):
    """No cluster answers, or it refuses a request; the message has its reason."""


class ClusterClient:
    """Serve's REST API on a cluster's dashboard, with Ray's token where one is set.

    Raises:
        ClusterUnusable: from every method, and where no cluster answers.
    """

    def __init__(self, address: str) -> None:
        from ray.dashboard.modules.serve.sdk import ServeSubmissionClient

        with _refusals():
            self._client = ServeSubmissionClient(address)

    def details(self) -> dict[str, Any]:
        """State of Serve: ``ServeInstanceDetails`` as JSON values."""
        with _refusals():
            found: dict[str, Any] = self._client.get_serve_details()
        return found

    def deploy(self, config: dict[str, Any]) -> None:
        """Replace the applications of the cluster by those of ``config``, a ``ServeDeploySchema``."""
        with _refusals():
            self._client.deploy_applications(config)

    def metrics_targets(self) -> list[str]:
        """HOST:PORT of all metrics in Prometheus' format: of each node, and two of the cluster."""
        with _refusals():
            answer = self._client._do_request("GET", "/api/prometheus/sd")
            answer.raise_for_status()
            return [target for group in answer.json() for target in group["targets"]]


@contextmanager
def _refusals() -> Iterator[None]:
    from ray.exceptions import RayError

    try:
        yield
    except (OSError, RuntimeError, ValueError, RayError) as error:  # requests' own errors are OSErrors
        raise ClusterUnusable(str(error)) from None
