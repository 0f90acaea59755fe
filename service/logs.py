"""Structured logs on stderr: lines for people or one JSON object each, the request's id in every one of them.

Tracebacks never show local variables: they hold prompts.
"""

from __future__ import annotations

import logging
import sys
from typing import Literal, TextIO

import structlog
from structlog.typing import Processor


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
        plain = structlog.dev.plain_traceback
        last = [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain)]
    structlog.configure(
        processors=[*common, *last],
        wrapper_class=structlog.make_filtering_bound_logger(severity),
        # Looked up at every line: whoever replaces the stream must not leave a closed one behind.
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
    )
    if libraries:
        formatter = structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*common, structlog.stdlib.ExtraAdder()],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
        handler = _Stderr()
        handler.setFormatter(formatter)
        logging.basicConfig(handlers=[handler], level=max(severity, logging.INFO), force=True)
        for name in ("transformers", "ContinuousBatchingLogger"):  # which bring handlers of their own
            logger = logging.getLogger(name)
            logger.handlers.clear()
            logger.propagate = True
        # Its warnings show token ids of prompts; what ends its loop is an error.
        logger.setLevel(logging.ERROR)


class _Stderr(logging.StreamHandler[TextIO]):
    """Writes to what is stderr at the moment, like the service's own lines."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)
