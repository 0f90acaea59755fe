"""``/docs`` and ``/openapi.json``: from this server alone, for people, with the keys that it asks for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import httpx
import pytest

from patches import METHODS
from service.app import create_app
from service.evaluation.catalogue import EVALUATIONS
from service.settings import Settings
from tests.service.serving import serving

KEY = {"Authorization": "Bearer ann-key"}
OPEN = ("/health", "/v1/health", "/metrics")


@pytest.fixture(scope="module")
def document(server: str) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{server}/openapi.json", timeout=60).json()
    return found


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, verbs in document["paths"].items():
        yield from ((verb, path, operation) for verb, operation in verbs.items())


def test_the_page_asks_no_other_host(client: httpx.Client) -> None:
    page = client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert not re.search(r"(https?:)?//[\w.-]+\.\w", page.text), "no address of another host"
    linked = re.findall(r"(?:src|href)=\"([^\"]*)\"", page.text)
    assert len(linked) == 3
    for link in [*linked, *re.findall(r"url: '([^']*)'", page.text)]:
        found = client.get(urljoin("/docs", link))
        assert found.status_code == 200, link
        if link.endswith(".css"):
            assert not re.search(r"@import|url\((?!\"?data:)", found.text)
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "://" not in policy
    assert "unsafe-eval" not in policy
    scripts = policy.partition("script-src")[2].partition(";")[0]
    assert "unsafe-inline" not in scripts
    assert re.search(r"'self' 'sha256-[\w+/=]{44}'$", scripts)
    assert client.get("/redoc").status_code == 404


def test_the_page_shows_encodings_in_brief_and_the_rest_in_full(document: dict[str, Any], client: httpx.Client) -> None:
    page = client.get("/docs").text
    assert page.count('<html lang="en">') == 1
    assert "url: 'docs/openapi.json'" in page
    shown = client.get("/docs/openapi.json").json()
    schemas, whole = shown["components"]["schemas"], document["components"]["schemas"]["PositionEncoding"]
    brief = schemas["PositionEncoding"]["anyOf"][1]
    assert brief["properties"]["method"]["enum"] == list(METHODS)
    for example in brief["examples"]:
        assert client.post("/generate", json={"prompt": "a", "pe": example}).status_code == 200
    schemas["PositionEncoding"]["anyOf"][1] = whole["anyOf"][1]
    about = document["info"]["description"]
    assert shown["info"]["description"].startswith(about)
    shown["info"]["description"] = about
    assert shown.pop("servers")[0]["url"] == ".."
    assert shown == document, "nothing else differs"


def test_assets_are_served_once(client: httpx.Client) -> None:
    first = client.get("/docs/assets/swagger-ui-bundle.js")
    again = client.get("/docs/assets/swagger-ui-bundle.js", headers={"If-None-Match": first.headers["etag"]})
    assert (first.headers["content-type"].partition(";")[0], again.status_code) == ("text/javascript", 304)
    for path in ("/docs/assets/nothing.js", "/docs/assets/..%2fmain.py", "/docs/assets/"):
        answer = client.get(path)
        assert answer.status_code == 404
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_keys_are_documented(document: dict[str, Any], checkpoints: Path) -> None:
    schemes = document["components"]["securitySchemes"]
    assert (schemes["bearer"]["type"], schemes["bearer"]["scheme"]) == ("http", "bearer")
    assert (schemes["x-api-key"]["in"], schemes["x-api-key"]["name"]) == ("header", "x-api-key")
    guarded = create_app(Settings(_env_file=None, api_keys="ann-key")).openapi()
    for described, choice in ((document, [{}]), (guarded, [])):
        for _, path, operation in operations(described):
            if not path.startswith(OPEN):
                assert operation["security"] == [{"bearer": []}, {"x-api-key": []}, *choice], path
            else:
                assert "security" not in operation


def test_the_documentation_may_be_open_while_the_rest_needs_a_key(document: dict[str, Any], checkpoints: Path) -> None:
    """The tests of access check that all of it needs one by default."""
    with serving(checkpoints, api_keys="ann-key", open_docs=True) as (url, app):
        app.openapi_schema = document  # making it again takes a second
        for path in ("/docs", "/openapi.json", "/docs/assets/swagger-ui.css"):
            assert httpx.get(url + path, timeout=60).status_code == 200
        for path in ("/models", "/docsx", "/openapi.jsonx", "/methods"):
            assert httpx.get(url + path).status_code == 401
            assert httpx.get(url + path, headers=KEY).status_code in (200, 404)


def test_order_and_titles_are_for_people(document: dict[str, Any]) -> None:
    first = next(operations(document))
    assert first[:2] == ("post", "/generate")
    described = [tag["name"] for tag in document["tags"]]
    assert described[0] == "generate"
    for verb, path, operation in operations(document):
        assert set(operation["tags"]) <= set(described), path
        summary = operation["summary"]
        assert 5 < len(summary) < 110, (verb, path, summary)
        assert not summary.endswith(".")
        assert summary != path.rpartition("/")[2].replace("_", " ").title(), "made of the function's name"
        assert operation.get("description") != summary
    assert "POST /generate" in document["info"]["description"]


def examples_of(document: dict[str, Any], operation: dict[str, Any]) -> list[Any]:
    content = operation["requestBody"]["content"]["application/json"]
    found = [example["value"] for example in content.get("examples", {}).values()]
    refs = [one["$ref"] for one in [content["schema"], *content["schema"].get("oneOf", [])] if "$ref" in one]
    for ref in refs:
        found += document["components"]["schemas"][ref.rpartition("/")[2]].get("examples", [])
    return found


def test_every_body_has_an_example_that_works(document: dict[str, Any], checkpoints: Path) -> None:
    with (
        serving(checkpoints, model="demo", max_scored_tokens=10**8, score_tokens=8192) as (url, _),
        httpx.Client(base_url=url, timeout=120) as client,
    ):
        for verb, path, operation in operations(document):
            if "requestBody" not in operation:
                continue
            found = examples_of(document, operation)
            assert found, (verb, path)
            for example in found:
                in_background = {"background": True} if path[1:] in EVALUATIONS else {}
                if path == "/policies":  # its example needs the id of a result
                    continue
                answer = client.request(verb, path, json=example | in_background)
                assert answer.status_code in (200, 202), (path, answer.text)
                if answer.status_code == 202:
                    client.delete(answer.headers["location"])


def test_parameters_of_a_method_are_declared(document: dict[str, Any], client: httpx.Client) -> None:
    of_methods = {name for method in METHODS.values() for name in method.model_fields} - {"method"}
    for path in ("/methods/{name}/frequencies", "/methods/{name}/frequencies.png"):
        declared = {p["name"]: p for p in document["paths"][path]["get"]["parameters"]}
        assert set(declared) == of_methods | {"name", "model", "length"}
        assert declared["factor"]["schema"] == {"type": "number", "minimum": 1.0, "maximum": 4096.0}
        assert declared["beta_fast"]["description"].startswith("Turns above which a pair is left alone.")
        assert "yarn" in declared["beta_fast"]["description"]
        assert declared["name"]["schema"]["enum"] == list(METHODS)
        shown = {name: p["example"] for name, p in declared.items() if "example" in p}
        name = shown.pop("name")
        assert client.get(path.replace("{name}", name), params=shown).status_code == 200
