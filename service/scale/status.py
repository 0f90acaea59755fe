"""State of the replicas on a cluster: from Serve's REST API, and the metrics that every node of Ray exports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from service.scale.options import NAME
from service.scale.private_names import ClusterClient
from service.scale.reasons import reason_in

RUNNING, QUEUED = "ray_serve_replica_processing_queries", "ray_serve_deployment_queued_queries"

READ_S = 5.0
"""Seconds that the metrics of one node may take."""


@dataclass(frozen=True)
class Replica:
    """``state`` is Serve's; ``running`` are requests, None where no node has exported the number. A replica that
    starts has no ``node`` yet."""

    id: str
    node: str | None
    pid: int | None
    state: str
    running: int | None


@dataclass(frozen=True)
class Status:
    """State of the application; ``queued`` are requests that wait in the proxies for a replica.

    ``proxies`` maps nodes to Serve's state of their proxy. ``unread`` are nodes whose metrics gave no answer.
    """

    state: str
    message: str
    wanted: int
    queued: int | None
    replicas: list[Replica] = field(default_factory=list)
    proxies: dict[str, str] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)


class NotDeployed(LookupError):
    """The cluster has no application of ours."""


def status(client: ClusterClient) -> Status:
    """The state of our application on the cluster of ``client``.

    Raises:
        NotDeployed: without one; ClusterUnusable: without an answer of the cluster.
    """
    details, targets = client.details(), client.metrics_targets()
    texts, unread = {}, []
    with httpx.Client(timeout=READ_S, trust_env=False) as http:
        for target in targets:
            try:
                texts[target] = http.get(f"http://{target}/metrics").raise_for_status().text
            except httpx.HTTPError:
                unread.append(target)
    return _combined(details, numbers(texts.values()), unread)


def numbers(texts: Iterable[str]) -> dict[tuple[str, str], float]:
    """(metric, replica or "") -> its sum over all samples of our deployment, from texts in Prometheus' format."""
    found: dict[tuple[str, str], float] = {}
    for text in texts:
        lines = [line for line in text.splitlines() if line.startswith((RUNNING, QUEUED))]
        for family in text_string_to_metric_families("\n".join([*lines, ""])):
            for sample in family.samples:
                if sample.labels.get("application") == NAME:
                    key = sample.name, sample.labels.get("replica", "")
                    found[key] = found.get(key, 0) + sample.value
    return found


def _combined(details: Mapping[str, Any], found: Mapping[tuple[str, str], float], unread: list[str]) -> Status:
    application = details["applications"].get(NAME)
    if application is None:
        raise NotDeployed(f"the cluster has no application {NAME!r}: ropeway scale apply FILE deploys it")
    deployment = application["deployments"].get(NAME, {"message": "", "target_num_replicas": 0, "replicas": []})
    queued = [value for (metric, _), value in found.items() if metric == QUEUED]
    return Status(
        state=application["status"],
        message=reason_in(deployment["message"]) or application["message"] or deployment["message"],
        wanted=deployment["target_num_replicas"],
        queued=int(sum(queued)) if queued else None,
        replicas=[_replica(given, found) for given in deployment["replicas"]],
        proxies={proxy.get("node_ip", name): proxy["status"] for name, proxy in details["proxies"].items()},
        unread=unread,
    )


def _replica(given: Mapping[str, Any], found: Mapping[tuple[str, str], float]) -> Replica:
    running = found.get((RUNNING, given["replica_id"]))
    return Replica(
        id=given["replica_id"],
        node=given.get("node_ip"),
        pid=given.get("pid"),
        state=given["state"],
        running=None if running is None else int(running),
    )
