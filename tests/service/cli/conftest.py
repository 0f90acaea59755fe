"""The model that the commands serve, a document, and a server that answers without a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from service.cli.shared import client
from service.client import Ropeway
from tests.service.cli.answers import Answer
from tests.service.conftest import TEXT

DOCUMENT = TEXT[:9000]


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "ropes.txt"
    path.write_text(DOCUMENT)
    return str(path)


@pytest.fixture
def tiny(checkpoints: Path) -> Path:
    return checkpoints / "tiny"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[[Answer], list[httpx.Request]]:
    """Lets --server answer with what a function makes of the request; returns the list of requests."""

    def install(answer: Answer) -> list[httpx.Request]:
        requests: list[httpx.Request] = []

        def handle(request: httpx.Request) -> httpx.Response:
            requests.append(request)
            return answer(request)

        def client_of(url: str, *, trust_env: bool = False) -> Ropeway:
            return Ropeway(url, transport=httpx.MockTransport(handle))

        monkeypatch.setattr(client, "client_of", client_of)
        return requests

    return install
