"""Query parameters: unknown ones are refused by name. Pages, probes and the routes of OpenAI take any."""

from __future__ import annotations

import httpx
import pytest
from fastapi import FastAPI

from service.app import create_app
from service.settings import Settings

OPEN = ("/health", "/v1/", "/metrics")
ID = "0" * 32


@pytest.mark.parametrize(
    ("verb", "address", "says"),
    [
        ("GET", "/jobs?sate=failed", "'sate': did you mean state?"),
        ("GET", "/jobs?state=failed&x=1", "'x': there are state, limit, before"),
        ("GET", "/methods?ful=true", "'ful': did you mean full?"),
        ("GET", f"/jobs/{ID}/report.html?standalon=true", "'standalon': did you mean standalone?"),
        ("DELETE", f"/jobs/{ID}?forgett=true", "'forgett': did you mean forget?"),
        ("POST", "/generate?stream=true", "'stream': this route takes none"),
        ("GET", "/methods/linear/frequencies?factr=4", None),
    ],
)
def test_an_unknown_parameter_is_refused_by_name(
    client: httpx.Client, verb: str, address: str, says: str | None
) -> None:
    answer = client.request(verb, address)
    error = answer.json()["error"]
    assert answer.status_code == 400, answer.text
    if says is not None:
        assert error["message"] == f"unknown query parameter {says}"
        assert (error["param"], error["code"]) == (says.split("'")[1], "invalid_request")


COUNTS = ["/jobs?limit=", "/methods/linear/frequencies?factor=4&length=", "/v1/models?limit="]


@pytest.mark.parametrize("address", COUNTS)
def test_a_whole_number_is_written_with_digits(client: httpx.Client, address: str) -> None:
    def get(number: str) -> httpx.Response:
        return client.get(f"{address}{number}", headers={"anthropic-version": "2023-06-01"})

    assert [get(number).status_code for number in ("5", "05", "512")] == [200, 200, 200]
    for number in ("1_0", "1_000", "%2B5", "%205", "5%20", "5.0", "1e2", "%D9%A5", ""):
        reply = get(number)
        assert (reply.status_code, "must be a whole number, not '" in reply.text) == (400, True), number
    assert "must be at least 1, not '-1'" in get("-1").text


@pytest.mark.parametrize("address", ["/methods/linear/frequencies?factor=4&factor=8", "/jobs?limit=1&limit=2"])
def test_a_parameter_that_is_given_twice_is_refused(client: httpx.Client, address: str) -> None:
    answer, name = client.get(address), address.split("&")[1].split("=")[0]
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == f"the query parameter '{name}' is given twice"
    assert answer.json()["error"]["param"] == name


def test_every_route_of_the_api_looks(client: httpx.Client) -> None:
    app: FastAPI = create_app(Settings(_env_file=None))
    paths = [(verb, path) for path, verbs in app.openapi()["paths"].items() for verb in verbs]
    assert len(paths) > 50
    for verb, path in paths:
        if path.startswith(OPEN):
            continue
        known = path.replace("{name}", "linear")
        answer = client.request(verb, known, params={"nonsense": 1, "factor": 2} if known != path else {"nonsense": 1})
        assert (answer.status_code, "nonsense" in answer.text) == (400, True), path


@pytest.mark.parametrize("address", ["/ui/", "/docs", "/openapi.json", "/metrics", "/health", "/v1/models"])
def test_pages_probes_and_routes_of_openai_take_any(client: httpx.Client, address: str) -> None:
    assert client.get(address, params={"v": "1", "t": "2"}).status_code == 200


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses", "messages"])
def test_a_field_of_the_body_is_no_parameter_there(client: httpx.Client, path: str) -> None:
    answer = client.post(f"/v1/{path}", params={"api-version": "1", "pe": "yarn:4"}, json={})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "pe")
    assert error["message"] == "pe is a field of the body, and has no effect in the address"


def test_a_long_name_is_cut(client: httpx.Client) -> None:
    error = client.get("/models", params={"x" * 9000: 1}).json()["error"]
    assert len(error["message"]) < 300
    assert len(error["param"]) < 300
