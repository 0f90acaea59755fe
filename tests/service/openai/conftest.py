"""A tiny model with a chat template behind a server, and the same weights in plain transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from service.cli.server import local_server
from service.settings import Settings
from tests.service.conftest import tiny_checkpoint, tiny_tokenizer
from tests.service.openai.parrot import SCRIPTS, parrot

TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if mood %}{{ mood }}: {% endif %}"
    "{% if reasoning_effort %}{{ reasoning_effort }}! {% endif %}{% endif %}"
)

ENDS = [5, 6, 7, 8]
"""A prompt after which the model of these tests most likely ends its text: its end-of-text tokens are chosen so."""

WIDE: dict[str, Any] = {"type": "object", "properties": {f"a{n}": {} for n in range(600)}}
"""A schema whose answer takes more work behind `{` than the library allows."""

TOO_WIDE = (
    "the answer cannot go on by it: the form has too many continuations at one place: "
    "have fewer optional keys or choices"
)


@cache
def plain(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def plain_logprobs(folder: Path, ids: list[int]) -> torch.Tensor:
    """Log-probabilities [n, vocabulary] of what follows each token, in one pass without a cache."""
    with torch.no_grad():
        logprobs: torch.Tensor = plain(folder)(torch.tensor([ids])).logits[0].log_softmax(-1)
    return logprobs


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint: a chat template, and a second end-of-text token."""
    folder = tiny_checkpoint(tmp_path_factory.mktemp("openai") / "tiny")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    ends = int(plain_logprobs(folder, ENDS)[-1].argmax())
    generation = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**generation, "eos_token_id": [1, ends]}))
    return folder


@pytest.fixture(scope="session")
def tokenizer(tiny: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny)


@pytest.fixture(scope="session")
def url(tiny: Path) -> Iterator[str]:
    """Base URL of a server."""
    settings = {
        "cache_tokens": 4096,
        "score_tokens": 8192,
        "max_batch_tokens": 128,
        "max_new_tokens": 1024,
        "score_chunk": 64,
    }
    with local_server(Settings(_env_file=None, model=str(tiny), **settings)) as base:
        yield base


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Base URL of a server whose model answers by scripts."""
    folder = parrot(tmp_path_factory.mktemp("parrot") / "parrot", SCRIPTS)
    settings: dict[str, Any] = {"cache_tokens": 8192, "max_batch_tokens": 512, "max_new_tokens": 2048}
    with local_server(Settings(_env_file=None, model=str(folder), **settings)) as url:
        yield url


@pytest.fixture
def parroting(base: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=base, timeout=60) as client:
        yield client


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client


def answer(http: httpx.Client, path: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    reply = http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def counts(usage: dict[str, Any]) -> dict[str, Any]:
    """Usage without the tokens that happened to be cached."""
    return {name: value for name, value in usage.items() if name != "prompt_tokens_details"}


def chunks(http: httpx.Client, path: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
    """Every event of a stream, which must end as OpenAI's do."""
    with http.stream("POST", path, json={**body, "stream": True}) as reply:
        assert reply.status_code == 200, reply.read()
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]
