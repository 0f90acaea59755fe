"""Results of several jobs beside each other, over HTTP."""

from __future__ import annotations

import csv
import io

import httpx
import pytest

from tests.service.jobs.test_routes import ended, submitted


@pytest.fixture
def jobs(client: httpx.Client) -> list[str]:
    """Two of perplexity; the second one has a method more and a length less."""
    first = submitted(client)
    second = submitted(client, methods=["default", "yarn:4", "ntk:4"], lengths=[64])
    return [ended(client, job["id"])["id"] for job in (first, second)]


def refusal(client: httpx.Client, jobs: list[str], **query: str) -> tuple[int, str | None, str]:
    answer = client.get(f"/comparisons/{','.join(jobs)}/results.json", params=query)
    error = answer.json()["error"]
    return answer.status_code, error["param"], error["message"]


def test_a_comparison_has_every_method_and_its_partner(client: httpx.Client, jobs: list[str]) -> None:
    answer = client.get(f"/comparisons/{','.join(jobs)}/results.json", params={"names": "a,b"})
    assert answer.status_code == 200, answer.text
    result = answer.json()
    partners = {method["name"]: method["partner"] for method in result["methods"]}
    assert partners == {
        "default (a)": None,
        "yarn(factor=4) (a)": None,
        "default (b)": "default (a)",
        "yarn(factor=4) (b)": "yarn(factor=4) (a)",
        "ntk(factor=4) (b)": None,
    }
    own = client.get(f"/jobs/{jobs[0]}/results.json").json()
    assert [at["value"] for method in result["methods"][:2] for at in method["lengths"]] == [
        at["perplexity"] for method in own["methods"] for at in method["lengths"]
    ]
    assert [source["id"] for source in result["sources"]] == jobs
    assert result["methods"][2]["lengths"][0]["change"]["verdict"] == "equal"


def test_a_comparison_has_the_files_of_a_job(client: httpx.Client, jobs: list[str]) -> None:
    path = f"/comparisons/{','.join(jobs)}"
    rows = list(csv.DictReader(io.StringIO(client.get(f"{path}/results.csv").text)))
    assert len(rows) == 2 * 2 + 3
    pictures = [client.get(f"{path}/plot.svg", params=query).text for query in ({}, {"picture": "change"})]
    assert "Perplexity by context length" in pictures[0]
    assert f"Perplexity against {jobs[0][:8]}" in pictures[1]
    assert client.get(f"{path}/plot.png").content.startswith(b"\x89PNG")
    figures = client.get(f"{path}/figures.json").json()
    assert [figure["name"] for figure in figures["figures"]] == ["comparison", "change"]
    page = client.get(f"{path}/report.html")
    assert "How to reproduce" not in page.text
    assert figures["words"][1].partition(":")[0] in page.text


def test_methods_of_one_job_are_beside_its_own_encoding(client: httpx.Client, jobs: list[str]) -> None:
    path = f"/comparisons/{jobs[0]}/results.json"
    for query, partners in (({}, [None, "default"]), ({"baseline": "yarn:4"}, ["yarn(factor=4)", None])):
        result = client.get(path, params=query).json()
        assert [method["partner"] for method in result["methods"]] == partners
    figures = client.get(f"/jobs/{jobs[0]}/figures.json").json()["figures"]
    assert "change" in [figure["name"] for figure in figures]


def test_an_empty_name_is_the_default(client: httpx.Client, jobs: list[str]) -> None:
    for names in (None, ",", "before,", " , after"):
        query = {} if names is None else {"names": names}
        answer = client.get(f"/comparisons/{','.join(jobs)}/results.json", params=query)
        assert answer.status_code == 200, answer.text
        given = [name.strip() for name in (names or ",").split(",")]
        expected = [name or job[:8] for name, job in zip(given, jobs, strict=True)]
        assert [source["name"] for source in answer.json()["sources"]] == expected


def test_what_is_not_comparable_is_refused_by_name(client: httpx.Client, jobs: list[str]) -> None:
    other = ended(client, submitted(client, protocol="tail", tail=8)["id"])["id"]
    assert refusal(client, [jobs[0], other])[:2] == (400, "jobs")
    assert "protocol is curve in" in refusal(client, [jobs[0], other])[2]
    assert refusal(client, jobs, baseline="alibi")[:2] == (400, "baseline")
    assert refusal(client, jobs, names="a")[:2] == (400, "names")
    single = ended(client, submitted(client, methods=["default"])["id"])["id"]
    assert refusal(client, [single])[:2] == (400, "jobs")
    assert refusal(client, jobs * 5)[2] == "jobs: must be 1 to 8 ids with single commas between, and 10 are given"
    assert refusal(client, [jobs[0], "0" * 32])[0] == 404
    answer = client.get(f"/comparisons/{','.join(jobs)}/plot.svg", params={"picture": "none"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "picture")
