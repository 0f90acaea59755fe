"""Probes: is the process there, and would a request be served now."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse

from service.api.errors import answer
from service.api.response_models.models import Live, Ready
from service.errors import ApiError, rank_lost, shutting_down
from service.models.parallel import LOST

router = APIRouter(tags=["health"])


@router.get("/health/live")
async def live() -> Live:
    """The event loop answers."""
    return Live(status="ok")


@router.get("/health/ready", response_model=Ready)
async def ready(request: Request) -> JSONResponse | dict[str, Any]:
    """Every engine's generation thread runs and moves; 503 otherwise, and a dead or stalled one is replaced."""
    refusal = not_ready(request.app)
    if refusal is not None:
        return answer(refusal)
    engines = {served.name: served.engine for served in request.app.state.models}
    loads = {name: {**engine.load(), "restarts": engine.thread.restarts} for name, engine in engines.items()}
    jobs = "out_of_reach" if request.app.state.job_runner.out_of_reach() else "ok"
    return {"status": "ok", "jobs": jobs, "models": loads}


@router.get("/health", response_model=Live)
@router.get("/v1/health", response_model=Live)
async def health(request: Request) -> JSONResponse | Live:
    """The same without figures, where llama.cpp's server has it."""
    refusal = not_ready(request.app)
    return Live(status="ok") if refusal is None else answer(refusal)


def not_ready(app: FastAPI) -> ApiError | None:
    """The reason that ``app`` serves no request now, if any. Replaces dead and stalled generation threads."""
    if LOST.is_set():
        return rank_lost()
    if app.state.traffic.draining:
        return shutting_down()
    dead = [served for served in app.state.models if not served.engine.thread.is_alive]
    for served in dead:
        served.engine.thread.revive()
    return ApiError(503, f"not serving: {', '.join(s.name for s in dead)}", code="not_ready") if dead else None
