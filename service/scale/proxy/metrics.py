"""``GET /metrics`` in Serve's proxy: the numbers of all replicas, each sample with the label ``replica``.

A replica answers for itself, and a proxy would pass each request to another one. Counters would go back at random.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace

from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Scope

from service.scale.private_names import AFFINITY_HEADER

PATH = "/metrics"
ENCODE, TYPE = choose_encoder("text/plain")

READ_S = 3.0
"""Seconds that a replica may take; without an answer its samples are missing."""

REPLICA = "replica "
"""Start of an affinity key that names a replica. Other keys are hashes."""

known: frozenset[str] | None = None
"""Names of the running replicas, which the router of this process writes here; None before it has had any."""


def key_of(replica: str) -> str:
    """The affinity key that leads to this replica and no other."""
    return REPLICA + replica


async def of_all(app: ASGIApp, scope: Scope) -> bytes | None:
    """The metrics of all replicas behind ``app``, as text; None where no replica has any."""
    names = sorted(known or ())
    answers = await asyncio.gather(*(_of_one(app, scope, name) for name in names))
    found = {name: answer.decode() for name, answer in zip(names, answers, strict=True) if answer is not None}
    return await asyncio.to_thread(merged, found) if found else None


async def _of_one(app: ASGIApp, scope: Scope, replica: str) -> bytes | None:
    scope = {**scope, "headers": list(scope["headers"])}
    headers = MutableHeaders(scope=scope)
    headers[AFFINITY_HEADER], headers["accept"], headers["accept-encoding"] = key_of(replica), "text/plain", "identity"
    messages: list[Message] = []
    asked = asyncio.Event()

    async def receive() -> Message:
        if asked.is_set():
            await asyncio.Event().wait()  # the client stays
        asked.set()
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        messages.append(message)

    try:
        async with asyncio.timeout(READ_S):
            await app(scope, receive, send)
    except Exception:
        return None  # lost meanwhile
    if not messages or messages[0]["status"] != 200:
        return None
    return b"".join(message.get("body", b"") for message in messages)


def merged(texts: Mapping[str, str]) -> bytes:
    """One text in Prometheus' format from those of replicas by name; each sample has its replica as a label."""
    families: dict[str, Metric] = {}
    for replica, text in texts.items():
        for family in text_string_to_metric_families(text):
            whole = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            whole.samples += [sample._replace(labels=sample.labels | {"replica": replica}) for sample in family.samples]
    return ENCODE(SimpleNamespace(collect=families.values))
