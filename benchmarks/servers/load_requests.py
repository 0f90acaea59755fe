"""Requests for the load benchmark and its test: a fixed pool, each asked alone first, and the answers compared.

Locust is not used, because it brings gevent, which patches the standard library. Locust also only counts failures,
whereas here every token of every answer is compared. These clients are the project's own, over asyncio, and openai's
route by httpx.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

import httpx
from httpx_sse import EventSource

from service.client import AsyncRopeway, PerplexityResult, Result, ResultEnd, TextDelta
from service.client.errors import in_stream, incomplete, refusal, translated

Route = Literal["generate", "completions", "perplexity"]

ENCODINGS: tuple[dict[str, Any], ...] = (
    {"method": "default"},
    {"method": "linear", "factor": 4.0},
    {"method": "dynamic"},
    {"method": "yarn", "factor": 8.0},
    {"method": "llama3", "factor": 8.0},
    {"method": "ntk", "factor": 4.0},
    {"method": "ntk_by_parts", "factor": 4.0},
    {"method": "self_extend", "group_size": 8, "neighbor_window": 32},
    {"method": "self_extend", "group_size": 4, "neighbor_window": 16, "base": {"method": "yarn", "factor": 4.0}},
    {"method": "rerope", "window": 32},
    {"method": "leaky_rerope", "window": 32},
    {"method": "dual_chunk"},
    {"method": "lm_infinite"},
    {"method": "streaming", "window": 48},
    {"method": "alibi"},
    {"method": "alibi", "use_variant": False},
    {"method": "none"},
)
"""Frequency schedules, position maps, windows, biases, and nothing; ``alibi`` is answered by a second model."""

NLL_TOLERANCE = 1e-5
"""Relative. The chunks are the same, the alignment of what they are computed from is not."""

CLOSE = 1e-3
"""Nats between the two most likely tokens below which rounding may decide: other batches round differently."""


@dataclass(frozen=True)
class Asked:
    """One request of the pool. ``body`` is that of its route, without ``stream``."""

    route: Route
    body: dict[str, Any]
    stream: bool

    def __str__(self) -> str:
        prompt = self.body["input" if self.route == "perplexity" else "prompt"]
        pe = self.body.get("pe", self.body.get("methods"))
        size = f"{len(prompt)} {'characters' if isinstance(prompt, str) else 'tokens'}"
        return f"{self.route}{' stream' if self.stream else ''}, {size}, {pe}"


@dataclass(frozen=True)
class Answer:
    """The answer to a request. ``tokens`` are ids, or names where the route has no ids; ``nll`` the sums of
    every method at every length. ``first_s`` and ``whole_s`` are seconds and do not count in a comparison."""

    tokens: tuple[int | str, ...] = ()
    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    nll: tuple[float, ...] = ()
    first_s: float | None = field(default=None, compare=False)
    whole_s: float = field(default=0.0, compare=False)

    def difference(self, other: Answer) -> str | None:
        """The first difference of ``other`` from this, the expected answer; None if they agree."""
        if len(self.nll) != len(other.nll) or not all(
            math.isclose(a, b, rel_tol=NLL_TOLERANCE) for a, b in zip(self.nll, other.nll, strict=True)
        ):
            return f"NLL {other.nll} in place of {self.nll}"
        if other.completion_tokens != len(other.tokens):
            return f"usage counts {other.completion_tokens} new tokens and there are {len(other.tokens)}"
        if replace(other, nll=self.nll) == self:
            return None
        same = next(
            (i for i, pair in enumerate(zip(self.tokens, other.tokens, strict=False)) if pair[0] != pair[1]), -1
        )
        where = f"token {same} is {other.tokens[same]!r} in place of {self.tokens[same]!r}" if same >= 0 else ""
        counts = f"{len(other.tokens)} tokens of {len(self.tokens)}, prompt {other.prompt_tokens}"
        return f"{where or 'text or counts differ'} ({counts}, {other.finish_reason}, {other.text[-40:]!r})"


class Client:
    """One client: its own connections, and nothing sent twice unless its caller does."""

    def __init__(self, url: str) -> None:
        options: dict[str, Any] = {"verify": False, "timeout": 600.0}  # no certificates to load: there is no TLS
        self._ropeway = AsyncRopeway(url, max_retries=0, **options)
        self._http = httpx.AsyncClient(base_url=url, **options)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._ropeway.aclose()
        await self._http.aclose()

    async def ask(self, asked: Asked, cache_salt: str | None = None) -> Answer:
        """The whole answer. A salt keeps it from reading prefixes that others have cached.

        Raises:
            RopewayError: for a refusal, a broken connection, and an error or an end in the middle of a stream.
        """
        salted = {} if cache_salt is None or asked.route == "perplexity" else {"cache_salt": cache_salt}
        body, began = {**asked.body, **salted}, time.perf_counter()
        if asked.route == "perplexity":
            answer = _of_perplexity(await self._perplexity(body, asked.stream))
        elif asked.route == "generate":
            answer = await (self._generate_stream(body) if asked.stream else self._generate(body))
        else:
            answer = await (self._completion_stream(body) if asked.stream else self._completion(body))
        first_s = None if answer.first_s is None else answer.first_s - began
        return replace(answer, first_s=first_s, whole_s=time.perf_counter() - began)

    async def plainly(self, asked: Asked) -> tuple[Answer, float]:
        """The same generation by the plainest route, and the nats by which its closest greedy choice won."""
        body = {("max_new_tokens" if key == "max_tokens" else key): value for key, value in asked.body.items()}
        kept = {key: body[key] for key in ("prompt", "pe", "max_new_tokens")}
        (result,) = (await self._ropeway.generate(**kept, logprobs=2)).results
        assert result.logprobs is not None
        return _of_result(result), min(token.top[0].logprob - token.top[1].logprob for token in result.logprobs)

    async def tokenize(self, text: str) -> list[int]:
        tokens: list[int] = (await self._post("/tokenize", {"prompt": text, "add_special_tokens": False}))["tokens"]
        return tokens

    async def load(self) -> dict[str, dict[str, int]]:
        """The load of every model, as the server reports it."""
        return (await self._ropeway.health()).models

    async def _perplexity(self, body: dict[str, Any], stream: bool) -> PerplexityResult:
        if not stream:
            return PerplexityResult.model_validate(await self._post("/perplexity", body))
        return await self._ropeway.perplexity(body.pop("input"), **body)

    async def _generate(self, body: dict[str, Any]) -> Answer:
        (result,) = (await self._ropeway.generate(**body)).results
        return _of_result(result)

    async def _generate_stream(self, body: dict[str, Any]) -> Answer:
        tokens: list[int] = []
        text, first_s, ends = "", None, []
        async with aclosing(self._ropeway.stream(**body)) as events:
            async for event in events:
                if isinstance(event, TextDelta):
                    first_s = first_s or time.perf_counter()
                    tokens += event.token_ids
                    text += event.text
                elif isinstance(event, ResultEnd):
                    ends.append(event)
        (end,) = ends
        usage = end.usage
        counts = (usage.prompt_tokens, usage.completion_tokens)
        return Answer(tuple(tokens), text, end.finish_reason, *counts, first_s=first_s)

    async def _completion(self, body: dict[str, Any]) -> Answer:
        answer = await self._post("/v1/completions", body)
        (choice,) = answer["choices"]
        tokens, usage = choice["logprobs"]["tokens"], answer["usage"]
        counts = (usage["prompt_tokens"], usage["completion_tokens"])
        return Answer(tuple(tokens), choice["text"], choice["finish_reason"], *counts)

    async def _completion_stream(self, body: dict[str, Any]) -> Answer:
        asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
        tokens: list[str] = []
        text, first_s, usages, reasons, done = "", None, [], [], False
        with translated(self._http.base_url):
            async with self._http.stream("POST", "/v1/completions", json=asked) as response:
                if not response.is_success:
                    await response.aread()
                    raise refusal(response)
                async for event in EventSource(response).aiter_sse():
                    done = done or event.data == "[DONE]"
                    chunk = {"choices": [], "usage": None} if done else event.json()
                    if "error" in chunk:
                        raise in_stream(chunk["error"], response)
                    usages += [chunk["usage"]] if chunk["usage"] else []
                    for choice in chunk["choices"]:
                        first_s = first_s or time.perf_counter()
                        text += choice["text"]
                        tokens += choice["logprobs"]["tokens"]
                        reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
        if not done:
            raise incomplete(response)
        (usage,), (reason,) = usages, reasons
        counts = (usage["prompt_tokens"], usage["completion_tokens"])
        return Answer(tuple(tokens), text, reason, *counts, first_s=first_s)

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        with translated(self._http.base_url):
            response = await self._http.post(path, json=body)
        if not response.is_success:
            raise refusal(response)
        return response.json()


def _of_result(result: Result) -> Answer:
    usage = result.usage
    counts = (usage.prompt_tokens, usage.completion_tokens)
    return Answer(tuple(result.token_ids), result.text, result.finish_reason, *counts)


def _of_perplexity(result: PerplexityResult) -> Answer:
    return Answer(nll=tuple(length.nll_sum for method in result.methods for length in method.lengths))


@dataclass(frozen=True)
class Drawing:
    """Draws requests from a text: ``token_ids`` and the same as ``text``; lengths are in tokens."""

    text: str
    token_ids: Sequence[int]
    shortest: int = 16
    longest: int = 2000
    most_new: int = 48
    scored: int = 1024

    def draw(self, number: int, noise: random.Random) -> Asked:
        """Request ``number``: every tenth is scored, the rest are split between the routes, half of all streams."""
        encoding, stream = ENCODINGS[number % len(ENCODINGS)], bool(number // 2 % 2)
        if number % 10 == 9:
            methods = [encoding, ENCODINGS[(number + 7) % len(ENCODINGS)]]
            size = noise.randint(self.scored // 4, self.scored)
            return Asked(
                "perplexity", self._body("input", size, noise, methods=methods, lengths=[size // 2, size]), stream
            )
        size = round(math.exp(noise.uniform(math.log(self.shortest), math.log(self.longest))))
        new = noise.randint(self.most_new // 4, self.most_new)
        if number % 2:
            return Asked("generate", self._body("prompt", size, noise, pe=encoding, max_new_tokens=new), stream)
        body = self._body("prompt", size, noise, pe=encoding, max_tokens=new, temperature=0, logprobs=0)
        return Asked("completions", body, stream)

    def _body(self, key: str, tokens: int, noise: random.Random, **fields: Any) -> dict[str, Any]:
        """Every fourth prompt is a text, of about as many tokens; what is scored has its exact length."""
        start = noise.randrange(len(self.token_ids) - tokens)
        if key == "prompt" and noise.random() < 0.25:
            per_token = len(self.text) / len(self.token_ids)
            first = int(start * per_token)
            return {key: self.text[first : first + int(tokens * per_token)], **fields}
        return {key: list(self.token_ids[start : start + tokens]), **fields}


@dataclass(frozen=True)
class Pool:
    """Requests with the answers they got alone. ``redrawn`` counts those that rounding might have decided, ``unequal``
    says of which the routes disagreed."""

    requests: list[tuple[Asked, Answer]]
    redrawn: int
    unequal: list[str]


async def ask_alone(
    client: Client, drawing: Drawing, size: int, on_answer: Callable[[int], object] = lambda _: None
) -> Pool:
    """A pool of ``size`` requests, asked one by one.

    Raises:
        RopewayError: when a request is refused: with nothing else running none may be.
    """
    noise = random.Random(0)
    pool: list[tuple[Asked, Answer]] = []
    redrawn, unequal = 0, []
    while len(pool) < size:
        asked = drawing.draw(len(pool), noise)
        answer = await client.ask(asked)
        if asked.route != "perplexity":
            plain, margin = await client.plainly(asked)
            if margin < CLOSE:
                redrawn += 1
                continue
            named = answer if asked.route == "generate" else replace(answer, tokens=plain.tokens)
            wrong = plain.difference(named)
            unequal += [f"alone: {asked}: {wrong}"] if wrong else []
        pool.append((asked, answer))
        on_answer(len(pool))
    return Pool(pool, redrawn, unequal)
