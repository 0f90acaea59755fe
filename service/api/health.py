"""Probes: is the process there, and would a request be served now."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from service.errors import ApiError, response_of

router = APIRouter(prefix="/health", tags=["health"])


class Live(BaseModel):
    status: str


class Ready(BaseModel):
    """Per model: requests running and waiting, scoring jobs, cache in use, engine restarts."""

    status: str
    models: dict[str, dict[str, int]]


@router.get("/live")
async def live() -> Live:
    """The event loop answers."""
    return Live(status="ok")


@router.get("/ready", response_model=Ready)
async def ready(request: Request) -> JSONResponse | dict[str, Any]:
    """Every engine's generation thread runs; 503 otherwise, and a dead one is started anew."""
    registry = request.app.state.models
    dead = [served for served in registry if not served.engine.is_alive]
    for served in dead:
        served.engine.revive()
    if dead:
        names = ", ".join(served.name for served in dead)
        return response_of(ApiError(503, f"not serving: {names}", code="not_ready"))
    return {
        "status": "ok",
        "models": {s.name: {**s.engine.load(), "restarts": s.engine.restarts} for s in registry},
    }
