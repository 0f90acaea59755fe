"""Many clients at once, each asking for one request of a pool after another and comparing every answer."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field

from benchmarks.servers.load_requests import Answer, Asked, Client, Pool
from service.client import RopewayError

SHOWN = 20
"""Failures and differences kept as text; all are counted."""


@dataclass
class Tally:
    """Outcomes of all requests. ``refused`` counts answers with 429, after which the same request was asked
    again; ``failures`` and ``unequal`` map what went wrong to how often."""

    asked: int = 0
    refused: int = 0
    answers: list[tuple[Asked, Answer]] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    unequal: Counter[str] = field(default_factory=Counter)

    @property
    def lost(self) -> int:
        """Requests that got neither an answer nor an error."""
        return self.asked - len(self.answers) - self.failures.total()

    def seconds(self, route: str) -> list[float]:
        return [answer.whole_s for asked, answer in self.answers if asked.route == route]

    def first_seconds(self) -> list[float]:
        """Seconds to the first token of every stream, refusals not counted."""
        return [answer.first_s for _, answer in self.answers if answer.first_s is not None]

    @property
    def new_tokens(self) -> int:
        return sum(answer.completion_tokens for _, answer in self.answers)

    def problems(self) -> list[str]:
        """The first of what went wrong, one line each."""
        found = [f"failed {n} x: {what}" for what, n in self.failures.most_common(SHOWN)]
        return found + [f"unequal {n} x: {what}" for what, n in self.unequal.most_common(SHOWN)]


async def load(url: str, pool: Pool, clients: int, seconds: float, tally: Tally, patience_s: float = 300) -> None:
    """Keep ``clients`` requests in flight for ``seconds``, then let every one of them be answered. Answers that
    take ``patience_s`` more are given up, and lost."""
    until = time.monotonic() + seconds
    tasks = [asyncio.create_task(_client(url, pool, until, tally, random.Random(seed))) for seed in range(clients)]
    _, hanging = await asyncio.wait(tasks, timeout=seconds + patience_s)
    for task in hanging:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, Exception):
            raise outcome


async def _client(url: str, pool: Pool, until: float, tally: Tally, noise: random.Random) -> None:
    async with Client(url) as client:
        while time.monotonic() < until:
            asked, expected = noise.choice(pool.requests)
            salt = uuid.UUID(int=noise.getrandbits(128)).hex if noise.random() < 0.5 else None
            tally.asked += 1
            try:
                answer = await _admitted(client, asked, salt, tally, noise)
            except RopewayError as error:
                tally.failures[f"{error.status} {error.code}: {error.message[:200]}"] += 1
                continue
            tally.answers.append((asked, answer))
            wrong = expected.difference(answer)
            if wrong:
                tally.unequal[f"{asked}: {wrong}"] += 1


async def _admitted(client: Client, asked: Asked, salt: str | None, tally: Tally, noise: random.Random) -> Answer:
    """The answer, asked for again after every 429 as late as the server says, and a little later at random."""
    while True:
        try:
            return await client.ask(asked, salt)
        except RopewayError as error:
            if error.status != 429 or error.retry_after is None:
                raise
            tally.refused += 1
            await asyncio.sleep(error.retry_after * noise.uniform(1, 1.5))
