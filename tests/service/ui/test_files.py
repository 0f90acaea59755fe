"""The files of the page over HTTP: addresses, caching, size; the build is that of the sources."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from urllib.parse import urljoin

import httpx
import pytest

from tests.conftest import ROOT
from tests.service.serving import serving

SOURCES, BUILT = ROOT / "service/ui/source", ROOT / "service/ui/built"


def test_the_root_leads_to_the_page(client: httpx.Client) -> None:
    for path in ("/", "/ui"):
        answer = client.get(path)
        assert (answer.status_code, answer.headers["location"]) == (307, "ui/")
    assert client.get("/", follow_redirects=True).headers["content-type"].startswith("text/html")


def test_the_page_runs_its_own_script_alone(client: httpx.Client) -> None:
    page = client.get("/ui/")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'; script-src 'self';" in policy
    assert "connect-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "<script>" not in page.text
    for path in BUILT.iterdir():
        allowed = r"www\.w3\.org/|arxiv\.org/abs/"  # names of SVG, and links to papers: nothing is loaded from either
        assert not re.search(rf"https?://(?!{allowed})", path.read_text()) or path.name == "licenses.txt", path.name


def test_versions_are_kept_for_ever_and_the_page_is_asked_for_again(client: httpx.Client) -> None:
    page = client.get("/ui/")
    assert page.headers["cache-control"] == "no-cache"
    again = client.get("/ui/", headers={"If-None-Match": page.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    linked = re.findall(r'(?:src|href)="([^"]*\?v=[^"]*)"', page.text)
    assert [link.partition("?")[0] for link in linked] == ["icon.svg", "app.css", "app.js"]
    for link in linked:
        found = client.get(urljoin("/ui/", link))
        assert found.status_code == 200
        assert found.headers["cache-control"] == "public, max-age=31536000, immutable"
        assert found.text == (BUILT / link.partition("?")[0]).read_text()
        assert client.get(urljoin("/ui/", link.partition("?")[0])).headers["cache-control"] == "no-cache"
    plain = client.get("/ui/app.js", headers={"Accept-Encoding": "identity"})
    assert "content-encoding" not in plain.headers
    assert plain.text == (BUILT / "app.js").read_text()


def test_the_first_load_is_small(client: httpx.Client) -> None:
    links = [
        "/ui/",
        *(urljoin("/ui/", link) for link in re.findall(r'(?:src|href)="([^"]*\?v=)', client.get("/ui/").text)),
    ]
    sizes = []
    for link in links:
        with client.stream("GET", link) as answer:
            sizes.append(sum(map(len, answer.iter_raw())))
    assert sum(sizes) < 100_000


@pytest.mark.parametrize("path", ["/ui/nothing.js", "/ui/../app.py", "/ui/%2e%2e/__init__.py", "/ui/a/b"])
def test_there_are_no_other_files(client: httpx.Client, path: str) -> None:
    assert client.get(path).status_code == 404


def test_the_page_is_open_where_keys_are_asked_for(checkpoints: Path) -> None:
    with serving(checkpoints, api_keys="ann-key") as (url, _):
        for path in ("/", "/ui", "/ui/", "/ui/app.js"):
            assert httpx.get(url + path).status_code in (200, 307)
        assert httpx.get(f"{url}/models").status_code == 401


def test_the_build_is_that_of_the_sources() -> None:
    """``make page`` after a change of the sources."""
    built = re.search(r"sources ([0-9a-f]{64})", (BUILT / "app.js").read_text())
    assert built
    hashed = hashlib.sha256()
    files = {path.relative_to(SOURCES).as_posix(): path for path in SOURCES.rglob("*") if path.is_file()}
    for name, path in sorted({**files, "figures.js": ROOT / "service/figures/web/figures.js"}.items()):
        hashed.update(f"{name}\n".encode() + path.read_bytes())
    assert built[1] == hashed.hexdigest()
