"""Jobs through ``Ropeway`` and ``AsyncRopeway``: submitted, followed across a restart, cancelled, their results."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, aclosing, closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.client import AsyncRopeway, JobInfo, Progress, Ropeway, RopewayError, UnitDone, retries
from service.client import asynchronous as of_asyncio
from service.client import synchronous as of_threads
from service.evaluation.perplexity.results import PerplexityResult
from service.evaluation.retrieval.results import PasskeyResult
from tests.service.conftest import TEXT
from tests.service.serving import process

FIELDS: dict[str, Any] = {"input": TEXT, "methods": ["default", "yarn:4", "linear:2"], "lengths": [64, 128]}
"""Three units."""

LONG: dict[str, Any] = FIELDS | {"methods": ["default", "yarn:4"], "lengths": [64], "reuse": False}
LONG |= {"protocol": "sliding", "stride": 20}
"""Two units of hundreds of windows: seconds of work."""


@pytest.fixture
def ropeway(server: str) -> Iterator[Ropeway]:
    with Ropeway(server) as client:
        yield client


@pytest.fixture
async def asynchronous(server: str) -> AsyncIterator[AsyncRopeway]:
    async with AsyncRopeway(server) as client:
        yield client


def units_of(items: list[UnitDone | JobInfo]) -> list[UnitDone]:
    return [item for item in items if isinstance(item, UnitDone)]


class TestJobs:
    def test_from_submission_to_the_result(self, ropeway: Ropeway) -> None:
        job = ropeway.submit("perplexity", **FIELDS, reuse=False)
        assert (job.state, job.units_total, job.evaluation) == ("queued", 3, "perplexity")
        items = list(ropeway.follow(job.id))
        assert [(unit.number, unit.label, unit.reused) for unit in units_of(items)] == [
            (1, "default", False),
            (2, "yarn(factor=4)", False),
            (3, "linear(factor=2)", False),
        ]
        told = [item for item in items if isinstance(item, JobInfo)]
        assert [item.tokens_done for item in told] == sorted(item.tokens_done for item in told)
        assert told[-1] is items[-1]
        assert told[-1] == ropeway.job(job.id)
        assert (told[-1].state, told[-1].request) == ("done", job.request)
        assert all(not item.request for item in told[:-1])
        result = ropeway.result(job.id)
        assert isinstance(result, PerplexityResult)
        assert result.numbers() == ropeway.perplexity(**FIELDS).numbers()

    def test_following_goes_on_after_a_unit(self, ropeway: Ropeway) -> None:
        job = ropeway.submit("perplexity", **FIELDS)
        units = units_of(list(ropeway.follow(job.id)))
        assert units_of(list(ropeway.follow(job.id, after=1))) == units[1:]
        assert units_of(list(ropeway.follow(job.id, after=3))) == []

    def test_listing_by_state_and_page_by_page(self, ropeway: Ropeway) -> None:
        ids = [ropeway.submit("perplexity", **FIELDS).id for _ in range(3)]
        for job_id in ids:
            list(ropeway.follow(job_id))
        assert [job.id for job in ropeway.jobs(limit=2)] == [ids[2], ids[1]]
        assert [job.id for job in ropeway.jobs(limit=1, before=ids[1])] == [ids[0]]
        assert {job.state for job in ropeway.jobs(state="done")} == {"done"}
        assert ropeway.jobs(state="failed") == []

    def test_cancelling_then_forgetting(self, ropeway: Ropeway) -> None:
        job = ropeway.submit("perplexity", **LONG)
        with closing(ropeway.follow(job.id)) as items:
            next(items)
        ropeway.cancel(job.id)
        assert ropeway.job(job.id).state == "cancelled"
        (last,) = [item for item in ropeway.follow(job.id) if isinstance(item, JobInfo)]
        assert last.state == "cancelled"
        with pytest.raises(RopewayError) as caught:
            ropeway.result(job.id)
        assert (caught.value.status, caught.value.code) == (409, "job_cancelled")
        ropeway.forget(job.id)
        with pytest.raises(RopewayError) as caught:
            list(ropeway.follow(job.id))
        assert (caught.value.status, caught.value.code) == (404, "not_found")

    @pytest.mark.slow
    def test_resuming_where_it_was_cancelled(self, ropeway: Ropeway) -> None:
        job = ropeway.submit("perplexity", **LONG)
        with closing(ropeway.follow(job.id)) as items:
            first = next(item for item in items if isinstance(item, UnitDone))
        ropeway.cancel(job.id)
        partial = ropeway.result(job.id)
        assert partial.partial is not None
        assert partial.partial.words() == "1 of 2 units are finished; missing: yarn(factor=4) (1)"
        assert ropeway.units(job.id) == [first]
        assert ropeway.resume(job.id).state == "queued"
        assert [unit.number for unit in units_of(list(ropeway.follow(job.id, after=1)))] == [2]
        assert ropeway.result(job.id).partial is None
        with pytest.raises(RopewayError) as caught:
            ropeway.resume(job.id)
        assert (caught.value.status, caught.value.code) == (409, "job_done")

    @pytest.mark.slow
    def test_files(self, ropeway: Ropeway) -> None:
        job = ropeway.submit("perplexity", **FIELDS)
        list(ropeway.follow(job.id))
        rows = list(csv.DictReader(io.StringIO(ropeway.download(job.id, "results.csv").decode())))
        result = ropeway.result(job.id)
        assert isinstance(result, PerplexityResult)
        assert [float(row["perplexity"]) for row in rows] == [
            at.perplexity for method in result.methods for at in method.lengths
        ]
        for file, head in {
            "results.parquet": b"PAR1",
            "plot.png": b"\x89PNG",
            "plot.svg": b"<?xml",
            "report.html": b"<!doctype html>",
        }.items():
            assert ropeway.download(job.id, file).startswith(head)
        report, with_text = (ropeway.download(job.id, "report.html", include_text=wanted) for wanted in (False, True))
        assert b"<script src=" not in report, "a file that travels has everything in it"
        assert (FIELDS["input"][:50].encode() in report, FIELDS["input"][:50].encode() in with_text) == (False, True)
        assert b"NLL by position" in ropeway.download(job.id, "plot.svg", picture="nll-by-position")
        with pytest.raises(RopewayError) as caught:
            ropeway.download(job.id, "results.xls")
        assert caught.value.status == 404

    @pytest.mark.slow
    def test_any_evaluation_answered_when_it_is_done(self, ropeway: Ropeway) -> None:
        progress: list[Progress] = []
        fields: dict[str, Any] = {"methods": ["default"], "lengths": [256], "depths": [0.5], "samples": 2}
        result = ropeway.evaluate("passkey", on_progress=progress.append, **fields)
        assert isinstance(result, PasskeyResult)
        assert progress[-1].tokens_done == progress[-1].tokens_total > 0
        job = ropeway.submit("passkey", **fields)
        list(ropeway.follow(job.id))
        assert ropeway.result(job.id).numbers() == result.numbers()
        outputs = ropeway.result(job.id, include_text=True).outputs()
        assert outputs
        assert all(output.prompt for output in outputs)
        assert {unit.prompt for unit in ropeway.units(job.id, include_text=True)} == {one.prompt for one in outputs}

    def test_refusals(self, ropeway: Ropeway) -> None:
        for fields, param in (({"lengths": [1 << 20]}, "lengths"), ({"timeout_s": 5}, "timeout_s")):
            with pytest.raises(RopewayError) as caught:
                ropeway.submit("perplexity", **FIELDS | fields)
            assert (caught.value.status, caught.value.param) == (400, param)
        with pytest.raises(RopewayError) as caught:
            ropeway.evaluate("perplexity", **FIELDS, reuse=False)
        assert (caught.value.status, caught.value.param) == (400, "reuse")
        with pytest.raises(RopewayError, match="unknown method") as caught:
            ropeway.submit("perplexity", methods="yrn:4")
        assert (caught.value.status, caught.value.param) == (400, "methods.0")


class TestAsync:
    async def test_from_submission_to_the_result(self, asynchronous: AsyncRopeway, ropeway: Ropeway) -> None:
        job = await asynchronous.submit("perplexity", **FIELDS, reuse=False)
        items = [item async for item in asynchronous.follow(job.id)]
        assert [unit.number for unit in units_of(items)] == [1, 2, 3]
        assert [item async for item in asynchronous.follow(job.id, after=2)] == [units_of(items)[2], items[-1]]
        assert items[-1] == await asynchronous.job(job.id) == ropeway.job(job.id)
        assert (await asynchronous.jobs(limit=1))[0].id == job.id
        result = await asynchronous.result(job.id)
        assert result.numbers() == ropeway.perplexity(**FIELDS).numbers()
        assert (await asynchronous.download(job.id, "plot.png")).startswith(b"\x89PNG")

    @pytest.mark.slow
    async def test_resuming_where_it_was_cancelled(self, asynchronous: AsyncRopeway) -> None:
        job = await asynchronous.submit("perplexity", **LONG)
        async with aclosing(asynchronous.follow(job.id)) as items:
            while not isinstance(first := await anext(items), UnitDone):
                pass
        await asynchronous.cancel(job.id)
        assert (await asynchronous.result(job.id)).partial is not None
        assert await asynchronous.units(job.id) == [first]
        assert (await asynchronous.resume(job.id)).state == "queued"
        await asynchronous.cancel(job.id)

    async def test_cancelling_and_refusals(self, asynchronous: AsyncRopeway) -> None:
        job = await asynchronous.submit("perplexity", **LONG)
        async with aclosing(asynchronous.follow(job.id)) as items:
            await anext(items)
        await asynchronous.cancel(job.id)
        assert (await asynchronous.job(job.id)).state == "cancelled"
        with pytest.raises(RopewayError) as caught:
            await asynchronous.result(job.id)
        assert (caught.value.status, caught.value.code) == (409, "job_cancelled")
        with pytest.raises(RopewayError) as caught:
            await asynchronous.submit("nonsense")
        assert (caught.value.status, caught.value.param) == (400, "evaluation")

    @pytest.mark.slow
    async def test_any_evaluation_answered_when_it_is_done(self, asynchronous: AsyncRopeway) -> None:
        progress: list[Progress] = []
        fields: dict[str, Any] = {"lengths": [256], "depths": [0.5], "samples": 1}
        result = await asynchronous.evaluate("passkey", on_progress=progress.append, **fields)
        assert isinstance(result, PasskeyResult)
        assert progress[-1].tokens_done == progress[-1].tokens_total > 0


def told(name: str, value: dict[str, Any]) -> str:
    """An event as the server has it: a unit with its number. Then its sign of life, for a unit that takes long."""
    number = f"id: {value['number']}\n" if name == "unit" else ""
    return f"event: {name}\n{number}data: {json.dumps(value)}\n\n: ping\n\n"


UNIT = {"label": "default", "name": "a", "length": 9, "reused": False, "seconds": 0.1, "summary": {"nll_mean": 1.0}}
JOB = {
    **{"id": "a" * 32, "evaluation": "perplexity", "model": None, "models": ["tiny"], "state": "done", "request": {}},
    **{"created_at": "2026-01-01T00:00:00Z", "units_total": 2, "tokens_total": 18},
}


class Script:
    """A server that gives prepared answers, one request after another, and records the requests."""

    def __init__(self, *answers: httpx.Response | Exception) -> None:
        self.answers = list(answers)
        self.seen: list[str] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.seen.append(request.headers["last-event-id"])
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def stream(*events: str) -> httpx.Response:
    return httpx.Response(200, headers={"Content-Type": "text/event-stream"}, content="".join(events).encode())


def refused(status: int, code: str) -> httpx.Response:
    return httpx.Response(status, json={"error": {"message": code, "code": code}})


Follow = Callable[[Script], Any]


async def with_threads(script: Script) -> list[UnitDone | JobInfo]:
    with Ropeway("http://fake", max_retries=0, transport=httpx.MockTransport(script)) as client:
        return list(client.follow("a" * 32))


async def with_asyncio(script: Script) -> list[UnitDone | JobInfo]:
    async with AsyncRopeway("http://fake", max_retries=0, transport=httpx.MockTransport(script)) as client:
        return [item async for item in client.follow("a" * 32)]


@pytest.mark.parametrize("follow", [with_threads, with_asyncio])
class TestLostConnections:
    @pytest.fixture(autouse=True)
    def _soon(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in (of_threads, of_asyncio):
            monkeypatch.setattr(module, "RECONNECT_S", 0.0)

    async def test_every_unit_comes_once_whatever_happens_in_between(self, follow: Follow) -> None:
        ending = 'data: {"error": {"message": "the server is shutting down", "code": "shutting_down"}}\n\n'
        script = Script(
            stream(told("unit", UNIT | {"number": 1})),
            stream(ending),
            refused(503, "shutting_down"),
            httpx.ConnectError("refused"),
            refused(502, "bad_gateway"),
            stream(told("unit", UNIT | {"number": 2}), told("job", JOB), "data: [DONE]\n\n"),
        )
        items = await follow(script)
        assert [unit.number for unit in units_of(items)] == [1, 2]
        assert isinstance(items[-1], JobInfo)
        assert len(items) == 3
        assert script.seen == ["0", "1", "1", "1", "1", "1"]

    @pytest.mark.parametrize("status", [400, 401, 404, 500])
    async def test_a_refusal_is_the_end(self, follow: Follow, status: int) -> None:
        script = Script(stream(told("unit", UNIT | {"number": 1})), refused(status, "no"))
        with pytest.raises(RopewayError) as caught:
            await follow(script)
        assert (caught.value.status, script.answers) == (status, [])

    async def test_a_server_that_stays_away_is_given_up(self, follow: Follow, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(retries, "RECONNECTS", 3)
        script = Script(*[httpx.ConnectError("refused")] * 5)
        with pytest.raises(RopewayError) as caught:
            await follow(script)
        assert (caught.value.code, len(script.seen)) == ("connection_error", 4)


async def test_a_submission_that_is_sent_again_is_known_by_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "_backoff", lambda state: 0.0)
    keys: list[str] = []

    def answers(request: httpx.Request) -> httpx.Response:
        keys.append(request.headers["idempotency-key"])
        if len(keys) % 2:
            raise httpx.ReadError("the answer was lost")
        return httpx.Response(202, json=JOB)

    with Ropeway("http://fake", transport=httpx.MockTransport(answers)) as client:
        client.submit("perplexity")
    async with AsyncRopeway("http://fake", transport=httpx.MockTransport(answers)) as client:
        await client.submit("perplexity")
    assert keys[0] == keys[1] != keys[2] == keys[3]


@pytest.mark.slow
def test_a_job_is_followed_past_the_death_of_its_server(checkpoints: Path, tmp_path: Path) -> None:
    database = f"database_url=sqlite:///{tmp_path / 'jobs.db'}"
    with ExitStack() as servers:

        def start(name: str) -> tuple[Any, httpx.URL]:
            running, url = servers.enter_context(process(checkpoints / "tiny", database, log=tmp_path / name))
            return running, httpx.URL(url)

        running, here = start("first")

        def redirect(request: httpx.Request) -> None:
            request.url = request.url.copy_with(port=here.port)

        with Ropeway(str(here), event_hooks={"request": [redirect]}) as client:
            job = client.submit("perplexity", **LONG)
            items = []
            for item in client.follow(job.id):
                items.append(item)
                if isinstance(item, UnitDone) and item.number == 1:
                    running.kill()
                    running.wait()
                    running, here = start("second")
            assert [unit.number for unit in units_of(items)] == [1, 2]
            assert isinstance(items[-1], JobInfo)
            assert (items[-1].state, items[-1].units_reused) == ("done", 0)
            assert client.result(job.id).numbers() == client.perplexity(**_measured(LONG)).numbers()


def _measured(fields: dict[str, Any]) -> dict[str, Any]:
    """The same for a route that answers when it is done, which reuses nothing."""
    return {name: value for name, value in fields.items() if name != "reuse"}
