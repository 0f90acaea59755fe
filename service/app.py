"""The application: settings in, models loaded and patched for its lifetime, routes on top."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version

import torch
from fastapi import FastAPI
from fastapi.concurrency import run_in_threadpool

from service import errors
from service.api import generate, health, methods, perplexity
from service.api.limits import BodyLimit
from service.models.registry import ModelRegistry
from service.settings import Settings


def create_app(settings: Settings) -> FastAPI:
    """FastAPI application; its lifespan loads the models and stops the engines."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        app.state.models = ModelRegistry(settings)
        try:
            yield
        finally:
            await run_in_threadpool(app.state.models.close)

    app = FastAPI(
        title="Ropeway",
        version=version("ropeway"),
        summary="Inference with a positional encoding per request, and perplexity against context length.",
        lifespan=lifespan,
    )
    app.state.settings = settings
    app.state.results = perplexity.RecentResults()
    app.add_middleware(BodyLimit, most_bytes=settings.max_body_bytes)
    errors.install(app)
    for group in (generate, perplexity, methods, health):
        app.include_router(group.router)
    return app
