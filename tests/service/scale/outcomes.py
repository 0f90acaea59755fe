"""Requests to replicas, and what became of them."""

from __future__ import annotations

import re
from typing import Any

import httpx


def endless(number: int) -> dict[str, Any]:
    """More than ten seconds of work for the tiny model. Its cache has room for two of the prompts."""
    prompts = [[5, 6, number, each] for each in range(8)]
    return {"prompt": prompts, "max_new_tokens": 3500, "ignore_eos": True}


ENDLESS = endless(7)

SETTINGS = (
    "cache_tokens=8192",
    "max_batch_tokens=128",
    "max_new_tokens=4000",
    "max_prompt_bytes=10000",
    "log_prompts=true",
)


def outcome(url: str, request_id: str, body: dict[str, Any]) -> str:
    """Code of the error that a request got, in its answer or its stream; 'complete' without one."""
    headers = {"x-request-id": request_id}
    with httpx.stream("POST", f"{url}/generate", json=body, headers=headers, timeout=120) as answer:
        text = answer.read().decode()
    if answer.status_code == 200 and '"error"' not in text:
        return "complete"
    if answer.status_code != 200:
        assert answer.status_code == 503, text
        assert answer.headers["retry-after"]
        return str(answer.json()["error"]["code"])
    assert text.endswith("data: [DONE]\n\n"), text[-300:]
    return str(re.findall(r'"code": ?"(\w+)"', text)[-1])
