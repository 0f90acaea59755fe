"""Results stay with their tenant, survive a restart, and become files once, in processes that end with their client."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from service.api.files import RenderedFiles
from service.api.jobs.feed import JobFeed
from service.jobs.records import JobInfo, UnitDone
from service.reports.rendered import Rendered
from tests.service.conftest import TEXT
from tests.service.serving import serving, within_a_minute

BODY: dict[str, Any] = {"input": TEXT[:3000], "lengths": [64]}


def keys(*names: str) -> list[dict[str, str]]:
    return [{"Authorization": f"Bearer {name}"} for name in names]


@pytest.fixture(scope="module")
def served(checkpoints: Path) -> Iterator[tuple[str, FastAPI]]:
    with serving(checkpoints) as server:
        yield server


@pytest.mark.slow
def test_requests_of_one_tenant_evict_no_results_of_another(checkpoints: Path) -> None:
    ann, bob = keys("ann", "bob")
    with serving(checkpoints, api_keys="ann,bob", recent_results=3) as (url, _):
        kept = httpx.post(f"{url}/perplexity", json=BODY, headers=ann).json()
        mine = [httpx.post(f"{url}/perplexity", json=BODY, headers=bob).json()["id"] for _ in range(5)]
        assert httpx.get(f"{url}{kept['links']['csv']}", headers=ann, timeout=60).status_code == 200
        assert httpx.get(f"{url}{kept['links']['csv']}", headers=bob).status_code == 404
        found = [httpx.get(f"{url}/perplexity/{name}", headers=bob).status_code for name in mine]
        assert found == [404, 404, 200, 200, 200]


def test_small_tables_need_no_process(served: tuple[str, FastAPI], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first process of a server imports all that draws, which took eight seconds under load."""
    url, app = served

    async def refuse(*_: Any) -> None:
        raise AssertionError("a process was asked for")

    with monkeypatch.context() as patched:
        patched.setattr(app.state.workers, "render", refuse)
        table = httpx.post(f"{url}/perplexity", json=BODY, headers={"Accept": "text/csv"})
        assert table.text.startswith("method,model,length,perplexity")
        result = httpx.post(f"{url}/perplexity", json=BODY).json()
        rows = httpx.get(f"{url}{result['links']['csv']}").text
        assert rows == table.text
    monkeypatch.setattr("service.api.files.SMALL_RESULT", 0)
    again = httpx.post(f"{url}/perplexity", json=BODY, headers={"Accept": "text/csv"}, timeout=120)
    assert again.text == rows, "the same from a process"


@pytest.mark.slow
def test_links_survive_a_restart(checkpoints: Path, tmp_path: Path) -> None:
    database = f"sqlite:///{tmp_path / 'jobs.db'}"
    with serving(checkpoints, database_url=database) as (url, _):
        result = httpx.post(f"{url}/perplexity", json=BODY).json()
    with serving(checkpoints, database_url=database) as (url, _):
        again = httpx.get(f"{url}/perplexity/{result['id']}")
        assert again.json() == result
        assert httpx.get(f"{url}{result['links']['png']}").content.startswith(b"\x89PNG")
        assert httpx.get(f"{url}/passkey/{result['id']}").status_code == 404


@pytest.mark.parametrize("encoding", ["gzip", "identity"])
def test_a_result_comes_packed_or_plain(served: tuple[str, FastAPI], encoding: str) -> None:
    url, _ = served
    result = httpx.post(f"{url}/perplexity", json=BODY).json()
    for path in (f"/perplexity/{result['id']}", result["links"]["csv"], result["links"]["html"]):
        with httpx.stream("GET", f"{url}{path}", headers={"Accept-Encoding": encoding}) as answer:
            raw = b"".join(answer.iter_raw())
        assert answer.headers.get("content-encoding", "identity") == encoding
        assert answer.headers["vary"] == "Accept-Encoding"
        plain = gzip.decompress(raw) if encoding == "gzip" else raw
        assert plain == httpx.get(f"{url}{path}").content
    assert json.loads(httpx.get(f"{url}/perplexity/{result['id']}").content) == result


@pytest.mark.slow
def test_an_answer_has_a_limit(checkpoints: Path) -> None:
    with serving(checkpoints, max_answer_bytes=20_000) as (url, _):
        links = httpx.post(f"{url}/perplexity", json=BODY).json()["links"]
        assert httpx.get(f"{url}{links['csv']}").status_code == 200
        answer = httpx.get(f"{url}{links['html']}", params={"standalone": True})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "answer_too_large")


def test_log_probabilities_of_one_answer_are_bounded(served: tuple[str, FastAPI]) -> None:
    url, _ = served
    prompt = [5] * 900
    echoed = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 20}
    assert httpx.post(f"{url}/v1/completions", json=echoed, timeout=60).status_code == 200
    for path, body in (
        ("/v1/completions", echoed | {"n": 64}),
        ("/v1/completions", {"prompt": [prompt] * 64, "max_tokens": 0, "prompt_logprobs": 20}),
        ("/generate", {"prompt": [prompt] * 32, "max_new_tokens": 900, "logprobs": 20}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1000, "n": 64, "logprobs": True}
            | {"top_logprobs": 20},
        ),
    ):
        answer = httpx.post(f"{url}{path}", json=body, timeout=60)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] in ("logprobs", "model"), answer.text


