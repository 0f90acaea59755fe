"""A server with settings of its own, and its application, for tests that reach behind the routes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

import service.app
from service.cli.server import local_server
from service.engine.engine import Engine
from service.models import loading
from service.settings import Settings

SMALL: dict[str, Any] = {
    "model": "demo",
    "cache_tokens": 2048,
    "score_tokens": 2048,
    "max_batch_tokens": 128,
    "max_new_tokens": 2000,
    "score_chunk": 64,
}


@contextmanager
def serving(checkpoints: Path, **settings: Any) -> Iterator[tuple[str, FastAPI]]:
    """(base URL, application) of a running server of the tiny models."""
    apps: list[FastAPI] = []
    create = service.app.create_app

    def kept(given: Settings) -> FastAPI:
        apps.append(create(given))
        return apps[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "DEMO", checkpoints)
        patch.setattr(service.app, "create_app", kept)
        with local_server(Settings(_env_file=None, **SMALL | settings)) as url:
            yield url, apps[0]


def engine_of(app: FastAPI) -> Engine:
    """The engine of the default model."""
    engine: Engine = app.state.models.default.engine
    return engine


def runner_of(app: FastAPI) -> Any:
    """What runs a step: tests make it fail."""
    return engine_of(app)._manager.batch_processor.model_runner  # type: ignore[union-attr]
