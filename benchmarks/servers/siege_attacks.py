"""Attacks of one client on others: each is a coroutine that goes on until it is cancelled.

``python -m benchmarks.servers.siege_attacks URL SECONDS NAME ...`` runs some of them, as another process: the victim's
clock must not run on an attacker's event loop. It prints what was answered, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

JSON = {"Content-Type": "application/json"}
BIG: dict[str, Any] = {
    "evaluation": "perplexity",
    "methods": [{"method": "linear", "factor": 1 + number / 16} for number in range(32)],
    "lengths": {"start": 32, "stop": 286, "step": 2},
}
"""32 methods at 128 lengths, by one pass each: megabytes of numbers."""


@dataclass
class Attacker:
    """A tenant and what its requests were answered."""

    url: str
    key: str
    statuses: Counter[int] = field(default_factory=Counter)

    def client(self, seconds: float = 60.0) -> httpx.AsyncClient:
        headers = {"Authorization": f"Bearer {self.key}"}
        limits = httpx.Limits(max_connections=None)
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=seconds, limits=limits)

    async def send(self, client: httpx.AsyncClient, method: str, path: str, **request: Any) -> None:
        """One request; a connection that is cut or a client's own impatience is no answer."""
        try:
            answer = await client.request(method, path, **request)
            self.statuses[answer.status_code] += 1
        except httpx.HTTPError as error:
            self.statuses[0] += 1
            if not isinstance(error, httpx.TimeoutException):
                await asyncio.sleep(0.05)

    async def post(self, client: httpx.AsyncClient, path: str, body: Any) -> None:
        content = body if isinstance(body, bytes) else await asyncio.to_thread(lambda: json.dumps(body).encode())
        await self.send(client, "POST", path, content=content, headers=JSON)

    async def at_once(self, calls: list[Awaitable[None]]) -> None:
        await asyncio.gather(*calls)
        await asyncio.sleep(0.05)


async def plans(attacker: Attacker) -> None:
    """Evaluations that take minutes to plan, from clients that leave after a second."""
    body = {"samples": 60, "depths": [n / 100 for n in range(101)], "lengths": [512], "timeout_s": 1}
    async with attacker.client(1.0) as client:
        while True:
            await attacker.at_once([attacker.post(client, "/passkey", body) for _ in range(40)])


async def windows(attacker: Attacker) -> None:
    """Millions of windows."""
    stride = {"protocol": "sliding", "stride": 1, "lengths": {"start": 257, "stop": 512, "step": 1}}
    methods = [{"method": "linear", "factor": 1 + n / 64} for n in range(64)]
    short = {"protocol": "disjoint", "lengths": list(range(2, 258)), "methods": methods}
    async with attacker.client() as client:
        while True:
            await attacker.at_once([attacker.post(client, "/perplexity", body) for body in (stride, short) * 4])


async def lists(attacker: Attacker) -> None:
    """Bodies in which every entry is wrong."""
    bodies: list[tuple[str, Any]] = [
        ("/generate", {"prompt": [1] + ["a"] * 300_000}),
        ("/detokenize", {"tokens": [-1] * 500_000}),
        ("/generate", {"prompt": "a"} | {f"k{n}": n for n in range(200_000)}),
        ("/generate", {"prompt": [1] * 1_000_000}),
        ("/perplexity", {"input": [-1] * 1_000_000}),
    ]
    contents = [(path, json.dumps(body).encode()) for path, body in bodies]
    async with attacker.client() as client:
        while True:
            await attacker.at_once([attacker.post(client, path, content) for path, content in contents])


async def sweeps(attacker: Attacker) -> None:
    """Sweeps of thousands of methods."""
    many = json.dumps({"methods": [{"method": "yarn", "factor": 2 + n / 1e4} for n in range(50_000)]}).encode()
    product = {
        "methods": [{"method": "yarn", "factor": 2 + n} for n in range(60)],
        "factors": [1 + n / 64 for n in range(64)],
    }
    async with attacker.client() as client:
        while True:
            await attacker.at_once([attacker.post(client, "/sweep", body) for body in (many, product) * 2])


async def tables(attacker: Attacker) -> None:
    """Encodings whose tables are expensive, and their pictures at the longest length."""
    async with attacker.client() as client:
        while True:
            bodies = [
                {"prompt": [5, 6, 7], "max_new_tokens": 4, "pe": {"method": "sandwich", "dim": dim}}
                for dim in range(482, 514, 2)
            ]
            pictures = [
                attacker.send(client, "GET", f"/methods/sandwich/frequencies.png?length=16777215&dim={dim}")
                for dim in range(64, 104)
            ]
            await attacker.at_once([*(attacker.post(client, "/generate", body) for body in bodies), *pictures])


