"""The API key of a client: from the environment, checked before a request, never repeated."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from service.client import AsyncRopeway, Ropeway, RopewayError
from tests.service.serving import serving


@pytest.mark.parametrize("key", ["“tulip”", "ключ", "tu lip", "tulip\x00", "tulip\r\nx: y", "\n"])
@pytest.mark.parametrize("client", [Ropeway, AsyncRopeway])
def test_a_key_that_no_header_can_have(key: str, client: type[Ropeway | AsyncRopeway]) -> None:
    with pytest.raises(RopewayError, match="api_key, by default ROPEWAY_API_KEY: an API key must be") as caught:
        client("http://127.0.0.1:9", api_key=key)
    assert (caught.value.code, caught.value.param) == ("invalid_request", "api_key")
    assert key.strip() == "" or key not in str(caught.value)


@pytest.mark.parametrize("key", ["tulip\n", " tulip\r\n"])
def test_white_space_around_a_key_is_dropped(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(request.headers["authorization"])
        return httpx.Response(200, json={"models": []})

    monkeypatch.setenv("ROPEWAY_API_KEY", key)
    with Ropeway("http://127.0.0.1:9", transport=httpx.MockTransport(answer)) as client:
        client.models()
    assert sent == ["Bearer tulip"]


@pytest.mark.slow
def test_the_key_and_the_address_of_the_environment(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(checkpoints, api_keys="ann-key") as (url, _):
        with Ropeway(url) as nobody, pytest.raises(RopewayError) as caught:
            nobody.models()
        assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")
        with Ropeway(url.removeprefix("http://"), api_key="ann-key") as ann:
            assert ann.models()
        monkeypatch.setenv("ROPEWAY_URL", url)
        monkeypatch.setenv("ROPEWAY_API_KEY", "ann-key")
        with Ropeway() as ann:
            assert ann.models()
