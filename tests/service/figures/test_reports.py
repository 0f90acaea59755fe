"""The report of a result as one page: complete, escaped, alone."""

from __future__ import annotations

import base64
import hashlib
import html
import io
import json
import re
from datetime import UTC, datetime
from functools import cache

import pytest
from matplotlib.image import imread
from plotly.io.json import to_json_plotly
from pydantic import TypeAdapter

from service.api.pages import page, plotly_for
from service.evaluation.answers import AnyResult
from service.evaluation.results import EvaluationResult
from service.figures import pictures_of
from service.jobs.records import JobInfo
from service.reports.html import report_of
from service.reports.words import words_of
from tests.service.figures import examples
from tests.service.figures.examples import EVERY, figures_of, pictures

READ: TypeAdapter[EvaluationResult] = TypeAdapter(AnyResult)
ATTACK = "</script><script>alert(1)</script><img src=x onerror='alert(2)'>"


@cache
def report(evaluation: str) -> str:
    return report_of(EVERY[evaluation]())


def visible(text: str) -> str:
    """The page without scripts, styles and data."""
    text = re.sub(r"<(script|style)\b.*?</\1>", "", text, flags=re.DOTALL)
    return re.sub(r'(src|href)="data:[^"]*"', r"\1", text)


class TestEveryEvaluation:
    @pytest.mark.parametrize("evaluation", EVERY)
    def test_has_every_number_in_full(self, evaluation: str) -> None:
        shown = re.findall(r"<t[dh](?: [^>]*)?>(.*?)</t[dh]>", report(evaluation).rpartition("Every number")[2])
        result = EVERY[evaluation]()
        rows = result.rows()
        keys = [key.replace("_", " ") for key in rows[0]]
        values = [
            "" if v is None else repr(v) if isinstance(v, float) else str(v) for row in rows for v in row.values()
        ]
        assert [html.unescape(text) for text in shown] == [*keys, *values]

    @pytest.mark.parametrize("evaluation", EVERY)
    def test_has_every_picture_alive_still_and_as_numbers(self, evaluation: str) -> None:
        text, drawn = report(evaluation), pictures(evaluation)
        assert len(re.findall(r'<div id="figure-\d+"', text)) == len(drawn)
        alive = figures_of(text)
        assert list(alive) == [f"figure-{index}" for index in range(len(drawn))]
        for figure, picture in zip(alive.values(), drawn, strict=True):
            assert figure["data"] == json.loads(to_json_plotly(picture.figure.to_plotly_json()["data"]))
        stills = re.findall(r'<img src="data:image/png;base64,([^"]+)" alt="([^"]*)">', text)
        assert [html.unescape(alt) for _, alt in stills] == [picture.title for picture in drawn]
        assert imread(io.BytesIO(base64.b64decode(stills[0][0]))).shape[1] >= 1000
        tables = re.findall(r'href="data:text/csv;charset=utf-8;base64,([^"]+)"', text)
        assert [base64.b64decode(table).decode() for table in tables] == [picture.csv() for picture in drawn]

    @pytest.mark.parametrize("evaluation", EVERY)
    def test_begins_with_the_answer(self, evaluation: str) -> None:
        paragraphs = re.findall(r"<p>(.*?)</p>", report(evaluation).partition("</header>")[0])
        assert [html.unescape(text) for text in paragraphs] == words_of(EVERY[evaluation]())

    @pytest.mark.parametrize("evaluation", EVERY)
    def test_loads_nothing(self, evaluation: str) -> None:
        text = report(evaluation)
        assert text.count("plotly.js v") == 1
        seen = visible(text)
        assert "http://" not in seen
        assert "https://" not in seen
        assert re.findall(r"<(?:link|iframe|object|embed|form|base)\b", seen) == []
        assert re.findall(r"<[^>]*\son\w+=", seen) == []
        assert re.findall(r"(?:src|href)=", seen) == [], "whatever is not data in the page"


