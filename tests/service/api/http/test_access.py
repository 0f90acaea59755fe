"""API keys and tenants: who gets in, and what one may learn of another."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner, Result

from service.api.http.access import BESIDE, ApiKeys
from service.api.http.key_file import InvalidKeyFile, hash_of, read_hashes
from service.cli.commands import app as ropeway
from service.cli.shared.client import client_of
from service.evaluation.perplexity.request import PerplexityRequest
from service.models.checkpoint.loading import load
from service.settings import Settings
from tests.service.api.conftest import ANN, BOB, GENERATE
from tests.service.conftest import tiny_checkpoint
from tests.service.serving import engine_of, serving, wait_for

REVOKED = (
    'data: {"error": {"message": "no valid API key: send it as `Authorization: Bearer KEY` or as `x-api-key: KEY`", '
    '"type": "authentication_error", "param": null, "code": "invalid_api_key"}}'
)


@pytest.fixture
def client(guarded: tuple[str, FastAPI, Path]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=guarded[0], timeout=60) as client:
        yield client


def test_every_route_but_probes_and_metrics_needs_a_key(
    client: httpx.Client, guarded: tuple[str, FastAPI, Path]
) -> None:
    paths = client.get("/openapi.json", headers=ANN).json()["paths"]
    assert {"/generate", "/perplexity", "/models", "/metrics", "/v1/health"} <= set(paths)
    routes = [(method, path) for path, methods in paths.items() for method in methods]
    for method, path in [*routes, ("get", "/docs"), ("get", "/openapi.json"), ("get", "/nowhere")]:
        answer = client.request(method, re.sub(r"\{\w+\}", "x", path))
        if re.fullmatch(r"(/v1)?/health.*|/metrics", path):
            assert answer.status_code == 200, path
        else:
            assert answer.status_code == 401, path
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["error"]["type"] == "authentication_error"
    for path in ("/", "/ui"):
        assert client.get(path).status_code < 400, "the page is open, and asks for a key"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (ANN, 200),
        (BOB, 200),
        ({"x-api-key": "other-key"}, 200),
        ({"Authorization": "bearer  ann-key"}, 200),
        ({"Authorization": "Bearer nonsense", "x-api-key": "bob-key"}, 200),
        ({"Authorization": "Bearer"}, 401),
        ({"Authorization": "Basic ann-key"}, 401),
        ({"Authorization": "Bearer ann-key2"}, 401),
        ({"x-api-key": "ann-key, other-key"}, 401),
        ({"Authorization": f"Bearer {hash_of('bob-key')}"}, 401),
        ({"Authorization": "Bearer " + "k" * 4000}, 401),
    ],
)
def test_keys_as_bearer_and_as_x_api_key(client: httpx.Client, headers: dict[str, str], status: int) -> None:
    assert client.get("/models", headers=headers).status_code == status


def test_the_file_is_read_again_when_it_changes(guarded: tuple[str, FastAPI, Path], client: httpx.Client) -> None:
    file = guarded[2]
    before = file.read_text()
    new = {"x-api-key": "new-key"}
    assert client.get("/models", headers=new).status_code == 401
    file.write_text(hash_of("new-key") + "\n")
    assert client.get("/models", headers=new).status_code == 200
    assert client.get("/models", headers=BOB).status_code == 401
    file.write_text("no hash at all")  # a broken file changes nothing
    assert client.get("/models", headers=new).status_code == 200
    assert client.get("/models", headers=ANN).status_code == 200
    file.write_text(before)
    assert client.get("/models", headers=BOB).status_code == 200


def test_jobs_run_while_their_key_is_valid(guarded: tuple[str, FastAPI, Path], client: httpx.Client) -> None:
    _, app, file = guarded
    before, tenant = file.read_text(), hash_of("new-key")[:16]
    body = {"input": [[5] * 40], "lengths": [32], "methods": ["default"]}
    request, models = PerplexityRequest.model_validate(body), [app.state.models.default.name]
    job = app.state.jobs.add(tenant, request, models=models, units=1, tokens=32).id
    anns = client.post("/jobs", json=body | {"evaluation": "perplexity"}, headers=ANN).json()["id"]
    wait_for(lambda: client.get(f"/jobs/{anns}", headers=ANN).json()["state"] == "done")
    assert app.state.jobs.get(tenant, job).state == "queued"
    waiting = app.state.jobs.add(hash_of("bob-key")[:16], request, models=["nowhere"], units=1, tokens=32).id
    with client.stream("GET", f"/jobs/{waiting}/events", headers=BOB) as events:
        lines = events.iter_lines()
        assert next(lines) == "event: progress"
        file.write_text(before.replace(hash_of("bob-key"), hash_of("new-key")))
        assert [line for line in lines if line][-2:] == [REVOKED, "data: [DONE]"]
    assert client.get("/jobs", headers=BOB).status_code == 401
    wait_for(lambda: app.state.jobs.get(tenant, job).state == "done")
    file.write_text(before)


def test_an_empty_file_lets_nobody_in(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# nobody yet\n")
    keys = ApiKeys((), tmp_path / "keys")
    assert keys.asked_for
    assert keys.tenant_of(["anything", ""]) is None


def test_a_broken_file_of_keys_stops_the_start(tmp_path: Path) -> None:
    for text, problem in (("plain-key", "line 1"), (f"{'a' * 64}\n{'b' * 63}", "line 2")):
        (tmp_path / "keys").write_text(text)
        with pytest.raises(InvalidKeyFile, match=problem):
            read_hashes(tmp_path / "keys")
        result = CliRunner().invoke(ropeway, ["serve", "--set", f"api_keys_file={tmp_path / 'keys'}"])
        assert result.exit_code == 1
        assert problem in " ".join(result.stderr.split())
    with pytest.raises(InvalidKeyFile, match="cannot be read"):
        ApiKeys((), tmp_path / "absent")


def test_keys_are_not_kept_as_they_are() -> None:
    settings = Settings(_env_file=None, api_keys="ann-key")
    assert settings.api_keys == (hashlib.sha256(b"ann-key").hexdigest(),)
    assert "ann-key" not in repr(settings) + settings.model_dump_json()


def test_the_command_makes_keys_that_work(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    for name in ("ann", "bob"):
        result = CliRunner().invoke(ropeway, ["keys", "new", name, "--file", str(file)])
        key = result.stdout.strip()
        assert result.exit_code == 0
        assert key.startswith("rw-")
        assert key not in file.read_text()
        assert ApiKeys((), file).tenant_of([key]) == hash_of(key)[:16]
    assert len(read_hashes(file)) == 2
    shown = CliRunner().invoke(ropeway, ["keys", "new"])
    assert hash_of(shown.stdout.strip()) in shown.stderr


def test_keys_are_listed_and_revoked(guarded: tuple[str, FastAPI, Path], tmp_path: Path) -> None:
    url, _, file = guarded
    before = file.read_text()
    file.chmod(0o640)

    def keys(*arguments: str) -> Result:
        return CliRunner().invoke(ropeway, ["keys", *arguments, "--file", str(file)])

    mine, other = (keys("new", name).stdout.strip() for name in ("eve", "eve's other"))
    listed = " ".join(keys("list").stdout.split())
    assert f"{hash_of(mine)[:16]} {datetime.now(UTC):%Y-%m-%d} eve" in listed
    assert f"{hash_of(other)[:16]} {datetime.now(UTC):%Y-%m-%d} eve's other" in listed
    assert httpx.get(f"{url}/models", headers={"x-api-key": mine}).status_code == 200
    inode = file.stat().st_ino
    assert keys("revoke", "eve").stdout == f"revoked {hash_of(mine)[:16]} eve\n"
    assert (file.stat().st_ino == inode, file.stat().st_mode & 0o777) == (False, 0o640), "replaced as a whole"
    assert httpx.get(f"{url}/models", headers={"x-api-key": mine}).status_code == 401
    assert httpx.get(f"{url}/models", headers={"x-api-key": other}).status_code == 200
    assert keys("revoke", hash_of(other)[:8]).exit_code == 0
    assert file.read_text() == before, "nothing else changed"
    assert [path.name for path in file.parent.iterdir()] == [file.name], "no other file is left behind"
    for which in ("nobody", "", hash_of(other)[:4]):
        refused = keys("revoke", which)
        assert (refused.exit_code, "no keys in" in refused.stderr) == (1, True)


def test_the_shell_sends_its_key(monkeypatch: pytest.MonkeyPatch, guarded: tuple[str, FastAPI, Path]) -> None:
    monkeypatch.setenv("ROPEWAY_API_KEY", "ann-key")
    with client_of(guarded[0]) as client:
        assert [model.id for model in client.models()]


def test_one_key_may_have_so_many_requests_at_a_time(checkpoints: Path) -> None:
    with serving(checkpoints, api_keys="ann-key,bob-key", key_concurrency=1) as (url, app):
        request = PerplexityRequest.model_validate({"input": [[5] * 40], "lengths": [32]})
        job = app.state.jobs.add(hash_of("ann-key")[:16], request, models=["nowhere"], units=1, tokens=32).id
        with httpx.stream("GET", f"{url}/jobs/{job}/events", headers=ANN) as events:
            following = events.iter_lines()
            next(following)
            assert httpx.get(f"{url}/jobs/{job}", headers=ANN).status_code == 200
        with ExitStack() as followed:
            codes = [
                followed.enter_context(httpx.stream("GET", f"{url}/jobs/{job}/events", headers=ANN)).status_code
                for _ in range(BESIDE + 1)
            ]
            assert Counter(codes) == {200: BESIDE, 429: 1}
        body = {"prompt": [5, 6, 7], "max_new_tokens": 1500, "stream": True}
        with httpx.stream("POST", f"{url}/generate", json=body, headers=ANN) as running:
            lines = running.iter_lines()  # kept: httpx closes the connection with its iterator
            next(lines)
            refused = httpx.post(f"{url}/generate", json=GENERATE, headers=ANN)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_requests")
            assert "retry-after" in refused.headers
            assert httpx.delete(f"{url}/jobs/{job}", headers=ANN).json()["state"] == "cancelled"
            assert httpx.post(f"{url}/generate", json=GENERATE, headers=BOB).status_code == 200
        wait_for(lambda: httpx.post(f"{url}/generate", json=GENERATE, headers=ANN).status_code == 200)


def test_one_key_leaves_connections_to_the_next(checkpoints: Path) -> None:
    with serving(checkpoints, api_keys="ann-key,bob-key", max_connections=16) as (url, app):
        request = PerplexityRequest.model_validate({"input": [[5] * 40], "lengths": [32]})
        job = app.state.jobs.add(hash_of("ann-key")[:16], request, models=["nowhere"], units=1, tokens=32).id
        with ExitStack() as followed:
            answers = [
                followed.enter_context(httpx.stream("GET", f"{url}/jobs/{job}/events", headers=ANN)) for _ in range(12)
            ]
            assert [answer.status_code for answer in answers] == [200] * 11 + [429]
            assert "requests on 11 of 16 connections" in answers[-1].read().decode()
            assert httpx.get(f"{url}/jobs/{job}", headers=ANN).status_code == 429
            assert httpx.delete(f"{url}/jobs/{job}", headers=ANN).json()["state"] == "cancelled"
            assert httpx.post(f"{url}/generate", json=GENERATE, headers=BOB).status_code == 200
        wait_for(lambda: httpx.get(f"{url}/jobs/{job}", headers=ANN).status_code == 200)


class Computed:
    """Prompt tokens that the model really read, per request, by looking at what each step was given."""

    def __init__(self, app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tokens = 0
        manager: Any = engine_of(app).thread.manager
        step = type(manager)._generation_step

        def counted() -> None:
            for future in manager.batch_processor.inputs_and_outputs.requests_in_batch:
                if not future.state.generated_tokens:
                    self.tokens += future.query_length
            step(manager)

        monkeypatch.setattr(manager, "_generation_step", counted)

    def during(self, client: httpx.Client, headers: dict[str, str], **body: Any) -> tuple[int, list[int]]:
        before = self.tokens
        answer = client.post("/generate", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return self.tokens - before, answer.json()["results"][0]["token_ids"]


def test_tenants_encodings_and_salts_never_share_a_block(
    guarded: tuple[str, FastAPI, Path], client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = Computed(guarded[1], monkeypatch)
    prompt = [(11 * n) % 380 + 2 for n in range(320)]
    body: dict[str, Any] = {"prompt": prompt, "max_new_tokens": 2}
    linear = {"pe": {"method": "linear", "factor": 2}}
    first, tokens = computed.during(client, ANN, **body)
    again, same = computed.during(client, ANN, **body)
    assert (first, same) == (320, tokens)
    assert again * 5 <= first
    for headers, change in ((BOB, {}), (ANN, linear), (ANN, {"cache_salt": "s"}), (BOB, {"cache_salt": "s"})):
        assert computed.during(client, headers, **body | change)[0] == 320, (headers, change)
    for headers, change in ((BOB, {}), (ANN, linear), (ANN, {"cache_salt": "s"})):
        assert computed.during(client, headers, **body | change)[0] == again, (headers, change)


def test_cache_keys_that_run_out_are_forgotten_and_never_meet(
    guarded: tuple[str, FastAPI, Path], client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = Computed(guarded[1], monkeypatch)
    cache: Any = engine_of(guarded[1]).thread.manager.batch_processor.cache  # type: ignore[union-attr]
    monkeypatch.setattr(cache, "token_bits", 29)  # numbers 1 to 3
    prompt = [(13 * n) % 380 + 2 for n in range(128)]
    for salt in range(9):
        body = {"prompt": prompt, "max_new_tokens": 2, "cache_salt": f"salt {salt}"}
        assert computed.during(client, ANN, **body)[0] == 128
        assert computed.during(client, ANN, **body)[0] <= 32
        assert len(cache.numbers) <= 3
    assert not cache.live_keys


def test_results_belong_to_the_key_that_made_them(client: httpx.Client) -> None:
    result = client.post("/perplexity", json={"input": [5, 6, 7] * 8, "lengths": [16]}, headers=ANN).json()
    paths = [*result["links"].values(), f"/perplexity/{result['id']}"]
    assert len(paths) == 5
    for path in paths:
        assert client.get(path, headers=ANN).status_code == 200
        missing, never = client.get(path, headers=BOB), client.get("/perplexity/0", headers=BOB)
        assert (missing.status_code, missing.json()) == (404, never.json())


def test_checkpoints_are_safetensors_without_code_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: list[dict[str, Any]] = []
    for kind in (AutoTokenizer, AutoConfig, AutoModelForCausalLM):
        monkeypatch.setattr(kind, "from_pretrained", _kept(given, kind.from_pretrained))
    load("m", tiny_checkpoint(tmp_path), Settings(_env_file=None, device="cpu"))
    assert given[-1]["use_safetensors"] is True
    assert len(given) >= 3
    assert all(arguments["trust_remote_code"] is False for arguments in given)


def _kept(given: list[dict[str, Any]], usual: Callable[..., Any]) -> Callable[..., Any]:
    def from_pretrained(*places: Any, **arguments: Any) -> Any:
        given.append(arguments)
        return usual(*places, **arguments)

    return from_pretrained
