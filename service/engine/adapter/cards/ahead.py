"""A step that a card computes before the host knows the tokens of the one before it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from service.engine.adapter.cards.decode_rows import DecodeRows
from service.engine.request import EngineRequest

MOST_ROWS = 8
"""Sequences of a step that is launched early. Each may end unforeseen, and the step is lost with it."""


class Drawn:
    """``tokens`` int64 [n] of a step on the device, and their way to the host."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self.tokens, self._host = tokens, tokens
        self._arrival: torch.cuda.Event | None = None
        self._numbers: list[int] | None = None
        if tokens.device.type == "cuda":
            self._host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            self._host.copy_(tokens, non_blocking=True)
            self._arrival = torch.cuda.current_stream(tokens.device).record_event()

    def read(self) -> list[int]:
        """The tokens, once the card has drawn them. Later work of the card is not waited for."""
        if self._numbers is None:
            if self._arrival is not None:
                self._arrival.synchronize()
            self._numbers = self._host.tolist()
        return self._numbers


@dataclass(frozen=True)
class Ahead:
    """A launched step: its ``numbers`` as in ``DecodeRows``, its ``requests``, and the tokens that it reads and draws.

    ``variant`` is that of the kernel.
    """

    numbers: np.ndarray
    requests: list[EngineRequest | None]
    read: Drawn
    drawn: Drawn
    variant: str

    def is_step_of(self, rows: DecodeRows) -> bool:
        """True if it computes the step of ``rows``, which is planned after the tokens before it have arrived."""
        same = len(self.requests) == len(rows.known) and all(
            ours is theirs for ours, theirs in zip(self.requests, rows.known, strict=True)
        )
        return same and np.array_equal(self.numbers, rows.numbers) and self.read.read() == rows.tokens
