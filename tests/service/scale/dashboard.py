"""A dashboard of a cluster, and what it answers."""

from __future__ import annotations

from typing import Any

import pytest

from service.scale import private_names

DETAILS: dict[str, Any] = {
    "proxies": {"node": {"node_ip": "10.0.0.1", "status": "HEALTHY"}},
    "applications": {
        "ropeway": {
            "status": "DEPLOYING",
            "message": "",
            "deployments": {
                "ropeway": {
                    "message": "one replica starts",
                    "target_num_replicas": 2,
                    "replicas": [
                        {"replica_id": "aaa", "node_ip": "10.0.0.1", "pid": 7, "state": "RUNNING"},
                        {"replica_id": "bbb", "state": "STARTING"},
                    ],
                }
            },
        }
    },
}

METRICS = """# HELP ray_serve_replica_processing_queries requests
# TYPE ray_serve_replica_processing_queries gauge
ray_serve_replica_processing_queries{application="ropeway",replica="aaa"} 3.0
ray_serve_replica_processing_queries{application="other",replica="aaa"} 50.0
ray_serve_deployment_queued_queries{application="ropeway",handle="x"} 1.0
ray_serve_deployment_queued_queries{application="ropeway",handle="y"} 4.0
"""


class Dashboard:
    """A cluster with one application, and a node whose metrics are at ``target``."""

    def __init__(self, details: dict[str, Any], *targets: str) -> None:
        self._details, self._targets = details, list(targets)
        self.deployed: list[Any] = []

    def details(self) -> dict[str, Any]:
        return self._details

    def metrics_targets(self) -> list[str]:
        return self._targets

    def deploy(self, config: dict[str, Any]) -> None:
        self.deployed.append(config)


def answers(monkeypatch: pytest.MonkeyPatch, dashboard: Dashboard) -> None:
    """Commands find ``dashboard`` at any address, with or without Ray."""
    monkeypatch.setattr(private_names, "version", lambda _: f"{private_names.TESTED}.0")
    monkeypatch.setattr(private_names, "ClusterClient", lambda _: dashboard)
