"""Conversations that lose their beginning until prompt and answer fit (OpenAI's ``truncation: auto``)."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence

from fastapi import Request
from fastapi.concurrency import run_in_threadpool

from service.api.encodings.auto import with_ranges
from service.api.generation.prompts import prompts_of
from service.api.generation.room import Room
from service.api.openai.names import Named
from service.api.openai.schemas import ConversationBody
from service.errors import ApiError
from service.inputs import is_longer
from service.models.text.dropped import LEADS
from service.settings import Settings


async def text_of(body: ConversationBody, request: Request, name: Named) -> str:
    """The conversation of ``body`` as one text. If it is to be shortened, it fits, or has only its last message.

    Raises:
        ApiError: for a template that refuses the messages; QueueFull from the workers.
    """
    settings: Settings = request.app.state.settings

    async def write(places: Sequence[int] | None = None) -> str:
        return await run_in_threadpool(body.written, name.served, places)

    async def count(text: str) -> float:
        if is_longer(text, settings.max_text_bytes):
            return math.inf
        special = body.special_tokens(name.served)
        (prompt,) = await prompts_of(request, [text], name.served, body.PARAM, add_special_tokens=special)
        return len(prompt.token_ids)

    whole = await write()
    if not body.shortens:
        return whole
    (method,) = await with_ranges([name.target.method], name.served, request)
    room = Room.of(name.target.model, method, body.most_tokens[1], settings)
    if await count(whole) <= room.whole:
        return whole
    roles = [message["role"] for message in body.conversation()[0]]
    return await shortened(roles, write, count, room.short) or whole


async def shortened(
    roles: Sequence[str],
    write: Callable[[Sequence[int]], Awaitable[str]],
    count: Callable[[str], Awaitable[float]],
    room: int,
) -> str | None:
    """The longest end of a conversation of ``roles`` that fits into the ``room``, or else the shortest, if it has one.

    It comes behind the first messages of the system. No result of a tool begins it, since its call is gone. A template
    may take no other beginning than a user's.

    Raises:
        ApiError: for a template that takes none.
    """
    lead = next((at for at, role in enumerate(roles) if role not in LEADS), len(roles))
    starts = [at for at in range(lead + 1, len(roles)) if roles[at] != "tool"]
    if not starts:
        return None

    async def behind(start: int) -> str:
        try:
            return await write([*range(lead), *range(start, len(roles))])
        except ApiError:
            users = [at for at in starts if at > start and roles[at] == "user"]
            if not users:
                raise
            return await write([*range(lead), *range(users[0], len(roles))])

    low, high = 0, len(starts) - 1
    while low < high:
        middle = (low + high) // 2
        if await count(await behind(starts[middle])) <= room:
            high = middle
        else:
            low = middle + 1
    return await behind(starts[low])
