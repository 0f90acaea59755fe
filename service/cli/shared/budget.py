"""``--minutes``: a budget of tokens from the measured speed of the model."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import typer

from service.cli.shared.terminal import stderr

if TYPE_CHECKING:
    from service.client import JobInfo, Ropeway

MINUTES: dict[str, Any] = {
    "type": "number",
    "description": "In place of budget: two windows are timed, and the budget is what takes about so long.",
}

SLOWER = 1.5
"""Time of an average candidate by that of the model's own encoding: banded ones take up to twice as long."""

OWN_NAME, WITHOUT_END = "default", "none"
"""The encodings to time: the model's own, or one without positions where that one ends before the length."""

LEAST = re.compile(r"must be at least (\d+) tokens")
"""The server's refusal of a budget in which nothing can be compared."""


def minutes_of(own: dict[str, Any]) -> float | None:
    """``minutes``, taken out of the fields of a body.

    Raises:
        typer.BadParameter: beside a budget, or for anything but a positive number.
    """
    minutes = own.pop("minutes", None)
    if minutes is None:
        return None
    if "budget" in own:
        raise typer.BadParameter("--minutes excludes --budget")
    if isinstance(minutes, bool) or not isinstance(minutes, int | float) or not minutes > 0:
        raise typer.BadParameter(f"--minutes must be a number above 0, not {minutes}")
    return float(minutes)


def submitted(name: str, body: dict[str, Any], minutes: float | None, client: Ropeway) -> JobInfo:
    """The job of an evaluation, with the budget that ``minutes`` allow, if any.

    Raises:
        RopewayError: the server's refusal. For too small a budget, it names the minutes that suffice.
    """
    from service.client import RopewayError

    if minutes is None:
        return client.submit(name, **body)
    per_minute = _tokens_per_minute(name, body, client)
    budget = max(1, int(minutes * per_minute))
    stderr.print(f"{minutes:g} minutes are about {budget:,} tokens", markup=False, soft_wrap=True)
    try:
        return client.submit(name, **body | {"budget": budget})
    except RopewayError as error:
        least = LEAST.search(error.message)
        if error.param != "budget" or least is None:
            raise
        enough = _rounded_up(int(least[1]) / per_minute)
        why = f"{minutes:g} is too little{error.message[least.end() :]}: it must be at least {enough:g}"
        raise RopewayError(f"--minutes: {why}") from error


def _tokens_per_minute(name: str, body: dict[str, Any], client: Ropeway) -> float:
    """From the time of two windows under the model's own encoding.

    The server refuses it if it ends before the length. Then the windows are read without positions.
    """
    from service.client import RopewayError

    two = body | {"windows": 2, "target": None}
    try:
        timed = client.evaluate(name, **two | {"methods": [OWN_NAME]})
    except RopewayError as error:
        if error.param != "methods.0":
            raise
        timed = client.evaluate(name, **two | {"methods": [WITHOUT_END]})
    assert timed.seconds is not None, "an answer without a job has its time"
    return float(60 * timed.numbers()["tokens_read"] / timed.seconds / SLOWER)


def _rounded_up(minutes: float) -> float:
    """``minutes`` in two digits, and never less."""
    step = 10.0 ** (math.floor(math.log10(minutes)) - 1)
    return math.ceil(minutes / step) * step
