"""``generate`` of a patched model, as far as its options matter to the encoding of a call."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any, NoReturn

from patches.model.arguments import by_name, parameters_of
from patches.model.encodings import KEYWORD
from patches.model.replacement import NotCopied, replace

LONGEST_WAIT = 10.0
"""Seconds that leaving a patch waits for forwards on other threads, which then run on in the restored model."""

_JOIN = "join its thread inside of the block of patched"


class Calls(NotCopied):
    """The calls of ``generate`` of one patched model, on every thread.

    Leaving the patch ends them: the restored model would go on over a cache of the encoding.
    """

    def __init__(self) -> None:
        self._ended, self._running = threading.Condition(), 0
        self._leaving = self._left = self._stopped = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within it, a call runs on this thread.

        Raises:
            RuntimeError: after the patch was left, also before the call ended.
        """
        with self._ended:
            if self._leaving:  # the caller kept the method
                self._refuse()
            self._running += 1
        try:
            yield
            if self._left:
                self._refuse()
        finally:
            with self._ended:
                self._running -= 1
                self._ended.notify_all()

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """``scores``, as a processor of logits, which ``generate`` calls before it has the next token.

        Raises:
            RuntimeError: after the patch was left.
        """
        if self._leaving:
            self._stopped = True
            self._refuse()
        return scores

    def leave(self) -> None:
        """Stop the calls that run on other threads. A call that has its last token ends as ever."""
        with self._ended:
            self._leaving = True
            self._ended.wait_for(lambda: self._running == 0, LONGEST_WAIT)
            self._left = True
            self._stopped |= self._running > 0

    def refuse_stopped(self) -> None:
        """Raises:
        RuntimeError: when leaving the patch stopped a call.
        """
        if self._stopped:
            raise RuntimeError(f"generate still ran on another thread, and stops there now: {_JOIN}")

    def _refuse(self) -> NoReturn:
        raise RuntimeError(f"generate: the patch of the model was left before the call ended; {_JOIN}")


def replace_generate(model: Any, undo: ExitStack) -> Calls:
    """Replace ``generate`` of ``model`` until ``undo`` closes, which first stops its calls on other threads."""
    calls = Calls()
    if hasattr(model, "generate"):
        own = model.generate
        replace(model, "generate", wraps(own)(partial(generate, calls, model, own)), undo)
        replace(model, "init_continuous_batching", _refuse_continuous_batching, undo)
    undo.callback(calls.leave)
    return calls


def generate(calls: Calls, model: Any, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``own(*args, **kwargs)``, for the ``generate`` of ``model``. A draft model has its default encoding.

    Raises:
        ValueError: for an encoding beside guidance or token healing, whose own forwards get no arguments of the call.
        RuntimeError: when another thread leaves the patch before the call ends.
    """
    given = by_name(parameters_of(own, type(model), "generate"), args, kwargs)
    if given.get(KEYWORD) is not None:
        _refuse_other_forwards(given, model.generation_config)
        draft = given.get("assistant_model")
        if draft is not None and draft is not model:
            given["assistant_model"] = _without_encoding(draft)
    given["logits_processor"] = [*(given.get("logits_processor") or ()), calls]
    with calls.running():
        return own(**given)


def _refuse_continuous_batching(*_: Any, **__: Any) -> NoReturn:
    """For ``init_continuous_batching``, which all ways into transformers' continuous batching call.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        "continuous batching of a patched model is the server's: call generate with padded rows, or run ropeway serve"
    )


def _refuse_other_forwards(given: Mapping[str, Any], defaults: Any) -> None:
    if _guides(given, defaults):
        raise ValueError(
            "guidance_scale: transformers runs the second forward of guidance under the default encoding; leave "
            "guidance_scale or the encoding out"
        )
    if _option("token_healing", given, defaults):
        raise ValueError(
            "token_healing: transformers heals prompts under the default encoding; leave token_healing or the "
            "encoding out"
        )


def _without_encoding(draft: Any) -> Any:
    """``draft``, whose ``generate`` leaves out the encoding, which transformers hands on and which is of another model.

    The tokens are those of the model alone: it checks each that the draft proposes. The weights are shared.
    """
    view, own = copy.copy(draft), draft.generate

    def without(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop(KEYWORD, None)
        return own(*args, **kwargs)

    view.generate = without
    return view


def _guides(given: Mapping[str, Any], defaults: Any) -> bool:
    by_hand = any("ClassifierFreeGuidance" in type(one).__name__ for one in given.get("logits_processor") or ())
    return _option("guidance_scale", given, defaults) not in (None, 1) or by_hand


def _option(name: str, given: Mapping[str, Any], defaults: Any) -> Any:
    """An option as ``generate`` reads it: of the call, of its ``generation_config``, or else of the model."""
    if name in given:
        return given[name]
    configured = getattr(given.get("generation_config"), name, None)
    return getattr(defaults, name, None) if configured is None else configured
