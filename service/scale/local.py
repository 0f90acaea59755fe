"""Replicas on one machine: a private Ray cluster for the life of one command."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import psutil
import ray
import structlog
from ray import serve
from ray.exceptions import RayError

from service import logs
from service.addresses import free_port
from service.engine import FORCED
from service.scale import options, private_names
from service.scale.deployment import bound
from service.scale.reasons import last_line, reason_in
from service.settings import Settings

if TYPE_CHECKING:
    from ray.serve.schema import ApplicationStatusOverview

OBJECT_STORE_BYTES = 80 << 20
"""Near Ray's minimum: requests and answers do not pass through the object store."""

STOP_S = 10.0
"""Seconds beyond the grace that Serve may take to stop all replicas."""

POLL_S = 0.1
"""Seconds between looks at replicas that start or end."""

log = structlog.get_logger()


class ReplicasFailed(RuntimeError):
    """No replica could start; the message has the reason."""


def run(settings: Settings) -> None:
    """Serve ``settings`` with its replicas until SIGINT or SIGTERM.

    A second signal ends at once, and so does the first while no replica is ready.

    Raises:
        ReplicasFailed: when the replicas do not start; InvalidScale for too few GPUs.
    """
    signals = _Signals()
    with _cluster(settings) as gpus:
        signals.listen()
        host = settings.host
        port = settings.port or free_port(host)
        quiet = options.QUIET
        try:
            _start_serve(host, port)
            application = bound(_for_each(settings), _deployment(settings, gpus))
            target = serve.RunTarget(application, name=options.NAME, route_prefix="/", logging_config=quiet)
            signals.serving = True  # from here on, replicas may have requests
            serve.run_many([target], wait_for_applications_running=False)
            if _start(signals):
                log.info("replicas_ready", replicas=settings.replicas, url=f"http://{host}:{port}")
                signals.asked()
            log.info("draining", grace_s=settings.shutdown_grace_s)
            _drain(settings.shutdown_grace_s + 2 * options.FAILING_S + STOP_S)
        finally:
            signals.ending = True


def _start_serve(host: str, port: int) -> None:
    """Raises:
    ReplicasFailed: without a proxy, such as on a port that another process has taken meanwhile.
    """
    where = options.http_options(host, port)
    try:
        serve.start(proxy_location="HeadOnly", http_options=where, logging_config=options.QUIET)
    except (RayError, RuntimeError, TimeoutError) as error:
        raise ReplicasFailed(f"Ray Serve did not start: {last_line(str(error))}") from None


def _start(signals: _Signals) -> bool:
    """True once all replicas are ready, False after a signal.

    Raises:
        ReplicasFailed: when one does not start.
    """
    while not signals.asked(POLL_S):
        found = serve.status().applications.get(options.NAME)
        if found is not None and found.status == "RUNNING":
            return True
        if found is not None and found.status == "DEPLOY_FAILED":
            raise ReplicasFailed(_why(found))
    if not _has_ready_replicas():
        _end(0)
    return False


def _why(found: ApplicationStatusOverview) -> str:
    """The reason of a failed start; that of a replica without its own words is the end of Serve's message."""
    deployment = found.deployments.get(options.NAME)
    told = found.message if deployment is None else deployment.message
    return reason_in(told) or f"the replicas did not start, and their lines above say more: {last_line(told)}"


def _has_ready_replicas() -> bool:
    found = serve.status().applications.get(options.NAME)
    states = [deployment.replica_states for deployment in found.deployments.values()] if found is not None else []
    return any(each.get("RUNNING") for each in states)


@contextmanager
def _cluster(settings: Settings) -> Iterator[int]:
    """A Ray cluster of this process; yields its number of GPUs.

    Serve ends with it. ``serve.shutdown`` waits for a call that Ray then reports as failed and as tried again.
    """
    if settings.log_format == "json":
        private_names.print_lines_of_replicas(_print_objects)
    private_names.keep_signals()
    ray.init(
        address="local",
        num_cpus=options.bounds(settings)[1],
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        logging_level=settings.log_level.upper() if settings.log_level == "debug" else "WARNING",
        log_to_driver=True,
        _node_ip_address=private_names.loopback(),
    )
    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.WARNING)  # Serve sets its own to INFO
    try:
        yield int(ray.cluster_resources().get("GPU", 0))
    finally:
        ray.shutdown()


def _print_objects(told: dict[str, Any]) -> None:
    """Lines of another process as JSON: its own objects, and other text as an event, with its id as ``pid``.
    Ray prints no tables of its autoscaler either."""
    for line in told["lines"] if told["pid"] != "autoscaler" else ():
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        if isinstance(found, dict):
            print(json.dumps(found | {"pid": told["pid"]}), file=sys.stderr, flush=True)
        else:
            log.warning(line, pid=told["pid"])


def _for_each(settings: Settings) -> Settings:
    """The settings of one replica: its share of the processors, unless ``threads`` is set."""
    share = max(1, (os.cpu_count() or 1) // options.bounds(settings)[1])
    return settings.model_copy(update={"threads": settings.threads or share})


def _deployment(settings: Settings, gpus: int) -> dict[str, object]:
    most = options.bounds(settings)[1]
    wanted = settings.device.startswith("cuda") or (settings.device == "auto" and gpus > 0)
    needed = most * settings.tensor_parallel
    if wanted and gpus < needed:
        raise options.InvalidScale(f"ROPEWAY_REPLICAS: {most} replicas need {needed} GPUs, and there are {gpus}")
    # A model that does not load will not load on another attempt either.
    return options.deployment(settings, num_gpus=int(wanted)) | {"max_constructor_retry_count": 1}


def _drain(seconds: float) -> None:
    """Remove the application and wait until its replicas have ended, at most this long."""
    serve.delete(options.NAME, _blocking=False)
    until = time.monotonic() + seconds
    while options.NAME in serve.status().applications and time.monotonic() < until:
        time.sleep(POLL_S)


class _Signals:
    """The first signal is for ``asked`` once ``serving`` is set, and ends the process before. The second always does.

    Nothing is raised: Python drops an exception in a ``__del__``, and Ray's own code makes another error of it.
    """

    def __init__(self) -> None:
        self.serving = self.ending = False
        self._received: SimpleQueue[int] = SimpleQueue()
        self.listen()

    def listen(self) -> None:
        """Take the signals, again once Ray has started: it would write a trace of the stack for each."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._receive)

    def asked(self, seconds: float | None = None) -> bool:
        """True once a signal has come, False when none comes within ``seconds``."""
        try:
            self._received.get(timeout=seconds)
        except Empty:
            return False
        return True

    def _receive(self, number: int, _: FrameType | None) -> None:
        if not self.serving:
            _end(0)  # a requested stop is a success
        if self.ending:
            _end(FORCED + number)
        self.ending = True
        self._received.put(number)


def _end(code: int) -> NoReturn:
    """Exit at once. Ray's processes end with this one, and some of them only after seconds without a kill."""
    with suppress(Exception):
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                child.kill()
    logs.finish()
    os._exit(code)
