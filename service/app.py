"""The application: settings in, models loaded and patched for its lifetime, routes on top."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from importlib.metadata import version

import torch
from fastapi import FastAPI
from fastapi.concurrency import run_in_threadpool
from fastapi.middleware.cors import CORSMiddleware
from fastapi.routing import APIRoute
from starlette.middleware.gzip import DEFAULT_EXCLUDED_CONTENT_TYPES, GZipMiddleware

from service import tracing
from service.api import anthropic, errors, evaluations, health, metrics, openai, static
from service.api.encodings import export, figures, methods, policies
from service.api.files import RenderedFiles
from service.api.generation import generate
from service.api.http.access import AccessControl, ApiKeys
from service.api.http.heads import HeadAsGet
from service.api.http.key_file import InvalidKeyFile
from service.api.http.ports import PortUnusable
from service.api.http.scope import RequestScope, Traffic
from service.api.jobs import events, files, routes
from service.api.jobs.partial import WithoutPartial
from service.api.jobs.submission import Submissions
from service.api.models import router as models_router
from service.api.quotas import RATE_HEADERS, TokenRate
from service.api.reference import page
from service.api.reference.openapi import ABOUT, TAGS
from service.api.response_models.failures import failures
from service.jobs.database.calls import StoreCalls
from service.jobs.database.opening import StoreOutOfReach, StoreUnusable, default_url
from service.jobs.runner import CLOSE_S, JobRunner
from service.jobs.storage.products import ProductMemory
from service.jobs.storage.store import JobStore
from service.machine import cpus
from service.metrics import Metrics
from service.models.checkpoint.loading import ModelLoadError
from service.models.checkpoint.reasons import reason_of
from service.models.linear.known import kept_in
from service.models.policies import assign_policies
from service.models.registry import ModelRegistry
from service.policy.policy import InvalidPolicy, read_policies
from service.settings import Settings
from service.sharing.admission import Admission
from service.sharing.limits import Concurrency, Connections, LimitsUnusable, SharedConcurrency, SharedLimits, opened
from service.sharing.workers import Workers
from service.ui import routes as ui

REFUSALS = (
    InvalidKeyFile,
    InvalidPolicy,
    LimitsUnusable,
    ModelLoadError,
    PortUnusable,
    StoreUnusable,
    tracing.TracingUnavailable,
)
"""Errors of a start whose message is for people."""

COMPRESSED_ALREADY = (*DEFAULT_EXCLUDED_CONTENT_TYPES, files.PARQUET)
"""Pictures, tables and event streams go out as they are."""


def create_app(settings: Settings) -> FastAPI:
    """FastAPI application; its lifespan loads the models and stops the engines."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        _set_threads(settings)
        policies = read_policies(settings.policy)
        url = settings.database_url or default_url()
        async with AsyncExitStack() as stack:
            # Before models load for minutes, all that they do not need is reached.
            await stack.enter_async_context(opened(shared))
            calls = app.state.store_calls = StoreCalls(settings.database_pool_size)
            stack.callback(calls.close)
            store = app.state.jobs = await run_in_threadpool(JobStore, url, settings.database_pool_size)
            stack.push_async_callback(_closed, calls, store)
            models = app.state.models = await _loaded(settings, app.state.metrics, store)
            stack.push_async_callback(asyncio.to_thread, models.close)
            stack.callback(app.state.traffic.drained.set)
            app.state.metrics.watch(lambda: {served.name: served.engine.load() for served in models})
            assign_policies(policies, models)
            workers = app.state.workers = Workers(shared=settings.has_keys, busy=models.are_generating)
            stack.callback(workers.close)
            runner = app.state.job_runner = JobRunner(
                store, models, settings, workers, calls, errors.as_api_error, keys.tenants
            )
            app.state.metrics.jobs_out_of_reach.set_function(runner.out_of_reach)
            runner.start()
            stack.push_async_callback(runner.close)
            stack.enter_context(metrics.own_port(settings, app.state.metrics))
            stack.enter_context(tracing.exporting(app))
            yield

    app = FastAPI(
        title="Ropeway",
        version=version("ropeway"),
        summary="Inference with a positional encoding per request, and perplexity against context length.",
        lifespan=lifespan,
        redirect_slashes=False,  # a redirect would lead to whatever Host header was sent
        description=ABOUT,
        openapi_tags=TAGS,
        openapi_url=None,  # service.api.reference.page serves it, and the page
    )
    app.state.settings = settings
    app.state.files = RenderedFiles()
    app.state.without_partial = WithoutPartial()
    app.state.feed = events.feed_of(app)
    app.state.bodies = Admission(settings.max_bodies_bytes, settings.max_queue, shared=settings.has_keys, of="bodies")
    app.state.metrics, app.state.traffic = Metrics(settings.replica_name), Traffic()
    shared = None if settings.shared_url is None else SharedLimits(settings.shared_url)
    app.state.token_rate = TokenRate(settings.key_tokens_per_minute, shared)
    app.state.submissions = Submissions()
    keys = app.state.keys = ApiKeys(settings.api_keys, settings.api_keys_file)
    _add_layers(app, settings, keys, shared)
    errors.install(app)
    tracing.install(app, settings)
    # No router includes another: FastAPI would build the routes of both at start-up.
    listings = (methods.router, models_router, figures.router, export.router, policies.router)
    # Anthropic's routes come first: they leave requests for a path of OpenAI's to it unless they are of its clients.
    routers = (generate.router, *evaluations.ROUTERS, *routes.ROUTERS, *anthropic.ROUTERS, *openai.ROUTERS, *listings)
    app.state.paths = [route.path for router in routers for route in router.routes if isinstance(route, APIRoute)]
    for router in routers:
        app.include_router(router, responses=failures(), dependencies=page.KEYS)
    app.include_router(static.router)
    app.include_router(ui.router)
    app.include_router(health.router, responses=failures([503]))
    if settings.metrics_port is None:
        app.include_router(metrics.router, responses=failures([]))
    page.install(app, keys_asked_for=keys.asked_for)
    return app


