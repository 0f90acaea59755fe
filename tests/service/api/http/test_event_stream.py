"""Server-sent events: those at hand go out in one message, a failure is the last of them."""

from __future__ import annotations

import asyncio

import pytest

from service.api.http import streaming
from service.api.http.streaming import Emit, _events
from service.errors import bad_request


async def test_events_at_hand_go_out_together() -> None:
    async def work(emit: Emit) -> None:
        emit({"n": 1})
        emit({"n": 2}, "progress")
        await asyncio.sleep(0.01)
        emit('{"n":3}')

    sent = [text async for text in _events(work)]
    assert sent == [
        'data: {"n": 1}\n\nevent: progress\ndata: {"n": 2}\n\n',
        'data: {"n":3}\n\n',
        "data: [DONE]\n\n",
    ]


async def test_a_failure_follows_the_events_before_it() -> None:
    async def work(emit: Emit) -> None:
        emit({"n": 1})
        raise bad_request("no", "prompt")

    first, done = [text async for text in _events(work)]
    assert first.startswith('data: {"n": 1}\n\ndata: {"error": ')
    assert first.count("data: ") == 2
    assert done == "data: [DONE]\n\n"


async def test_a_wait_sends_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "PING_S", 0.02)

    async def work(emit: Emit) -> None:
        await asyncio.sleep(0.05)
        emit({"n": 1})

    sent = [text async for text in _events(work)]
    assert sent[0] == ": ping\n\n"
    assert sent[-2:] == ['data: {"n": 1}\n\n', "data: [DONE]\n\n"]


@pytest.mark.parametrize("fails", [False, True])
async def test_progress_behind_the_end_keeps_no_stream_open(fails: bool) -> None:
    """The generation thread reports progress when it likes, also in the moment of a deadline."""

    async def work(emit: Emit) -> None:
        asyncio.get_running_loop().call_soon(emit, "late")  # runs before the reader of the stream does
        emit(1)
        if fails:
            raise bad_request("no", "prompt")

    async with asyncio.timeout(3):
        sent = "".join([text async for text in _events(work)])
    assert sent.startswith("data: 1\n\n")
    assert sent.endswith("data: [DONE]\n\n")
    assert ("error" in sent, "late" in sent) == (fails, False)
