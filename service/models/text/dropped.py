"""Messages that a chat template leaves out: it has no rule for their role."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

Messages = list[dict[str, Any]]

MARK = re.compile(r"text(\d+)end")

LEADS = ("system", "developer")
"""Roles of the messages that may precede a conversation."""


class Render(Protocol):
    """Writes messages as one text, in which the last one may be open."""

    def __call__(self, messages: Messages, *, is_open: bool = False) -> str: ...


class Rendered(NamedTuple):
    """A conversation as one text, and the place of the first message that is left out of it."""

    text: str
    dropped: int | None


def rendered(messages: Messages, render: Render, *, is_open: bool = False) -> Rendered:
    """The text of ``messages``. Several messages at the start are one if the template does not take them all.

    Raises:
        Exception: of any class, when the template refuses the messages.
    """
    leads = _leads(messages)
    try:
        found = _rendered(messages, render, is_open=is_open)
    except Exception:
        if leads < 2:
            raise
        found = Rendered("", 0)
    if leads < 2 or found.dropped is None or found.dropped >= leads:
        return found
    texts = [message["content"] for message in messages[:leads]]
    joined = [{**messages[0], "content": "\n\n".join(text for text in texts if text.strip())}, *messages[leads:]]
    text, place = _rendered(joined, render, is_open=is_open)
    return Rendered(text, place + leads - 1 if place else place)


def _leads(messages: Messages) -> int:
    """Messages before the conversation."""
    return next((place for place, message in enumerate(messages) if message["role"] not in LEADS), len(messages))


def _rendered(messages: Messages, render: Render, *, is_open: bool) -> Rendered:
    text = render(messages, is_open=is_open)
    return Rendered(text, _first_dropped(messages, text, render))


def _first_dropped(messages: Messages, text: str, render: Render) -> int | None:
    """The place of the first message that is in no rendering.

    Each content becomes a mark, so contents that a template trims or spells otherwise are found too. Beside calls a
    content may go: Llama 3.1 writes the calls alone. Of each role the first content that is missing decides.
    """
    places = [
        place for place, message in enumerate(messages) if message["content"].strip() and not message.get("tool_calls")
    ]
    if _are_in_order([messages[place]["content"].strip() for place in places], text):
        return None  # nearly always: a second rendering would take as long as the first
    marked = [dict(message) for message in messages]
    for place in places:
        marked[place]["content"] = _mark(place)
    written = _written(marked, render)
    if written is None:  # a template that checks contents has had the real ones
        return None
    missing: dict[str, int] = {}
    for place in places:
        if place not in written and messages[place]["content"].strip() not in text:
            missing.setdefault(messages[place]["role"], place)
    return next((place for place in missing.values() if not _is_written_earlier(messages, place, render)), None)


def _are_in_order(contents: Iterable[str], text: str) -> bool:
    """True if all ``contents`` follow each other in ``text``, which is read once."""
    end = 0
    for content in contents:
        begin = text.find(content, end)
        if begin < 0:
            return False
        end = begin + len(content)
    return True


def _is_written_earlier(messages: Messages, place: int, render: Render) -> bool:
    """True if the message is written while the user's answer to it is last, or while it is itself.

    Mistral's template writes the system's message in the last turn, and only if that is the user's. A lead that is last
    shows nothing: the next one may replace it. The mark lies within the content, since a template may ask for its first
    or last character. A template may also refuse what is cut off: no rendering says nothing.
    """
    content = messages[place]["content"].strip()
    own = {**messages[place], "content": f"{content[:-1]}{_mark(place)}{content[-1]}"}
    users = (later for later in range(place + 1, len(messages)) if messages[later]["role"] == "user")
    ends = {next(users, len(messages) - 1)} | ({place} if own["role"] not in LEADS else set())
    marked: Iterable[Messages] = ([*messages[:place], own, *messages[place + 1 : end + 1]] for end in sorted(ends))
    found = [written for each in marked if (written := _written(each, render)) is not None]
    return not found or any(place in written for written in found)


def _mark(place: int) -> str:
    return f"text{place}end"


def _written(marked: Messages, render: Render) -> set[int] | None:
    """Places of the marks in the text, in any case; None if the template refuses the messages."""
    try:
        return {int(place) for place in MARK.findall(render(marked).lower())}
    except Exception:
        return None
