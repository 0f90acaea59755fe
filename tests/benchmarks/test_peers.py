"""The comparison with other servers sends one prompt to all of them, and counts the tokens that come back."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from benchmarks.servers import peer_servers, peers
from benchmarks.servers.peer_servers import Peer
from benchmarks.timing import Report, Timings


async def streamed(tokens: int, *, takes_ids: bool) -> dict[str, Any]:
    """The body that a server gets which reports so many ``tokens``."""
    bodies = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
        bodies.append(json.loads(await reader.readexactly(length)))
        usage = {"usage": {"completion_tokens": tokens}}
        writer.write(f"HTTP/1.1 200 OK\r\n\r\ndata: {json.dumps(usage)}\n\ndata: [DONE]\n\n".encode())
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        await peers._stream(Peer("peer", f"http://127.0.0.1:{port}", 0, "m", takes_ids), [5, 17])
    body: dict[str, Any] = bodies[0]
    return body


async def test_texts_stand_for_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16, "num_attention_heads": 1}
    monkeypatch.setattr(peer_servers, "SHAPE_28M", peer_servers.SHAPE_28M | small | {"num_key_value_heads": 1})
    pytest.importorskip("gguf", reason="llama.cpp is not installed: pip install -c constraints.txt '.[llama-cpp]'")
    peer_servers.write_model(tmp_path)
    ids = await streamed(peers.NEW_TOKENS, takes_ids=True)
    text = await streamed(peers.NEW_TOKENS, takes_ids=False)
    assert AutoTokenizer.from_pretrained(tmp_path)(text["prompt"])["input_ids"] == ids["prompt"] == [5, 17]
    assert (tmp_path / "model.gguf").stat().st_size > 0


async def test_a_short_answer_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"peer generated \{3\} tokens, not 64"):
        await streamed(3, takes_ids=True)


def test_a_ratio_is_ours_over_theirs() -> None:
    report = Report("peers", "", ("a",))
    timings = Timings({"Ropeway": [2.0, 2.0, 2.0], "llama.cpp": [3.0, 3.0, 3.0]})
    peers._add(report, (1, 16), "llama.cpp", timings, [1.0, 2.0, 4.0])
    assert report.rows[0][2:] == ("llama.cpp", "341", "2.00 (1.00 .. 4.00)", "1.50 (1.500 .. 1.500)")


def test_absent_peers_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert set(peer_servers.missing()) == {"llama.cpp", "transformers serve"}