class TestContents:
    def test_what_comes_from_a_request_is_escaped(self) -> None:
        result = examples.perplexity([ATTACK, "default"], documents=[ATTACK])
        result.model = ATTACK
        text = report_of(result, body={"input": ATTACK})
        assert "<script>alert" not in text
        assert "<img src=x" not in text
        ours = ["plotly.js", "colours in the dark", "the script that draws"]
        assert text.count("<script") == text.count("</script>") == len(pictures_of(result)) + len(ours)
        assert visible(text).count("&lt;script&gt;alert(1)") >= 5

    @pytest.mark.parametrize("standalone", [True, False])
    def test_scripts_may_run_under_the_servers_policy(self, standalone: bool) -> None:
        text = report_of(examples.ruler(), plotly=plotly_for(standalone))
        policy = page(text, standalone).headers["content-security-policy"]
        running = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
        hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in running]
        assert sorted(re.findall(r"'sha256-([^']+)'", policy)) == sorted(hashes)
        assert len(running) == (2 if standalone else 1)
        assert ("script-src 'self'" in policy) is not standalone
        assert "'unsafe-inline'" not in policy.partition("style-src")[0]

    def test_the_main_numbers_with_intervals_and_the_best_of_each_column(self) -> None:
        table = re.search(r"<table[^>]*>(.*?)</table>", report("perplexity"), re.DOTALL)
        assert table
        rows = re.findall(r"<tr>(.*?)</tr>", table[1])
        assert re.findall(r"<th[^>]*>([^<]*)", rows[0]) == ["method", "256", "512", "1,024", "2,048"]
        assert re.findall(r"<td[^>]*>([^<]*)", rows[1]) == ["6.500", "90.00", "300.0", "400.0"]
        assert re.findall(r'class="interval">([^<]*)', rows[1])[0] == "6.175 to 6.890"
        assert re.findall(r'<td class="best">([^<]*)', table[1]) == ["6.500", "7.110", "7.320", "7.530"]

    def test_nothing_is_best_where_all_are_equal(self) -> None:
        result = examples.passkey()
        for method in result.methods:
            for at in method.lengths:
                at.score = 0.0
        assert 'class="best"' not in report_of(result)

    def test_what_was_asked(self) -> None:
        asked = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", report("passkey")))
        assert asked["model"] == "tiny"
        assert asked["trained length"] == "256 tokens"
        assert asked["lengths"] == "256, 512, 1,024, 2,048"
        assert asked["depths"] == "0, 0.25, 0.5, 0.75, 1"
        assert "methods" not in asked
        asked = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", report("perplexity")))
        assert asked["documents"] == "python-reference (5,000 tokens, 15,000 bytes)"
        assert asked["protocol"] == "curve"

    def test_each_method_with_its_encoding(self) -> None:
        blocks = re.findall(r"<summary>(.*?)</summary>\s*<pre>(.*?)</pre>", report("ruler"), re.DOTALL)
        told = {html.unescape(label): json.loads(html.unescape(encoding)) for label, encoding in blocks}
        assert told == {method.label: method.pe for method in examples.ruler().methods}

    def test_a_job_brings_its_body_and_its_times(self) -> None:
        body = {"evaluation": "ruler", "tasks": ["vt"], "input": "a < b & c"}
        job = JobInfo(
            id="f" * 32,
            evaluation="ruler",
            model=None,
            state="done",
            created_at=datetime(2026, 1, 2, 3, 4, tzinfo=UTC),
            units_total=8,
            units_done=8,
            units_reused=3,
            tokens_total=4096,
            seconds=12.5,
            request=body,
        )
        text = report_of(examples.ruler(), job, include_text=True)
        shown = re.search(r"How to reproduce.*?<pre>(.*?)</pre>", text, re.DOTALL)
        assert shown
        assert json.loads(html.unescape(shown[1])) == body
        asked = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", text))
        assert asked["job"] == "f" * 32
        assert asked["units"] == "8, of which 3 were known already"
        assert asked["measured in"] == "12.5 s"

    def test_without_a_body_it_says_so(self) -> None:
        assert "is not part of this result" in report("ruler")


@pytest.mark.parametrize("evaluation", examples.EVERY)
def test_every_result_is_the_same_after_json(evaluation: str) -> None:
    result = examples.EVERY[evaluation]()
    again = READ.validate_json(result.model_dump_json())
    assert again == result
    assert (again.rows(), again.numbers()) == (result.rows(), result.numbers())
    assert words_of(again) == words_of(result)
