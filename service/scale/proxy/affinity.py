"""A key for requests whose prompts start alike, from the first bytes of a body.

The key chooses the replica that has the prefix in its cache. A wrong key costs a prefill and never changes an answer.
So bodies are not parsed as a whole and not validated.
"""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import Any

from pydantic_core import from_json

READ_BYTES = 64 << 10
"""Bytes of a body that are read for the key."""

PREFIX_CHARS, PREFIX_TOKENS = 256, 64
"""Start of a prompt in the key: about two pages of the cache."""


def affinity_key(head: bytes, tenant: str) -> str | None:
    """Hash of (tenant, salt, model, encoding, prompt start) of a body that starts with ``head``; None without any."""
    try:
        body = from_json(head, allow_partial="trailing-strings")
    except ValueError:
        return None
    start = _start(body) if isinstance(body, dict) else None
    if start is None:
        return None
    parts = [tenant, body.get("cache_salt"), body.get("model"), body.get("pe"), start]
    text = json.dumps(parts, sort_keys=True)
    return blake2b(text.encode(), digest_size=12).hexdigest()


def _start(body: dict[str, Any]) -> Any:
    if isinstance(messages := body.get("messages"), list) and messages:
        leads = [system] if (system := body.get("system")) else []  # of Anthropic's API
        return json.dumps([*leads, *messages[:2]], sort_keys=True)[:PREFIX_CHARS]
    if given := body.get("input"):
        first = given[:2] if isinstance(given, list) else given
        return json.dumps([body.get("instructions"), first], sort_keys=True)[:PREFIX_CHARS]
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]  # of several prompts, the first
    if isinstance(prompt, str) and prompt:
        return prompt[:PREFIX_CHARS]
    return prompt[:PREFIX_TOKENS] if isinstance(prompt, list) and prompt else None
