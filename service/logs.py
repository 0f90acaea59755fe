"""Structured logs on stderr: lines for people or one JSON object each, the request's id in every one of them.

Tracebacks never show local variables: they hold prompts.
"""

from __future__ import annotations

import io
import logging
import re
import sys
import threading
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Literal, TextIO, cast

import structlog
from structlog.typing import EventDict, ExcInfo, Processor, WrappedLogger

from service.log_writer import LogWriter

ESCAPE_CODE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def configure(level: str, form: Literal["console", "json"] = "console", *, libraries: bool = False) -> None:
    """The service's own log from ``level`` up; with ``libraries`` also what others write with `logging`."""
    severity = logging.getLevelNamesMapping()[level.upper()]
    common: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    last: list[Processor]
    if form == "json":
        last = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    else:
        last = [_for_people()]
    structlog.configure(
        processors=[*common, *last],
        wrapper_class=structlog.make_filtering_bound_logger(severity),
        logger_factory=lambda *_: structlog.WriteLogger(_stream()),
    )
    # Its warnings show token ids of prompts; an error ends its loop.
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    if libraries:
        _collect(severity, common, last)


def finish() -> None:
    """Before an end without Python's own: wait a moment for the last lines."""
    if _writer is not None:
        _writer.finish()


_writer: LogWriter | None = None


def write_in_background() -> None:
    """For servers: a thread writes the lines of this process, and of the children that it forks."""
    global _writer
    stream = sys.__stderr__
    if _writer is None and stream is not None and stream is sys.stderr:  # a replaced one has no descriptor
        _writer = LogWriter(stream.fileno())


def _stream() -> TextIO:
    """Looked up at every line: a replaced stream may be closed."""
    return cast(TextIO, _writer or sys.stderr)


def _for_people() -> structlog.dev.ConsoleRenderer:
    """Lines with colours on a terminal. Texts of clients, such as paths, reach it without control characters."""

    def traceback(out: TextIO, error: ExcInfo) -> None:
        plain = io.StringIO()
        structlog.dev.plain_traceback(plain, error)
        out.write(_printable(plain.getvalue()))

    made = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=traceback)
    for form in (column.formatter for column in made.columns):
        if isinstance(form, structlog.dev.KeyValueColumnFormatter):
            form.value_repr = partial(_shown, form.value_repr)
    return made


def _shown(form: Callable[[object], str], value: object) -> str:
    return _printable(form(value))


def _printable(text: str) -> str:
    """``text`` with escapes for characters that do not print, except for line breaks and tabs."""
    return "".join(each if each.isprintable() or each in "\n\t" else ascii(each)[1:-1] for each in text)


def quiet_imports() -> None:
    """Keep warnings of torchao out of the log, before transformers imports it. They are about kernels for other GPUs
    and about enums."""
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _collect(severity: int, common: list[Processor], last: list[Processor]) -> None:
    """Lines of other libraries, Python's warnings and uncaught exceptions get the same form."""
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[*common, structlog.stdlib.ExtraAdder(), _without_colours],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
    )
    handler = _Stderr()
    handler.setFormatter(formatter)
    logging.basicConfig(handlers=[handler], level=max(severity, logging.WARNING), force=True)
    logging.getLogger("uvicorn").setLevel(max(severity, logging.INFO))
    logging.captureWarnings(True)
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger) and any(map(_writes_to_a_terminal, logger.handlers)):
            logger.handlers = [own for own in logger.handlers if not _writes_to_a_terminal(own)]
            logger.propagate = True
    sys.excepthook = _uncaught
    threading.excepthook = lambda told: _uncaught(told.exc_type, told.exc_value, told.exc_traceback)


def _writes_to_a_terminal(handler: logging.Handler) -> bool:
    """True for a handler with which a library prints beside our lines."""
    if isinstance(handler, logging.StreamHandler):
        return not isinstance(handler, logging.FileHandler)
    return getattr(handler, "stream", None) in (sys.stdout, sys.stderr)  # torch 2.14 has a class for this


def _without_colours(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """uvicorn sends every message a second time, with escape codes; transformers' tables have them too."""
    event.pop("color_message", None)
    event["event"] = ESCAPE_CODE.sub("", str(event.get("event", "")))
    return event


def _uncaught(kind: type[BaseException], error: BaseException | None, _: TracebackType | None) -> None:
    if error is not None and not issubclass(kind, KeyboardInterrupt | SystemExit):
        structlog.get_logger().critical("uncaught", exc_info=error)


class _Stderr(logging.StreamHandler[TextIO]):
    """Writes to the stream of the service's own lines."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = _stream()
        super().emit(record)