@pytest.mark.slow
def test_a_text_beyond_the_limit_is_not_tokenized(checkpoints: Path) -> None:
    with serving(checkpoints, max_text_bytes=1000) as (url, _):
        text = "word " * 300
        for path, body, param in (
            ("/tokenize", {"prompt": text}, "prompt"),
            ("/generate", {"prompt": ["a", text]}, "prompt"),
            ("/v1/completions", {"prompt": text}, "prompt"),
            ("/perplexity", {"input": [text]}, "input"),
            ("/jobs", {"evaluation": "needle", "input": text}, "input"),
        ):
            answer = httpx.post(f"{url}{path}", json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
            assert "1000" in answer.json()["error"]["message"]
        for count, status in ((333, 200), (334, 400)):
            answer = httpx.post(f"{url}/tokenize", json={"prompt": "你" * count})
            assert answer.status_code == status, "a character of three bytes counts as three"


@pytest.mark.slow
def test_a_tenant_without_tokens_left_tokenizes_nothing(checkpoints: Path) -> None:
    with serving(checkpoints, key_tokens_per_minute=30) as (url, _):
        within_a_minute(10)
        assert httpx.post(f"{url}/tokenize", json={"prompt": "a"}).status_code == 200
        generated = {"prompt": [5] * 20, "max_new_tokens": 10, "ignore_eos": True}
        assert httpx.post(f"{url}/generate", json=generated).status_code == 200
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})):
            assert httpx.post(f"{url}{path}", json=body).status_code == 429


class TestFiles:
    async def test_a_file_is_made_once_for_all_who_ask(self) -> None:
        files, release, made = RenderedFiles(), asyncio.Event(), []

        async def make() -> Rendered:
            made.append(1)
            await release.wait()
            return Rendered(b"data", "text/csv", False)

        asked = [asyncio.create_task(files.get("a", make)) for _ in range(10)]
        await asyncio.sleep(0.01)
        for task in asked[:9]:
            task.cancel()
        release.set()
        assert (await asked[9]).data == b"data"
        assert (await files.get("a", make)).data == b"data"
        assert len(made) == 1

    async def test_a_file_that_nobody_waits_for_is_given_up(self) -> None:
        files, given_up = RenderedFiles(), asyncio.Event()

        async def make() -> Rendered:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                given_up.set()
                raise
            raise AssertionError

        task = asyncio.create_task(files.get("a", make))
        await asyncio.sleep(0.01)
        task.cancel()
        async with asyncio.timeout(5):
            await given_up.wait()

    async def test_old_files_make_room(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("service.api.files.KEPT_BYTES", 10)
        files, made = RenderedFiles(), []

        async def get(name: str) -> None:
            async def make() -> Rendered:
                made.append(name)
                return Rendered(b"1234", "text/csv", False)

            await files.get(name, make)

        for name in ("a", "b", "a", "c", "a", "b"):
            await get(name)
        assert made == ["a", "b", "c", "b"]


async def test_followers_of_a_job_share_each_look_at_the_store() -> None:
    looks: list[str] = []

    async def info(tenant: str, job_id: str) -> JobInfo:
        looks.append("info")
        await asyncio.sleep(0.01)
        return JobInfo.model_construct(id=job_id, tokens_done=len(looks))

    async def units(job_id: str, after: int) -> list[UnitDone]:
        return [UnitDone(number=after + 1, label="a", name="b", length=1, reused=False, seconds=0.0, summary={})]

    feed = JobFeed(info, units)
    with feed.following("anna", "a"):
        found = await asyncio.gather(*(feed.news("anna", "a") for _ in range(400)))
        assert looks == ["info"]
        assert {id(news) for news in found} == {id(found[0])}
        alone = feed.pause_s
        with feed.following("anna", "a"), feed.following("berta", "b"):
            assert feed.pause_s > alone
        await asyncio.sleep(0.25)
        later = await feed.news("anna", "a")
        assert [number for number, _ in later.units] == [1, 2]
    with pytest.raises(KeyError):
        await feed.news("anna", "a")


def test_a_planner_stops_when_its_client_leaves(served: tuple[str, FastAPI]) -> None:
    """Planning 60 samples at 101 depths took minutes; its thread is free a moment after the client has gone."""
    url, _ = served
    body = {"samples": 60, "depths": [n / 100 for n in range(101)], "lengths": [256], "timeout_s": 0.5}
    answers: list[int] = []

    def ask() -> None:
        answers.append(httpx.post(f"{url}/passkey", json=body, timeout=30).status_code)

    threads = [threading.Thread(target=ask) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(answers) == {504}
    assert httpx.post(f"{url}/passkey", json={"lengths": [256], "samples": 1, "depths": [0.5]}).status_code == 200


@pytest.mark.slow
def test_every_link_works_on_every_server_of_a_database(checkpoints: Path, tmp_path: Path) -> None:
    shared = {"database_url": f"sqlite:///{tmp_path / 'jobs.db'}"}
    body = {"input": TEXT[:1000], "lengths": [32]}
    with serving(checkpoints, **shared) as (one, _), serving(checkpoints, **shared) as (other, _):
        links = [
            httpx.post(f"{url}/perplexity", json=body, timeout=60).json()["links"]["csv"] for url in (one, other) * 10
        ]
        answers = [httpx.get(f"{url}{link}", timeout=60) for link in links for url in (one, other)]
    assert len(set(links)) == 20
    assert [answer.status_code for answer in answers] == [200] * 40