def failure(error: Exception | None) -> str:
    """The reason of a failed start in one sentence; that of an unexpected one has its class and its place."""
    if error is None:
        return "the server stopped while starting"
    return str(error) if isinstance(error, REFUSALS) else f"the server cannot start: {reason_of(error)}"


def _set_threads(settings: Settings) -> None:
    usual = torch.get_num_threads()
    threads = cpus.threads(settings.threads, usual)
    if settings.threads is not None or threads != usual:
        torch.set_num_threads(threads)


async def _loaded(settings: Settings, metrics: Metrics, store: JobStore) -> ModelRegistry:
    """The models, loaded on a thread that ends.

    Each thread that has computed keeps its OpenMP threads. Once they are more than the cores, libgomp makes all of them
    sleep between operations. The generation thread is then the only one.
    """

    def load() -> ModelRegistry:
        with kept_in(ProductMemory(store.database, anew=settings.time_products)):
            return ModelRegistry(settings, metrics)

    with ThreadPoolExecutor(1, "loading") as loading:
        return await asyncio.get_running_loop().run_in_executor(loading, load)


async def _closed(calls: StoreCalls, store: JobStore) -> None:
    """Close the store, unless the database hangs."""
    with suppress(StoreOutOfReach):
        await calls.within(CLOSE_S, store.close)


def _add_layers(app: FastAPI, settings: Settings, keys: ApiKeys, shared: SharedLimits | None) -> None:
    """From the inside out: nobody can send a body without a key. Every answer has an id and is logged."""
    app.add_middleware(GZipMiddleware, minimum_size=1024, compresslevel=5, exclude_content_types=COMPRESSED_ALREADY)
    most = settings.key_concurrency
    concurrency = (
        Concurrency(most) if shared is None or most is None else SharedConcurrency(most, shared, settings.lease_s)
    )
    connections = Connections(settings.max_connections)
    app.add_middleware(
        AccessControl, keys=keys, concurrency=concurrency, connections=connections, open_docs=settings.open_docs
    )
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "HEAD", "POST", "PUT", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after", "x-should-retry", *RATE_HEADERS],
        )
    app.add_middleware(HeadAsGet)
    app.add_middleware(RequestScope, settings=settings, metrics=app.state.metrics, traffic=app.state.traffic)
