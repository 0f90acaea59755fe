"""The report of a result as one page: complete, escaped, alone."""

from __future__ import annotations

import base64
import hashlib
import html
import io
import json
import re

import pytest
from matplotlib.image import imread
from plotly.io.json import to_json_plotly
from pydantic import TypeAdapter

from service.evaluation.catalogue import any_result
from service.evaluation.perplexity.results import PerplexityResult
from service.evaluation.results import EvaluationResult
from service.figures import pictures_of
from service.figures.web.page import PLOTLY_FROM_A_PAGE
from service.reports.forms import policy_of
from service.reports.html import report_of
from service.reports.numbers import columns_left_out
from tests.service.figures import examples
from tests.service.figures.examples import EVERY, figures_of, job_of, pictures, report
from tests.service.results import result_of

READ: TypeAdapter[EvaluationResult] = TypeAdapter(any_result())
ATTACK = "</script><script>alert(1)</script><img src=x onerror='alert(2)'>"


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
        written = [html.unescape(re.sub("</?code>", "`", text)) for text in paragraphs]
        assert written == EVERY[evaluation]().words()

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
        text = report_of(result, job_of({"input": ATTACK}))
        assert "<script>alert" not in text
        assert "<img src=x" not in text
        ours = ["plotly.js", "colours in the dark", "the script that draws"]
        assert text.count("<script") == text.count("</script>") == len(pictures_of(result)) + len(ours)
        assert visible(text).count("&lt;script&gt;alert(1)") >= 5

    @pytest.mark.parametrize("standalone", [True, False])
    def test_scripts_may_run_under_the_servers_policy(self, standalone: bool) -> None:
        text = report_of(examples.ruler(), plotly=None if standalone else PLOTLY_FROM_A_PAGE)
        policy = policy_of(standalone)
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

    @pytest.mark.parametrize("evaluation", EVERY)
    def test_has_one_main_part_and_the_keyboard_reaches_all_that_scrolls(self, evaluation: str) -> None:
        text = visible(report(evaluation))
        assert text.count("<main>") == text.count("</main>") == 1
        scrolling = re.findall(r'<(?:pre|div class="table")([^>]*)>', text)
        assert len(scrolling) > 2
        assert all(re.search(r'tabindex="0" role="region" aria-label(ledby)?="[^"]+"', one) for one in scrolling)

    def test_each_method_with_its_encoding(self) -> None:
        blocks = re.findall(r"<summary>(.*?)</summary>\s*<pre [^>]*>(.*?)</pre>", report("ruler"), re.DOTALL)
        told = {html.unescape(label): json.loads(html.unescape(encoding)) for label, encoding in blocks}
        assert told == {method.label: method.pe for method in examples.ruler().methods}

    def test_a_job_brings_its_body_and_its_times(self) -> None:
        body = {"evaluation": "ruler", "tasks": ["vt"], "input": "a < b & c"}
        text = report_of(examples.ruler(), job_of(body), include_text=True)
        shown = re.search(r"How to reproduce.*?<pre [^>]*>(.*?)</pre>", text, re.DOTALL)
        assert shown
        assert json.loads(html.unescape(shown[1])) == body
        asked = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", text))
        assert asked["job"] == "f" * 32
        assert asked["units"] == "8, of which 3 were not measured again"
        assert asked["measured in"] == "12.5 s"

    def test_a_job_that_measured_nothing_says_so(self) -> None:
        job = job_of({}).model_copy(update={"units_reused": 8, "seconds": 0.0})
        asked = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", report_of(examples.ruler(), job)))
        assert asked["measured in"] == "no time: every unit was known already"

    def test_without_a_body_it_says_so(self) -> None:
        assert "is not part of this result" in report_of(examples.ruler())


MANY_LENGTHS = tuple(range(64, 64 * 131, 64))


@pytest.fixture(scope="module")
def large() -> PerplexityResult:
    """40 methods by 130 lengths."""
    curves = {f"yarn(factor={n})": [6.0 + n + length / 1e4 for length in MANY_LENGTHS] for n in range(1, 41)}
    return result_of(curves, MANY_LENGTHS)


@pytest.fixture(scope="module")
def large_page(large: PerplexityResult) -> str:
    return report_of(large, job_of({}), plotly=PLOTLY_FROM_A_PAGE)


class TestLarge:
    def test_the_table_of_every_number_ends_and_says_where_the_rest_is(self, large_page: str) -> None:
        every = large_page.partition("Every number</h2>")[2]
        assert "The first 1,000 of 5,200 rows, full precision" in every
        assert every.partition("<tbody>")[2].count("<tr>") == 1000
        assert re.findall(r'href="([^"]+)"', every) == ["results.csv", "results.json"]

    def test_the_table_by_length_has_some_of_them_with_both_ends(self, large_page: str) -> None:
        row, *_ = re.findall(r'<th scope="col">method</th>(.*?)</tr>', large_page.partition("<h2>Pictures")[0])
        shown = [int(text.replace(",", "")) for text in re.findall(r'<th scope="col">([^<]+)</th>', row)]
        assert len(shown) == 16
        assert (shown[0], shown[-1]) == (MANY_LENGTHS[0], MANY_LENGTHS[-1])
        assert "16 of 130 columns are shown" in large_page
        assert columns_left_out(result_of({"default": [6.0] * 16}, MANY_LENGTHS[:16])) == ""

    def test_numbers_of_a_picture_that_are_too_many_stay_out(self, large_page: str) -> None:
        assert "data:text/csv" not in large_page
        assert "Its numbers are too many for this page" in large_page

    def test_a_page_that_travels_names_the_files_and_links_nothing(self, large: PerplexityResult) -> None:
        every = report_of(large, job_of({})).partition("Every number</h2>")[2]
        assert f"<code>/jobs/{'f' * 32}/results.csv</code>" in every
        assert "href=" not in every

    def test_the_page_is_a_fraction_of_the_result(self, large: PerplexityResult, large_page: str) -> None:
        without_stills = re.sub(r'src="data:image/png[^"]*"', "", large_page)
        assert len(without_stills) < 0.5 * len(large.model_dump_json())


@pytest.mark.parametrize("evaluation", examples.EVERY)
def test_every_result_is_the_same_after_json(evaluation: str) -> None:
    result = examples.EVERY[evaluation]()
    again = READ.validate_json(result.model_dump_json())
    assert again == result
    assert (again.rows(), again.numbers()) == (result.rows(), result.numbers())
    assert again.words() == result.words()
