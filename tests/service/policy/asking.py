"""Requests for ``auto``: prompts by reserved length, answers, and refusals."""

from __future__ import annotations

from typing import Any

import httpx

NEW = 8


def prompt(reserved: int, seed: int = 0) -> list[int]:
    return [(7 * n + seed) % 380 + 2 for n in range(reserved - NEW)]


def post(url: str, path: str = "/generate", headers: dict[str, str] | None = None, **body: Any) -> Any:
    answer = httpx.post(f"{url}{path}", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refusal(url: str, path: str = "/generate", status: int = 400, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{url}{path}", json=body, timeout=60)
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


def result(url: str, reserved: int, pe: Any, headers: dict[str, str] | None = None, **body: Any) -> dict[str, Any]:
    body = {"prompt": prompt(reserved), "pe": pe, "max_new_tokens": NEW, "ignore_eos": True} | body
    (found,) = post(url, headers=headers, **body)["results"]
    return dict(found)
