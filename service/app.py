"""The application: settings in, models loaded and patched for its lifetime, routes on top."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from importlib.metadata import version

import torch
from fastapi import FastAPI
from fastapi.concurrency import run_in_threadpool
from fastapi.middleware.cors import CORSMiddleware

from service import errors, tracing
from service.api import evaluations, generate, health, jobs, methods, metrics, openai
from service.api.access import AccessControl, ApiKeys
from service.api.admission import TokenRate
from service.api.answers import failures
from service.api.files import RenderedFiles
from service.api.scope import RequestScope, Traffic
from service.jobs.calls import StoreCalls
from service.jobs.database import StoreOutOfReach, default_url
from service.jobs.runner import CLOSE_S, JobRunner
from service.jobs.store import JobStore
from service.metrics import Metrics
from service.models.registry import ModelRegistry
from service.settings import Settings
from service.sharing.admission import Admission
from service.sharing.workers import Workers


def create_app(settings: Settings) -> FastAPI:
    """FastAPI application; its lifespan loads the models and stops the engines."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        models = app.state.models = ModelRegistry(settings, app.state.metrics)
        app.state.metrics.watch(models)
        try:
            async with AsyncExitStack() as stack:
                workers = app.state.workers = Workers(shared=settings.has_keys, busy=models.are_generating)
                stack.callback(workers.close)
                calls = app.state.store_calls = StoreCalls()
                stack.callback(calls.close)
                url = settings.database_url or default_url()
                store = app.state.jobs = await run_in_threadpool(JobStore, url)
                stack.push_async_callback(_closed, calls, store)
                runner = app.state.job_runner = JobRunner(store, models, settings, workers, calls)
                runner.start()
                stack.push_async_callback(runner.close)
                stack.enter_context(metrics.own_port(settings, app.state.metrics))
                stack.enter_context(tracing.exporting(app))
                yield
        finally:
            app.state.traffic.drained.set()
            await asyncio.to_thread(models.close)

    app = FastAPI(
        title="Ropeway",
        version=version("ropeway"),
        summary="Inference with a positional encoding per request, and perplexity against context length.",
        lifespan=lifespan,
        redirect_slashes=False,  # a redirect would lead to whatever Host header was sent
    )
    app.state.settings = settings
    app.state.files = RenderedFiles()
    app.state.feed = jobs.feed_of(app)
    app.state.bodies = Admission(settings.max_bodies_bytes, settings.max_queue, shared=settings.has_keys, of="bodies")
    app.state.metrics, app.state.traffic = Metrics(), Traffic()
    app.state.token_rate = TokenRate(settings.key_tokens_per_minute)
    _add_layers(app, settings)
    errors.install(app)
    tracing.install(app, settings)
    for group in (generate, evaluations, jobs, openai, methods):
        app.include_router(group.router, responses=failures())
    app.include_router(health.router, responses=failures([503]))
    if settings.metrics_port is None:
        app.include_router(metrics.router, responses=failures([]))
    return app


async def _closed(calls: StoreCalls, store: JobStore) -> None:
    """Close the store, unless the database hangs."""
    with suppress(StoreOutOfReach):
        await calls.within(CLOSE_S, store.close)


def _add_layers(app: FastAPI, settings: Settings) -> None:
    """From the inside out: who has no key does not get to send a body, and every answer has an id and is logged."""
    keys = ApiKeys(settings.api_keys, settings.api_keys_file)
    app.add_middleware(AccessControl, keys=keys, most_at_a_time=settings.key_concurrency)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    app.add_middleware(RequestScope, settings=settings, metrics=app.state.metrics, traffic=app.state.traffic)
