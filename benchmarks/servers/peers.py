"""Streams of tokens from Ropeway's server, llama.cpp's and ``transformers serve``, with the same weights and prompts.

All have the route ``/v1/completions``. Prompts are token ids, new for every run; ``transformers serve`` takes texts,
which its tokenizer reads as the same ids. CPU time is that of the server's processes.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import torch

from benchmarks.models import SHAPE_28M
from benchmarks.servers.peer_servers import STARTS, Peer, missing, write_model
from benchmarks.timing import Report, Timings, interleaved

STREAMS = 16
NEW_TOKENS = 64
PROMPT_TOKENS = 32
LIMIT_S = 90.0
"""A comparison ends after the first round that ends later than this."""


@dataclass
class Prompts:
    """Random prompts, never the same twice."""

    seed: int = 0

    def __call__(self, count: int) -> list[list[int]]:
        self.seed += 1
        generator = torch.Generator().manual_seed(self.seed)
        prompts: list[list[int]] = torch.randint(
            3, SHAPE_28M["vocab_size"], (count, PROMPT_TOKENS), generator=generator
        ).tolist()
        return prompts


@dataclass
class CpuTimes:
    """CPU milliseconds per token of each run, by peer."""

    ms: dict[str, list[float]] = field(default_factory=dict)

    def run(self, peer: Peer, prompts: Callable[[int], list[list[int]]], streams: int) -> None:
        """Answer ``streams`` prompts at once."""
        before = peer.cpu_s()
        asyncio.run(_together(peer, prompts(streams)))
        self.ms.setdefault(peer.name, []).append((peer.cpu_s() - before) * 1e3 / (streams * NEW_TOKENS))


async def _together(peer: Peer, prompts: Sequence[list[int]]) -> None:
    await asyncio.gather(*(_stream(peer, prompt) for prompt in prompts))


async def _stream(peer: Peer, prompt: list[int]) -> None:
    """Read one stream to its end.

    Raises:
        RuntimeError: when the answer has another number of tokens than asked for.
    """
    body = {
        "model": peer.model,
        "prompt": prompt if peer.takes_ids else " ".join(f"<{token}>" for token in prompt),
        "max_tokens": NEW_TOKENS,
        "temperature": 0.0,
        "stream": True,
    }
    if peer.takes_ids:
        body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
    content, address = json.dumps(body).encode(), urlsplit(peer.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Connection: close\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
    parts = []
    while part := await reader.read(1 << 16):  # the client only collects: it shares the cores with the server
        parts.append(part)
    writer.close()
    answer = b"".join(parts).decode()
    used = [json.loads(line[6:]).get("usage") for line in answer.splitlines() if line.startswith("data: {")]
    counts = {usage["completion_tokens"] for usage in used if usage}
    if counts != {NEW_TOKENS}:
        raise RuntimeError(f"{peer.name} generated {counts or 'no'} tokens, not {NEW_TOKENS}: {answer[:500]}")


def measure(report: Report, folder: Path, threads: int, rounds: int) -> None:
    """Add the rows of all peers with so many threads."""
    absent, prompts = missing(), Prompts(threads << 16)
    with ExitStack() as stack:
        peers = [
            stack.enter_context(start(folder, threads, STREAMS)) for name, start in STARTS.items() if name not in absent
        ]
        for streams in (STREAMS, 1):
            cpu = CpuTimes()
            runs = {peer.name: partial(cpu.run, peer, prompts, streams) for peer in peers}
            timings = interleaved(runs, rounds, limit_s=LIMIT_S)
            for peer in peers:
                _add(report, (threads, streams), peer.name, timings, cpu.ms[peer.name][1:])


def _add(report: Report, case: tuple[int, int], name: str, timings: Timings, cpu_ms: list[float]) -> None:
    threads, streams = case
    rate = streams * NEW_TOKENS / timings.median(name)
    ratio = "" if name == "Ropeway" else f"{timings.ratio(name, 'Ropeway'):.2f} ({timings.spread(name, 'Ropeway')})"
    spread = f"{min(cpu_ms):.2f} .. {max(cpu_ms):.2f}"
    report.add(threads, streams, name, f"{rate:.0f}", f"{statistics.median(cpu_ms):.2f} ({spread})", ratio)


def run(quick: bool = False) -> Report:
    """One thread and two, 16 streams and one."""
    report = Report(
        "peers",
        f"{NEW_TOKENS} tokens per stream behind prompts of {PROMPT_TOKENS}, a random float32 Llama of 28M parameters "
        "(goals against llama.cpp: 1.4 and 1.1 with 16 streams, 0.7 and 0.6 with one; against transformers serve: 1.6 "
        "and 1.3 with 16)",
        ("threads", "streams", "server", "tokens/s", "CPU ms per token", "tokens/s of Ropeway / this server"),
    )
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        for threads in (1, 2):
            measure(report, Path(folder), threads, 1 if quick else 7)
    report.notes.extend(f"{name}: {reason}" for name, reason in missing().items())
    report.notes.append("CPU time: median, least and most; llama.cpp caches keys in float16, its default")
    return report
