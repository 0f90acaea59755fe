"""What is sent: where to, with which key, and the bodies of requests."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

import httpx

from service.evaluation.perplexity.results import Protocol

Prompt = str | Sequence[int] | Sequence[str | Sequence[int]]
"""A text, token ids, or a list of either."""

Encoding = str | Mapping[str, Any]
"""``{"method": "yarn", "factor": 4}``, or the short form of the same, ``"yarn:4"``."""

DEFAULT_URL = "http://localhost:8000"
CONNECT_S = 10.0


class GenerateOptions(TypedDict, total=False):
    """Fields of ``POST /generate``; None is the same as leaving it out."""

    model: str | None
    max_new_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    seed: int | None
    stop: str | Sequence[str] | None
    min_tokens: int | None
    ignore_eos: bool | None
    logprobs: int | None
    timeout_s: float | None
    cache_salt: str | None


class PerplexityOptions(TypedDict, total=False):
    """Fields of ``POST /perplexity``; None is the same as leaving it out."""

    model: str | None
    lengths: Sequence[int] | Mapping[str, int] | None
    max_tokens: int | None
    protocol: Protocol | None
    stride: int | None
    tail: int | None
    bos: Literal["auto", "always", "never"] | None
    timeout_s: float | None


def idempotent() -> dict[str, str]:
    """A header by which a server knows a request that is sent again after a lost answer."""
    return {"Idempotency-Key": uuid.uuid4().hex}


def connection(base_url: str | None, api_key: str | None, timeout: float | httpx.Timeout | None) -> dict[str, Any]:
    """Arguments of an httpx client. Without a URL or a key the variables ROPEWAY_URL and ROPEWAY_API_KEY count."""
    url = base_url or os.environ.get("ROPEWAY_URL") or DEFAULT_URL
    key = api_key or os.environ.get("ROPEWAY_API_KEY")
    return {
        "base_url": url if "://" in url else f"http://{url}",
        "headers": {"Authorization": f"Bearer {key}"} if key else {},
        "timeout": timeout if isinstance(timeout, httpx.Timeout) else httpx.Timeout(timeout, connect=CONNECT_S),
    }


def generate_body(
    prompt: Prompt, pe: Encoding | Sequence[Encoding] | None, options: Mapping[str, Any]
) -> dict[str, Any]:
    """The body of ``POST /generate``."""
    return _given({"prompt": prompt, "pe": pe, **options})


def perplexity_body(
    documents: Prompt | None, methods: Encoding | Sequence[Encoding] | None, options: Mapping[str, Any]
) -> dict[str, Any]:
    """The body of ``POST /perplexity``."""
    return evaluation_body({"input": documents, "methods": methods, **options})


def evaluation_body(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The body of any evaluation."""
    return _given(fields)


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def file_path(job_id: str, file: str, include_text: bool) -> str:
    """Where a job's file is; of a report, the one that can be read without the server."""
    if not file.endswith(".html"):
        return f"/jobs/{job_id}/{file}"
    return f"/jobs/{job_id}/{file}?standalone=true&include_text={str(include_text).lower()}"
