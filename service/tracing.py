"""OpenTelemetry traces, where an endpoint is configured: one span per request, with the route and its status."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI

from service.settings import Settings


class TracingUnavailable(ImportError):
    """An endpoint is configured and the extra is not installed."""


def install(app: FastAPI, settings: Settings, exporter: Any = None) -> None:
    """Send spans to ``settings.otel_endpoint``, or to ``exporter``; nothing is imported without either.

    Raises:
        TracingUnavailable: when the extra `otel` is missing.
    """
    if settings.otel_endpoint is None and exporter is None:
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        message = f"otel_endpoint is set and the extra `otel` is missing: {error}"
        raise TracingUnavailable(message) from error
    provider = TracerProvider(resource=Resource.create({"service.name": "ropeway"}))
    if exporter is None:
        exporter = OTLPSpanExporter(f"{str(settings.otel_endpoint).rstrip('/')}/v1/traces")
    provider.add_span_processor(BatchSpanProcessor(exporter))
    FastAPIInstrumentor.instrument_app(
        app,
        tracer_provider=provider,
        excluded_urls="health,metrics",
        exclude_spans=["receive", "send"],  # a stream sends once for each token
    )
    app.state.tracer_provider = provider


def mark(request_id: str) -> None:
    """Give the span of the current request its id. Without tracing, nothing is imported."""
    if "opentelemetry.trace" in sys.modules:
        from opentelemetry import trace

        trace.get_current_span().set_attribute("ropeway.request_id", request_id)


@contextmanager
def exporting(app: FastAPI) -> Iterator[None]:
    """Sends what is left at the end."""
    try:
        yield
    finally:
        provider = getattr(app.state, "tracer_provider", None)
        if provider is not None:
            provider.shutdown()
