"""Engines on a card that is none, which record decode steps."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import PreTrainedModel
from transformers.generation.continuous_batching import input_outputs
from typing_extensions import override

from patches import Patched, patched
from patches.attention.layer import Layer
from patches.attention.paged import triton
from patches.attention.paged.triton import launch
from patches.attention.paged.triton.launch import Plan
from tests import card as cards
from tests.card import Card, CardTensor, WrongDevice, card, download, of_host, upload
from tests.patches.attention.paged import by_tables
from tests.recording import ATTENTION, Recorder
from tests.service.engine.cards.graphs import recorded


class _Kernel:
    """In place of a Triton kernel: all its tensors must be on the card."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        def launched(*arguments: object, **constants: object) -> None:
            if any(isinstance(each, torch.Tensor) and not isinstance(each, CardTensor) for each in arguments):
                raise WrongDevice("a kernel has a tensor of the host")

        return launched


class CardRecorder(Recorder):
    """Replays graphs as a card does: as one launch, on its own numbers."""

    @override
    def launch(self, replay: Callable[[], None]) -> None:
        cards.launch(replay)

    @override
    def operation(self, func: Any, args: Any, kwargs: Any, result: Any) -> tuple[Any, Any, Any, Any]:
        return *of_host(func, args, kwargs), download(result)


def recorded_on_card(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """As ``recorded``, but kernels are launched with all their arguments. Their numbers are those of plain torch."""
    attend, recorder = launch.attend, recorded(monkeypatch, CardRecorder())
    kernel = SimpleNamespace(**{name: _Kernel() for name in ATTENTION}, INTERPRETED=False)
    monkeypatch.setitem(sys.modules, "patches.attention.paged.triton.kernel", kernel)
    monkeypatch.setattr(triton, "kernel", kernel, raising=False)  # there once it was imported

    def attended(
        query: torch.Tensor, key_pages: torch.Tensor, value_pages: torch.Tensor, plan: Plan, layer: Layer
    ) -> torch.Tensor:
        if not isinstance(query, CardTensor):
            return by_tables.attend(query, key_pages, value_pages, plan, layer)
        out = attend(query, key_pages, value_pages, plan, layer)
        given = download([query, key_pages, value_pages, plan, layer])
        recorder.call(partial(cards.launch, lambda: download(out).copy_(by_tables.attend(*given))))
        return out

    monkeypatch.setattr("patches.attention.paged.triton.launch.attend", attended)
    return recorder


@contextmanager
def on_card(model: PreTrainedModel, kind: Callable[[], Card] = Card) -> Iterator[tuple[Card, Patched]]:
    """``model`` patched on a card."""
    devices = mock.patch.object(input_outputs, "get_available_devices", return_value=("cpu", "cuda"))
    with torch.inference_mode(), devices, card(kind) as made:
        upload(model)
        with patched(model) as patch:
            yield made, patch
