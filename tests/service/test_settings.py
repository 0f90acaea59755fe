"""Values of settings that are refused at start, with the name of the setting and what is allowed."""

from __future__ import annotations

from typing import Any

import pytest

from service.cli.server import StartFailed, settings_with
from service.settings import Settings


def refusal(**given: Any) -> str:
    """The line of a start that these settings stop."""
    with pytest.raises(StartFailed) as refused:
        settings_with(**given)
    return str(refused.value)


@pytest.mark.parametrize(("size", "allowed"), [(3, "greater than or equal to 4"), (1025, "less than or equal to 1024")])
def test_a_page_has_a_least_and_a_largest_size(size: int, allowed: str) -> None:
    assert refusal(page_size=size) == f"ROPEWAY_PAGE_SIZE: Input should be {allowed}"


def test_a_page_is_no_larger_than_the_cache() -> None:
    assert refusal(cache_tokens=64, page_size=65).endswith("at most ROPEWAY_CACHE_TOKENS (64), not 65")
    assert Settings(_env_file=None, cache_tokens=64, page_size=64).page_size == 64


@pytest.mark.parametrize(
    "url", ["foo", "localhost:4318", "grpc://localhost:4317", "http://", "http://:tulip@h:bad", "http://:tulip@h:70000"]
)
def test_traces_go_to_a_url_of_http(url: str) -> None:
    told = refusal(otel_endpoint=url)
    assert told.startswith("ROPEWAY_OTEL_ENDPOINT: ")
    assert "http://HOST:PORT or https://HOST:PORT" in told
    assert "tulip" not in told


@pytest.mark.parametrize("url", ["http://localhost:4318", "https://traces.example/otlp", "http://[::1]:4318/"])
def test_an_endpoint_of_traces_stays_as_it_is(url: str) -> None:
    assert Settings(_env_file=None, otel_endpoint=url).otel_endpoint == url


def test_metrics_have_another_port_than_requests() -> None:
    told = refusal(port=8123, metrics_port=8123)
    assert told.startswith("ROPEWAY_METRICS_PORT: ")
    assert "another port than ROPEWAY_PORT (8123)" in told
    assert Settings(_env_file=None, port=0, metrics_port=0).metrics_port == 0


@pytest.mark.parametrize("origin", ["foo", "a.example:80", "https://a.example/", "https://a b", "https://", "null"])
def test_an_origin_that_no_browser_sends_is_refused(origin: str) -> None:
    told = refusal(cors_origins=f"https://a.example,{origin}")
    assert told.startswith("ROPEWAY_CORS_ORIGINS: ")
    assert f"{origin!r} is neither * nor an origin: scheme://HOST" in told


def test_origins_are_in_the_form_that_browsers_send() -> None:
    given = "https://A.example, http://localhost:3000, http://[::1]:80, chrome-extension://abc, *"
    assert Settings(_env_file=None, cors_origins=given).cors_origins == tuple(given.lower().split(", "))


@pytest.mark.parametrize("name", [name for name in Settings.model_fields if name.endswith("_s")])
@pytest.mark.parametrize("seconds", ["inf", "nan"])
def test_seconds_are_a_finite_number(name: str, seconds: str) -> None:
    assert refusal(**{name: seconds}).startswith(f"ROPEWAY_{name.upper()}: Input should be ")


@pytest.mark.parametrize("key", ["клюква", "“tulip”", "tu lip", "tulip\x00", "tulip\x7f", "tulip\r\nx: y"])
def test_an_api_key_that_no_request_can_have_is_refused(key: str) -> None:
    told = refusal(api_keys=f"ann-key,{key}")
    assert told.startswith("ROPEWAY_API_KEYS: an API key must be one or more printable ASCII characters")
    assert key not in told


def test_an_api_key_has_no_line_end() -> None:
    given = Settings(_env_file=None, api_keys=("tulip\n",))
    assert given.api_keys == Settings(_env_file=None, api_keys="tulip").api_keys
