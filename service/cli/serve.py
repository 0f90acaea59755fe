"""``ropeway serve``: the server in the foreground."""

from __future__ import annotations

import signal
import sys
import traceback
from typing import Annotated

import typer

from service.cli.server import StartFailed, StartWatch, configure_logging, settings_with
from service.cli.terminal import fail
from service.settings import Settings


def serve(
    model: Annotated[str | None, typer.Option(help="Hugging Face id, local folder, or 'demo'.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on.")] = None,
    device: Annotated[str | None, typer.Option(help="torch device, or 'auto'.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16, or 'auto'.")] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Any other setting; repeatable.")
    ] = None,
) -> None:
    """Serve models over HTTP. Flags win over ROPEWAY_* variables, which win over .env."""
    flags = {"model": model, "host": host, "port": port, "device": device, "dtype": dtype}
    try:
        settings = settings_with(**{**_assignments(setting or []), **{k: v for k, v in flags.items() if v is not None}})
    except StartFailed as error:
        fail(str(error))
    for number in (signal.SIGINT, signal.SIGTERM):
        # uvicorn raises the signal again once it has shut down: a stop that was asked for is a success.
        signal.signal(number, lambda *_: sys.exit(0))
    _run(settings)


def _assignments(items: list[str]) -> dict[str, str]:
    values = {}
    for item in items:
        name, equals, value = item.partition("=")
        name = name.strip().lower().removeprefix("ropeway_")
        if not equals or name not in Settings.model_fields:
            raise typer.BadParameter(f"{item!r} is not NAME=VALUE with one of: {', '.join(Settings.model_fields)}")
        values[name] = value
    return values


def _run(settings: Settings) -> None:
    import uvicorn

    from patches import UnsupportedModel
    from service.app import create_app
    from service.models.loading import ModelLoadError

    configure_logging(settings.log_level)
    app = StartWatch(create_app(settings))
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        log_level=settings.log_level,
        lifespan="on",
        timeout_graceful_shutdown=max(1, round(settings.shutdown_grace_s)),
    )
    try:
        uvicorn.Server(config).run()
    except SystemExit:
        if app.error is None:  # stopped by a signal, or the port is taken, which uvicorn has said
            raise
        if not isinstance(app.error, ModelLoadError | UnsupportedModel):
            traceback.print_exception(app.error)
        fail(str(app.error))
