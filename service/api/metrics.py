"""``GET /metrics`` for Prometheus, here or on a separate port."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fastapi import APIRouter, Request
from fastapi.responses import Response
from prometheus_client import start_http_server
from prometheus_client.exposition import choose_encoder

from service.api.files import sends
from service.api.http.ports import PortUnusable
from service.metrics import Metrics
from service.settings import Settings

router = APIRouter(tags=["operations"])


@router.get("/metrics", **sends("text/plain"))
async def metrics(request: Request) -> Response:
    """Counters, gauges and histograms in Prometheus' text format, or OpenMetrics where asked for."""
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(request.app.state.metrics.registry), headers={"Content-Type": content_type})


@contextmanager
def own_port(settings: Settings, metrics: Metrics) -> Iterator[None]:
    """Serves /metrics on ``metrics_port`` meanwhile, if that is set.

    Raises:
        PortUnusable: when it cannot listen there.
    """
    if settings.metrics_port is None:
        yield
        return
    try:
        server, thread = start_http_server(settings.metrics_port, settings.host, metrics.registry)
    except OSError as error:
        raise PortUnusable("ROPEWAY_METRICS_PORT", settings.host, settings.metrics_port, error) from error
    metrics.port = server.server_port
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