async def echoes(attacker: Attacker) -> None:
    """Log-probabilities of one prompt, many times."""
    body = {"prompt": [5] * 1000, "max_tokens": 0, "echo": True, "logprobs": 20}
    async with attacker.client() as client:
        while True:
            calls = [attacker.post(client, "/v1/completions", body | {"n": n}) for n in (64, 8, 1, 1)]
            await attacker.at_once(calls)


async def texts(attacker: Attacker) -> None:
    """Long texts to tokenize."""
    noise = random.Random(0)
    text = "".join(noise.choice("abcdefghijklmnopqrstuvwxyz ") for _ in range(2_000_000))
    async with attacker.client() as client:
        while True:
            sizes = (2_000_000, 1_900_000, 1_000_000, 3_900_000)
            await attacker.at_once([attacker.post(client, "/tokenize", {"prompt": (text * 2)[:n]}) for n in sizes])


async def results(attacker: Attacker) -> None:
    """A large result in every form, and hundreds of followers of one job."""
    forms = ("results.json", "results.csv", "report.html", "plot.png")
    async with attacker.client(600) as client:
        big = (await finished(client, BIG))["id"]
        followers = asyncio.create_task(_followers(attacker, 200))
        try:
            while True:
                paths = [f"/jobs/{big}/{form}" for form in forms]
                await attacker.at_once([attacker.send(client, "GET", path) for path in paths * 3])
        finally:
            followers.cancel()


async def finished(client: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    """A job, when it is done."""
    job = (await client.post("/jobs", json=body)).raise_for_status().json()
    while job["state"] in ("queued", "running"):
        await asyncio.sleep(0.2)
        job = (await client.get(f"/jobs/{job['id']}")).json()
    if job["state"] != "done":
        raise RuntimeError(f"the job is {job['state']}")
    return dict(job)


async def _followers(attacker: Attacker, count: int) -> None:
    body = {"evaluation": "perplexity", "protocol": "disjoint", "lengths": [64], "reuse": False}
    async with attacker.client() as client:
        job = (await client.post("/jobs", json=body)).json()["id"]

        async def follow() -> None:
            with suppress(httpx.HTTPError):
                async with client.stream("GET", f"/jobs/{job}/events") as answer:
                    async for _ in answer.aiter_raw():
                        pass

        await asyncio.gather(*(follow() for _ in range(count)))


async def sockets(attacker: Attacker) -> None:
    """Idle connections, half a head, half a body, and answers that are never read."""
    host, port = attacker.url.removeprefix("http://").split(":")
    authorization = f"Authorization: Bearer {attacker.key}\r\n"
    body = json.dumps({"prompt": [5, 6, 7], "max_new_tokens": 2000, "stream": True})
    starts = [
        b"",
        b"POST /generate HTTP/1.1\r\nHost: x\r\n",
        f"POST /generate HTTP/1.1\r\nHost: x\r\n{authorization}Content-Length: 100000\r\n\r\n{{".encode(),
        f"POST /generate HTTP/1.1\r\nHost: x\r\n{authorization}Content-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n{body}".encode(),
    ]
    opened: list[socket.socket] = []
    try:
        while True:
            for number in range(100):
                connection = socket.socket()
                connection.setblocking(False)
                with suppress(OSError):
                    await asyncio.get_running_loop().sock_connect(connection, (host, int(port)))
                    connection.send(starts[number % len(starts)])
                opened.append(connection)
            while len(opened) > 900:
                opened.pop(0).close()
            await asyncio.sleep(0.5)
    finally:
        for connection in opened:
            connection.close()


async def prompts(attacker: Attacker) -> None:
    """64 long prompts in one request, and 126 encodings."""
    long = {"prompt": [[n + 2, *([5, 6, 7] * 500)] for n in range(64)], "max_new_tokens": 8}
    encodings = [{"method": "linear", "factor": 1 + n / 128} for n in range(63)]
    many = {"prompt": [[5, 6, 7]], "max_new_tokens": 64}
    async with attacker.client() as client:
        while True:
            calls = [attacker.post(client, "/generate", many | {"pe": encodings[n : n + 21]}) for n in (0, 21, 42)]
            await attacker.at_once([attacker.post(client, "/generate", long), *calls])


ATTACKS: tuple[Callable[[Attacker], Awaitable[None]], ...] = (
    plans,
    windows,
    lists,
    sweeps,
    tables,
    echoes,
    texts,
    results,
    sockets,
    prompts,
)


async def main(url: str, seconds: float, names: list[str]) -> Counter[int]:
    """Run the attacks ``names``, each as another tenant; how often each status was answered."""
    attackers = [Attacker(url, name) for name in names]
    by_name = {attack.__name__: attack for attack in ATTACKS}
    running = [asyncio.ensure_future(by_name[one.key](one)) for one in attackers]
    await asyncio.wait(running, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    for task in running:
        if task.done():
            task.result()  # an attack goes on until it is stopped
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    return sum((one.statuses for one in attackers), Counter[int]())


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(sys.argv[1], float(sys.argv[2]), sys.argv[3:]))))
