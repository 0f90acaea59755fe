"""A rank that follows: it loads the same models, and repeats what the leader does with them."""

from __future__ import annotations

import os
import pickle
import signal
from contextlib import ExitStack, nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from service.models.parallel.messages import Apply, Collect, Forward, Message, Names, unpacked

if TYPE_CHECKING:
    from service.settings import Settings


def follow(settings: Settings, rank: int, store: Path, pipe: Connection) -> None:
    """The process of one rank. It ends with the pipe, and so with the leader."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # a terminal sends Ctrl-C to all; the leader finishes requests first
    from service import logs

    logs.quiet_imports()
    from service.models.checkpoint.loading import ModelLoadError
    from service.models.parallel.group import joined
    from service.models.start import Started, started

    logs.write_in_background()
    logs.configure("error", settings.log_format)
    names = Names()
    with ExitStack() as stack:
        stack.enter_context(joined(settings, rank, store))
        try:
            for group in started(settings):
                for start in group:
                    checked: Started = stack.enter_context(start)
                    names.of_model(checked.patch)
        except ModelLoadError:
            logs.finish()
            os._exit(1)  # the leader has the same error
        _repeat(pipe, names)
    logs.finish()
    os._exit(0)


def _repeat(pipe: Connection, names: Names) -> None:
    while True:
        try:
            data = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        message: Message | None = None
        try:
            message = unpacked(data, names)
            value = _done(message)
        except Exception as error:  # the leader decides: it has failed at the same, or the group is lost
            pipe.send_bytes(pickle.dumps(RuntimeError(repr(error))))
            continue
        if isinstance(message, Collect):
            pipe.send_bytes(pickle.dumps(value))
        elif value is not None:
            names.objects[message.returns] = value


def _done(message: Message) -> Any:
    """The object that the message names, or None."""
    match message:
        case Forward(patch, args, kwargs, _, slots, inference):
            for slot, resolved in slots.items():
                patch.slots.put(slot, resolved)
            with torch.inference_mode() if inference else torch.no_grad(), _carrying(message):
                output = patch.model(*args, **kwargs)
            cache = getattr(output, "cache", None)
            return None if cache is kwargs.get("cache") else cache
        case Apply(function, args):
            return function(*args)
        case Collect(mass):
            return mass


def _carrying(message: Forward) -> Any:
    return message.patch.carrying(**message.carried) if message.carried else nullcontext()
