"""Requests: address, key, options and paths."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict
from urllib.parse import quote

import httpx

from service.addresses import api_key as checked_key
from service.client.errors import RopewayError
from service.evaluation.perplexity.results import Protocol

Prompt = str | Sequence[int] | Sequence[str | Sequence[int]]
"""A text, token ids, or a list of either."""

Encoding = str | Mapping[str, Any]
"""``{"method": "yarn", "factor": 4}``, its short form ``"yarn:4"``, or ``"auto"``."""

DEFAULT_URL = "http://localhost:8000"
CONNECT_S = 10.0


class GenerateOptions(TypedDict, total=False):
    """Fields of ``POST /generate``; None leaves a field out."""

    model: str | None
    max_new_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    include_stop_str_in_output: bool | None
    allowed_token_ids: Sequence[int] | None
    bad_words: Sequence[str] | None
    structured_outputs: Mapping[str, Any] | None
    min_tokens: int | None
    ignore_eos: bool | None
    logprobs: int | None
    timeout_s: float | None
    cache_salt: str | None


class PerplexityOptions(TypedDict, total=False):
    """Fields of ``POST /perplexity``; None leaves a field out."""

    model: str | None
    lengths: Sequence[int] | Mapping[str, int] | None
    names: Sequence[str] | None
    max_tokens: int | None
    short_documents: Literal["refuse", "skip"] | None
    protocol: Protocol | None
    stride: int | None
    tail: int | None
    windows: int | None
    bos: Literal["auto", "always", "never"] | None
    position_bin: int | None
    timeout_s: float | None


def idempotent() -> dict[str, str]:
    """A header that lets the server recognise a repeated request."""
    return {"Idempotency-Key": uuid.uuid4().hex}


def address_of(server: str | None) -> str:
    """``server``, else ROPEWAY_URL, else the default address."""
    return server or os.environ.get("ROPEWAY_URL") or DEFAULT_URL


def connection(base_url: str | None, api_key: str | None, timeout: float | httpx.Timeout | None) -> dict[str, Any]:
    """Arguments of an httpx client. ROPEWAY_URL and ROPEWAY_API_KEY are the defaults.

    Raises:
        RopewayError: for a key that no header can have. The message has none of it.
    """
    url = address_of(base_url)
    key = api_key or os.environ.get("ROPEWAY_API_KEY")
    try:
        headers = {"Authorization": f"Bearer {checked_key(key)}"} if key else {}
    except ValueError as error:
        message = f"api_key, by default ROPEWAY_API_KEY: {error}"
        raise RopewayError(message, code="invalid_request", param="api_key") from None
    return {
        "base_url": url if "://" in url else f"http://{url}",
        "headers": headers,
        "timeout": timeout if isinstance(timeout, httpx.Timeout) else httpx.Timeout(timeout, connect=CONNECT_S),
    }


def given(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


def job_path(job_id: str, *rest: str) -> str:
    """The path of a job, or of what is below it.

    Raises:
        RopewayError: for an id of dots alone, which leads elsewhere.
    """
    if not job_id.strip("."):
        raise RopewayError(f"job: {job_id!r} is no id of a job", param="job")
    return "/".join(("/jobs", quote(job_id, safe=""), *rest))


def comparison_path(jobs: Sequence[str], names: Sequence[str] | None, baseline: Encoding | None) -> str:
    """The path of the comparison of ``jobs``.

    Raises:
        RopewayError: for a name with a comma.
    """
    if any("," in name for name in names or ()):
        raise RopewayError("names: a name has a comma, which separates names", param="names")
    method = baseline if baseline is None or isinstance(baseline, str) else json.dumps(dict(baseline))
    query = httpx.QueryParams(given({"names": ",".join(names) if names else None, "baseline": method}))
    ids = ",".join(quote(job, safe="") for job in jobs)
    return f"/comparisons/{ids or ','}/results.json" + (f"?{query}" if query else "")


def file_path(job_id: str, file: str, include_text: bool, picture: str | None = None) -> str:
    """The path of a job's file; a report is the standalone one."""
    asked = {"standalone": file.endswith(".html"), "include_text": include_text}
    wanted = {name: "true" for name, value in asked.items() if value}
    query = httpx.QueryParams(wanted | given({"picture": picture}))
    return job_path(job_id, file) + (f"?{query}" if query else "")
