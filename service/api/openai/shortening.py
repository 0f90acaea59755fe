"""Conversations that lose their beginning until prompt and answer fit (OpenAI's ``truncation: auto``), or their end."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence

from fastapi import Request
from fastapi.concurrency import run_in_threadpool

from service.api.encodings.auto import with_ranges
from service.api.generation.prepared import kept
from service.api.generation.prompts import Prompt, prompts_of
from service.api.generation.room import Room
from service.api.openai.names import Named
from service.api.openai.schemas import ConversationBody, TurnsBody
from service.api.quotas import admit
from service.errors import ApiError
from service.inputs import is_longer
from service.models.registry import ServedModel
from service.models.text.dropped import LEADS
from service.settings import Settings


async def prompt_of(body: ConversationBody, request: Request, name: Named) -> tuple[str | list[int], str]:
    """The conversation of ``body`` as a prompt, and as the text that its model sees. One that loses its end is tokens,
    and has no beginning of an answer.

    Raises:
        ApiError, QueueFull: as ``text_of``.
    """
    text = await text_of(body, request, name)
    if body.keeps is None or body.keeps.side == "left":
        return text, text
    await admit(request, [], body.most_tokens[1] or 1)
    room, tokenizer = await _room(body, request, name), name.served.tokenizer
    prompt = await tokenized(body, request, name.served, text)
    first = kept(prompt, body.keeps, room, tokenizer).token_ids
    if len(first) == len(prompt.token_ids):
        return text, text
    return first, await run_in_threadpool(tokenizer.decode, first)


async def tokenized(body: TurnsBody, request: Request, served: ServedModel, text: str) -> Prompt:
    """``text`` of a conversation as tokens, without a second BOS where the chat template has one.

    Raises:
        ApiError: for a text that is too long.
    """
    special = body.special_tokens(served)
    (prompt,) = await prompts_of(request, [text], served, body.PARAM, add_special_tokens=special)
    return prompt


async def text_of(body: ConversationBody, request: Request, name: Named) -> str:
    """The conversation of ``body`` as one text. If it is to be shortened, it fits, or has only its last message.

    Raises:
        ApiError: for a template that refuses the messages, or a key without tokens; QueueFull from the workers.
    """
    settings: Settings = request.app.state.settings

    async def write(places: Sequence[int] | None = None) -> str:
        return await run_in_threadpool(body.written, name.served, places)

    async def count(text: str) -> float:
        if is_longer(text, settings.max_text_bytes):
            return math.inf
        return len((await tokenized(body, request, name.served, text)).token_ids)

    whole = await write()
    if not body.shortens:
        return whole
    await admit(request, [], body.most_tokens[1] or 1)
    room = await _room(body, request, name)
    if await count(whole) <= room.whole:
        return whole
    roles = [message["role"] for message in body.conversation()[0]]
    return await shortened(roles, write, count, room.short) or whole


async def _room(body: ConversationBody, request: Request, name: Named) -> Room:
    (method,) = await with_ranges([name.target.method], name.served, request)
    return Room.of(name.target.model, method, body.most_tokens[1], request.app.state.settings)


async def shortened(
    roles: Sequence[str],
    write: Callable[[Sequence[int]], Awaitable[str]],
    count: Callable[[str], Awaitable[float]],
    room: int,
) -> str | None:
    """The longest end of a conversation of ``roles`` that fits into the ``room``, or else the shortest, if it has one.

    It comes behind the first messages of the system. No result of a tool begins it, since its call is gone. A template
    may take no other beginning than a user's. Ends are tried from the shortest one on, so that few long ones are read.

    Raises:
        ApiError: for a template that takes none.
    """
    lead = next((at for at, role in enumerate(roles) if role not in LEADS), len(roles))
    starts = [at for at in range(lead + 1, len(roles)) if roles[at] != "tool"]
    if not starts:
        return None
    users = [at for at in starts if roles[at] == "user"]
    refusals: list[ApiError] = []

    async def behind(start: int) -> str | None:
        """The end that begins at ``start``, or at the next user. None if the template takes neither."""
        for begin in (start, *[at for at in users if at > start][:1]):
            try:
                return await write([*range(lead), *range(begin, len(roles))])
            except ApiError as refusal:
                refusals.append(refusal)
        return None

    async def fits(number: int) -> bool:
        """True also where no end can begin: a longer one may."""
        text = await behind(starts[number])
        return text is None or await count(text) <= room

    first = starts[await _first(len(starts), fits)]
    for start in (first, *reversed(users)):
        if (text := await behind(start)) is not None:
            return text
    raise refusals[-1]


async def _first(numbers: int, fits: Callable[[int], Awaitable[bool]]) -> int:
    """The first of so many numbers that fits, and so do all behind it; the last one if none does."""
    width = 1
    while width < numbers and await fits(numbers - width):
        width *= 2
    low, high = max(0, numbers - width), numbers - max(1, width // 2)
    while low < high:
        middle = (low + high) // 2
        if await fits(middle):
            high = middle
        else:
            low = middle + 1
    return high
