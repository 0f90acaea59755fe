"""``--minutes``: a budget of tokens from the measured speed of the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from service.cli.shared.terminal import stderr

if TYPE_CHECKING:
    from service.client import Ropeway

MINUTES: dict[str, Any] = {
    "type": "number",
    "description": "In place of budget: two windows are timed, and the budget is what takes about so long.",
}

SLOWER = 1.5
"""Time of an average candidate by that of the model's own encoding: banded ones take up to twice as long."""


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


def tokens_within(minutes: float, name: str, body: dict[str, Any], client: Ropeway) -> int:
    """The tokens that ``minutes`` allow, from the time of two windows under the model's own encoding."""
    timed = client.evaluate(name, **body | {"methods": ["default"], "windows": 2, "target": None})
    assert timed.seconds is not None, "an answer without a job has its time"
    tokens = int(60 * minutes * timed.numbers()["tokens_read"] / timed.seconds / SLOWER)
    stderr.print(f"{minutes:g} minutes are about {tokens:,} tokens", markup=False, soft_wrap=True)
    return max(tokens, 1)
