"""``ropeway serve``: the server in the foreground."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.text import Text

from service.cli.shared.terminal import fail, new_table, print_table, stderr
from service.engine import SWITCH_S, THREAD_NAME

if TYPE_CHECKING:
    from service.settings import Settings


def _print_settings(asked: bool) -> None:
    if not asked:
        return
    from service.reports.schema import field_rows
    from service.settings import Settings

    table = new_table("setting", "value", "default", "meaning")
    for name, field in Settings.model_json_schema()["properties"].items():
        for row in field_rows(name, field, {}):
            table.add_row(*map(Text, row))
    print_table(table)
    raise typer.Exit


def serve(  # noqa: PLR0913 - one argument per option
    model: Annotated[
        str | None,
        typer.Option(help="Hugging Face id, local folder, folder of such folders, or 'demo'.", show_default="demo"),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.", show_default="127.0.0.1")] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.", show_default="8000")
    ] = None,
    device: Annotated[str | None, typer.Option(help="torch device, or 'auto'.", show_default="auto")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16, float16, or 'auto'.", show_default="auto")
    ] = None,
    policy: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Policy of --pe auto: a JSON file, or a folder of such files.")
    ] = None,
    quantization: Annotated[
        str | None,
        typer.Option(help="int8 or int4: quantize the linear layers at load.", show_default="full precision"),
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=PATH", help="LoRA adapter to serve under a name beside its base; repeatable."),
    ] = None,
    tensor_parallel: Annotated[
        int | None,
        typer.Option(min=1, help="Processes that compute each model together.", show_default="1"),
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option(min=1, help="Processes on Ray Serve, each with its models (extra scale).", show_default="1"),
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Any other setting; repeatable. --settings lists them."),
    ] = None,
    settings_: Annotated[
        bool,
        typer.Option("--settings", callback=_print_settings, is_eager=True, help="List every setting and exit."),
    ] = False,
) -> None:
    """Serve models over HTTP. Flags win over ROPEWAY_* variables, which win over .env."""
    from service.cli.server import StartFailed, settings_with
    from service.scale.options import is_scaled

    flags: dict[str, Any] = {
        "model": model,
        "quantization": quantization,
        "adapters": adapter,
        "host": host,
        "port": port,
        "device": device,
        "dtype": dtype,
        "policy": policy,
        "replicas": replicas,
        "tensor_parallel": tensor_parallel,
    }
    try:
        settings = settings_with(**{**assignments(setting or []), **{k: v for k, v in flags.items() if v is not None}})
    except StartFailed as error:
        fail(str(error))
    _at_signals(_end_at_once)
    if is_scaled(settings):
        _serve_replicas(settings)
        return
    _run(settings)


def _at_signals(end: Callable[[], None]) -> None:
    """Call ``end`` at every signal that asks for the end of the server. A requested stop is a success."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: end())


def _end_at_once() -> NoReturn:
    """Exit with 0, before uvicorn or Ray runs: there are no requests, models or other processes yet.

    ``SystemExit`` would be raised wherever the start is. Python drops it in a ``__del__``, and the server would serve
    for ever. pydantic makes another error of it.
    """
    from service import logs

    with suppress(RuntimeError):  # the signal may interrupt a line of the log
        sys.stderr.flush()
    logs.finish()
    os._exit(0)


def _end() -> None:
    """Exit with 0, or 1 after the loss of a rank. Python itself would wait for a thread that hangs in a step, or crash
    on it. It would wait for one that hangs in the database too."""
    from service import logs
    from service.jobs.database import calls
    from service.models.parallel import LOST

    code = 1 if LOST.is_set() else 0
    if any(thread.name.startswith((THREAD_NAME, calls.THREAD_NAME)) for thread in threading.enumerate()):
        logs.finish()
        os._exit(code)
    sys.exit(code)


def assignments(items: list[str]) -> dict[str, str]:
    """Settings by name from ``NAME=VALUE`` items.

    Raises:
        typer.BadParameter: for another form, or a name that is no setting.
    """
    from service.env_file import PREFIX
    from service.environment import misspelt
    from service.settings import Settings

    values = {}
    for item in items:
        name, equals, value = item.partition("=")
        name = name.strip().lower().removeprefix("ropeway_")
        if not equals or name not in Settings.model_fields:
            slips = misspelt([PREFIX + name.upper()]) if equals else []
            known = f"{item!r} is not NAME=VALUE with one of: {', '.join(Settings.model_fields)}"
            raise typer.BadParameter(slips[0] if slips else known, param_hint="--set")
        values[name] = value
    return values


