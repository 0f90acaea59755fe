"""``/v1/models`` by the ``anthropic`` package: the models of OpenAI's list, in pages."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import anthropic
import httpx
import pytest

VERSION = {"anthropic-version": "2023-06-01"}


@pytest.fixture
def client(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key="k", max_retries=0, _strict_response_validation=True) as client:
        yield client


@pytest.fixture
def listed(http: httpx.Client) -> list[dict[str, Any]]:
    """OpenAI's list."""
    found: list[dict[str, Any]] = http.get("/v1/models").json()["data"]
    return found


def test_the_pages_are_openais_list(client: anthropic.Anthropic, listed: list[dict[str, Any]]) -> None:
    ids = [card["id"] for card in listed]
    assert len(ids) == 3
    for limit in (1, 2, 3, 1000):
        assert [model.id for model in client.models.list(limit=limit)] == ids
        backwards = [model.id for model in client.models.list(limit=limit, before_id=ids[2])]
        assert backwards == (ids[:2] if limit > 1 else [ids[1], ids[0]])
    first = client.models.list(limit=2)
    assert ([model.id for model in first.data], first.has_more) == (ids[:2], True)
    assert (first.first_id, first.last_id) == (ids[0], ids[1])
    assert client.models.list(limit=2, after_id=ids[0]).has_more is False
    before = client.models.list(limit=1, before_id=ids[2])
    assert ([model.id for model in before.data], before.has_more) == (ids[1:2], True)
    assert client.models.list(limit=2, before_id=ids[2]).has_more is False
    assert client.models.list().has_more is False
    assert [model.id for model in client.beta.models.list(limit=2).data] == ids[:2]


def test_a_model_is_as_in_openais_list(client: anthropic.Anthropic, listed: list[dict[str, Any]]) -> None:
    (first, *_), card = client.models.list(limit=1).data, listed[0]
    assert first == client.models.retrieve(card["id"])
    assert (first.type, first.id, first.display_name) == ("model", card["id"], card["id"])
    assert first.created_at == datetime.fromtimestamp(card["created"], UTC)
    assert (first.max_input_tokens, first.max_tokens) == (card["max_model_len"], 1024)
    assert client.models.retrieve("tiny@yarn:3.5").id == "tiny@yarn:3.5"
    assert "object" not in client.models.with_raw_response.retrieve("tiny").json()


def test_all_models_are_active(client: anthropic.Anthropic) -> None:
    assert {model.lifecycle for model in client.models.list(lifecycle=["active", "retired"])} == {"active"}
    nothing = client.models.list(lifecycle=["deprecated"])
    assert (nothing.data, nothing.has_more, nothing.first_id, nothing.last_id) == ([], False, None, None)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"limit": 0}, "limit"),
        ({"limit": 1001}, "limit"),
        ({"limit": "all"}, "limit"),
        ({"lifecycle": ["active", "new"]}, "lifecycle"),
        ({"after_id": "claude"}, "after_id"),
        ({"before_id": "claude"}, "before_id"),
        ({"before_id": "tiny", "after_id": "tiny"}, "after_id"),
    ],
)
def test_a_wrong_page_is_refused_in_the_form_of_the_api(
    client: anthropic.Anthropic, http: httpx.Client, query: dict[str, Any], param: str
) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.models.list(extra_query=query)
    assert caught.value.type == "invalid_request_error"
    assert caught.value.body["error"]["param"] == param  # type: ignore[index]
    assert caught.value.request_id
    assert http.get("/v1/models", params=query).json()["object"] == "list", "OpenAI's list has no pages"


def test_an_unknown_model_is_not_found(client: anthropic.Anthropic, http: httpx.Client) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.models.retrieve("claude")
    assert (caught.value.type, caught.value.body["type"]) == ("not_found_error", "error")  # type: ignore[index]
    found = http.get("/v1/models/claude")
    assert set(found.json()) == {"error"}
    assert "request-id" not in found.headers


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/tiny"])
def test_other_verbs_are_refused_in_the_form_of_the_client(http: httpx.Client, path: str) -> None:
    refused = http.delete(path, headers=VERSION)
    assert (refused.status_code, refused.json()["type"]) == (405, "error")
    assert set(http.delete(path).json()) == {"error"}
    assert http.head(path, headers=VERSION).status_code == http.head(path).status_code == 200


@pytest.mark.parametrize("path", ["/v1", "/v1/files", "/v1/skills", "/v1/organizations/api_keys"])
def test_paths_of_the_api_that_are_not_here(http: httpx.Client, path: str) -> None:
    missing = http.get(path, headers=VERSION)
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
    assert missing.json()["request_id"] == missing.headers["request-id"]
    assert set(http.get(path).json()) == {"error"}


def test_a_client_reads_them(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.beta.files.list()
    assert (caught.value.type, caught.value.request_id is None) == ("not_found_error", False)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1beta", "/jobs/none"])
def test_other_routes_keep_their_form(http: httpx.Client, path: str) -> None:
    assert set(http.get(path, headers=VERSION).json()) == {"error"}
