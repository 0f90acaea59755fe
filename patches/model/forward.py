"""The state of one forward of a patched model. All seams of the forward share it, and it ends with the forward.

Every thread has its own forward, and its own fields that the next forwards carry.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from patches.attention.decode.plan import Row
from patches.attention.observation import Observer
from patches.batch.segments import Batch, padded_batch
from patches.model.recorded.recording import Recordings

Reopened: TypeAlias = Callable[[], AbstractContextManager[None]]


@dataclass
class Forward:
    """``position_ids`` [rows or 1, new tokens] carry slots; ``padding_mask`` is [rows, seen tokens] or None.

    ``packed`` describes a packed row; ``paged`` says where its keys end (``cu_seq_lens_k``) and contains its paged
    ``cache``, if it has one. ``observer`` sees every attention. ``recordings`` has the forward as a list, or gets it.
    Layers that cache alike share one of ``rows``. Under gradient checkpointing,
    ``reopened()`` has the inputs again when a layer runs again.
    """

    position_ids: torch.Tensor
    padding_mask: torch.Tensor | None
    packed: Batch | None = None
    paged: Mapping[str, Any] = field(default_factory=dict)
    observer: Observer | None = None
    recordings: Recordings | None = None
    rows: dict[Hashable, Row] = field(default_factory=dict)
    reopened: Reopened | None = None
    _padded: Batch | None = None

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``function(*args, **kwargs)`` for a seam: one call of the list that is being written, if there is one."""
        recorder = None if self.recordings is None else self.recordings.recorder
        return function(*args, **kwargs) if recorder is None else recorder.call(function, *args, **kwargs)

    def padded(self, rows: int, padding_mask: torch.Tensor | None) -> Batch:
        """The segments of a padded batch of ``rows``, made at the first attention and shared by the layers."""
        if self._padded is None:
            mask = self.padding_mask if padding_mask is None else padding_mask
            self._padded = padded_batch(rows, self.position_ids, None if mask is None or bool(mask.all()) else mask)
        return self._padded

    @property
    def next_position(self) -> int | None:
        """The position behind the new tokens. None before any attention, and where rows differ."""
        stops = {(s.q_stop, s.key_column) for s in self._padded.segments} if self._padded is not None else set()
        stop, pad = stops.pop() if len(stops) == 1 else (None, 0)
        return None if pad else stop


class Forwards(threading.local):
    """The forward of one model that runs on a thread, and the fields that the thread's next forwards carry."""

    running: Forward | None = None
    carried: Mapping[str, Any] = {}

    @property
    def current(self) -> Forward:
        """Raises:
        RuntimeError: when no forward runs on this thread.
        """
        forward = self.running
        if forward is None:
            raise RuntimeError(
                "no forward runs on this thread: call the patched model, not a part, nor another with its "
                "configuration object"
            )
        return forward

    @contextmanager
    def opened(
        self, position_ids: torch.Tensor, padding_mask: torch.Tensor | None, reopened: Reopened | None = None
    ) -> Iterator[Forward]:
        """Within it, a ``Forward`` of these inputs and the carried fields runs on this thread."""
        self.running = forward = Forward(position_ids, padding_mask, reopened=reopened, **self.carried)
        try:
            yield forward
        finally:
            self.running = None

    @contextmanager
    def carrying(self, **carried: Any) -> Iterator[None]:
        """Within it, each forward on this thread has these fields of ``Forward``.

        Raises:
            RuntimeError: within another one, or in a forward.
        """
        if self.carried or self.running is not None:
            raise RuntimeError("packed rows and observers do not nest, and begin outside of a forward")
        self.carried = carried
        try:
            yield
        finally:
            self.carried = {}

    @contextmanager
    def carrying_nothing(self) -> Iterator[None]:
        """Within it, forwards on this thread carry nothing; then they carry what they carried before."""
        carried, self.carried = self.carried, {}
        try:
            yield
        finally:
            self.carried = carried