def _serve_replicas(settings: Settings) -> None:
    from service import logs
    from service.api.http.ports import PortUnusable, require_free
    from service.scale.options import InvalidScale, check
    from service.scale.private_names import RayUnusable, prepare_private_cluster, require_ray

    try:
        check(settings)
        require_ray()
        require_free("ROPEWAY_PORT", settings.host, settings.port)
        prepare_private_cluster()
        from service.scale.local import ReplicasFailed, run
    except (InvalidScale, RayUnusable, PortUnusable) as error:
        _refuse(settings, error)
    logs.write_in_background()
    logs.configure(settings.log_level, settings.log_format, libraries=True)
    _warn(settings)
    try:
        run(settings)
    except (InvalidScale, ReplicasFailed) as error:
        _refuse(settings, error)


def _run(settings: Settings) -> None:
    from service.api.http.descriptors import TooFewDescriptors, allow_descriptors
    from service.api.http.ports import PortUnusable, require_free

    try:
        allow_descriptors(settings.max_connections)
        require_free("ROPEWAY_PORT", settings.host, settings.port)
        if settings.metrics_port is not None:
            require_free("ROPEWAY_METRICS_PORT", settings.host, settings.metrics_port)
    except (PortUnusable, TooFewDescriptors) as error:
        _refuse(settings, error)
    _serve(settings)


def _refuse(settings: Settings, error: Exception, why: str = "") -> NoReturn:
    """End with exit code 1 and one line in the log's format: ``why``, or the error itself. At log level debug there is
    a traceback too."""
    import structlog

    from service import logs

    is_debug, message = settings.log_level == "debug", why or str(error)
    if is_debug or settings.log_format == "json":
        logs.configure(settings.log_level, settings.log_format)
        structlog.get_logger().critical("start_failed", error=message, exc_info=error if is_debug else None)
    if settings.log_format == "json":
        raise typer.Exit(1)
    fail(message)


def _warn(settings: Settings) -> None:
    """Log variables without effect, and a key that protects nothing."""
    import structlog

    from service.environment import given, unknown

    log = structlog.get_logger()
    if names := unknown():
        log.warning("unknown_settings", names=names)
    if "ROPEWAY_API_KEY" in given() and not settings.has_keys:
        log.warning("no_api_keys", hint="ROPEWAY_API_KEY is the client's; the server's keys are in ROPEWAY_API_KEYS")


def _serve(settings: Settings) -> None:
    from service.cli.server import StartWatch, load_libraries
    from service.machine.heap import keep_one_heap

    keep_one_heap()
    if stderr.is_terminal and settings.log_format == "console":  # the log begins seconds later
        stderr.print("loading libraries")
    load_libraries()
    import uvicorn

    from service import logs
    from service.api.http.connections import connection_options
    from service.api.http.draining import DrainingServer
    from service.api.http.key_file import InvalidKeyFile
    from service.app import create_app, failure
    from service.sharing.limits import LimitsUnusable
    from service.tracing import TracingUnavailable

    try:
        app = create_app(settings)
    except (InvalidKeyFile, LimitsUnusable, TracingUnavailable, OSError) as error:
        _refuse(settings, error)
    logs.write_in_background()
    logs.configure(settings.log_level, settings.log_format, libraries=True)
    _warn(settings)
    watch = StartWatch(app)
    config = uvicorn.Config(
        watch,
        host=settings.host,
        port=settings.port,
        log_config=None,
        log_level=settings.log_level,
        access_log=False,  # the service logs every request itself, with its id
        lifespan="on",
        **connection_options(settings),
        timeout_graceful_shutdown=1,  # after the drain, only clients that do not read are left
    )
    sys.setswitchinterval(SWITCH_S)
    server = DrainingServer(config, app, settings.shutdown_grace_s)
    # uvicorn replaces these while it runs. After its shutdown, it raises again the signals that it got.
    _at_signals(lambda: _end() if server.should_exit else _end_at_once())
    try:
        server.run()
    except SystemExit:
        if watch.error is None:  # stopped by a signal, or the port is taken, and uvicorn has logged it
            raise
        _refuse(settings, watch.error, failure(watch.error))
