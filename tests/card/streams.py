"""Streams and events of a card that is none."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from tests.card.card import Card

CARD = torch.device("cuda:0")


class Stream:
    """Work of the card in its order."""

    device = CARD
    _numbers = itertools.count(1)

    def __init__(self, card: Card) -> None:
        self.cuda_stream, self._card = next(self._numbers), card

    def wait_stream(self, stream: Stream) -> None:
        self._card.end(stream)

    def wait_event(self, event: Event) -> None:
        self._card.end(event.stream, event.count)

    def synchronize(self, count: int | None = None) -> None:
        """Have the host wait, for the first ``count`` operations or all."""
        self._card.wait("synchronize")
        self._card.end(self, count)

    def record_event(self) -> Event:
        return Event(self, self._card.begun(self))


class Event(NamedTuple):
    """A place in the work of a stream, behind ``count`` operations."""

    stream: Stream
    count: int

    def synchronize(self) -> None:
        self.stream.synchronize(self.count)
