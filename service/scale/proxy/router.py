"""Serve's choice of a replica: the one that has the prefix of a request, within a bound on its load."""

from __future__ import annotations

import random
from typing import Any

from service.scale import private_names
from service.scale.proxy import metrics
from service.scale.proxy.ring import Ring

Base: Any = private_names.router_class()


class AffinityRouter(Base):  # type: ignore[misc]
    """Of its base class it uses the loop that retries a request until a replica accepts it."""

    def initialize_state(self, slack: float = 1.25) -> None:
        """Serve calls this with ``request_router_kwargs``."""
        self._slack, self._ring, self._names = slack, Ring(()), frozenset[str]()

    def update_replicas(self, replicas: list[Any]) -> None:
        """Serve calls this with all running replicas."""
        private_names.update_replicas(self, replicas)
        names = frozenset(replica.replica_id.unique_id for replica in replicas)
        if names != self._names:
            self._ring, self._names = Ring(names), names
            metrics.known = names

    def on_replica_actor_died(self, replica_id: Any) -> None:
        """Serve calls this seconds before its controller takes the replica from the list."""
        super().on_replica_actor_died(replica_id)
        if metrics.known is not None:
            metrics.known -= {replica_id.unique_id}

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """Groups of replicas to try in turn; Serve takes the least loaded of a group."""
        if not candidate_replicas:
            return []
        key = private_names.session_of(pending_request)
        if not key:
            return [random.sample(candidate_replicas, min(2, len(candidate_replicas)))]
        known = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if key.startswith(metrics.REPLICA):
            return [[known[name]] for name in known if key == metrics.key_of(name)]
        loads = {name: private_names.queue_length(self, replica) for name, replica in known.items()}
        return [[known[name]] for name in self._ring.choose(key, loads, self._slack)]
