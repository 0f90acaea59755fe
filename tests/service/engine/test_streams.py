"""Streams are handed out once each, and again when their engine is gone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from service.engine.adapter.cards import streams


class Owner:
    """An engine."""


def test_no_two_owners_share_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def stream(device: torch.device) -> Any:
        made.append(len(made) % streams.HANDED_OUT)
        return SimpleNamespace(cuda_stream=made[-1])

    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(streams, "_in_use", set())
    device = torch.device("cuda", 0)
    owners = [Owner() for _ in range(streams.HANDED_OUT)]
    first = [streams.own_stream(owner, device).cuda_stream for owner in owners]
    assert sorted(first) == list(range(streams.HANDED_OUT))
    assert streams.own_stream(owners[0], torch.device("cuda", 1)).cuda_stream == 0
    with pytest.raises(RuntimeError, match="all 32 streams of cuda:0 belong to engines"):
        streams.own_stream(Owner(), device)
    gone = first[5]
    del owners[5]
    assert streams.own_stream(owners[0], device).cuda_stream == gone
