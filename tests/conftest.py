"""Fixtures of the whole suite."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import certifi
import httpx
import pytest
import structlog
from hypothesis import HealthCheck, settings

from service.machine.heap import frozen
from tests import tiers
from tests.forks import worker
from tests.forks.process import folder_of_parent

ROOT = Path(__file__).resolve().parent.parent

settings.register_profile("ropeway", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ropeway")


LONG = (
    *("tests/service/docs/test_readme.py", "tests/service/docs/test_notebook.py", "tests/benchmarks/"),
    *("tests/service/ui/test_looks.py", "tests/service/ui/test_generate.py", "tests/service/ui/test_links.py"),
)
"""Half a minute and more each. They begin first, so that no worker ends with one while the others are idle."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--screenshots", metavar="FOLDER", help="folder for pictures of the page at /ui")


def pytest_configure(config: pytest.Config) -> None:
    """Servers on threads log while other tests run. A stream that one of them captures closes at its end."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.__stderr__))


def pytest_xdist_setupnodes(specs: list[Any]) -> None:
    """On Linux, workers are forks of a process that has the libraries; elsewhere such a fork may not use them.

    With a card neither. A library asks for it at import, and a fork of a process that did has none.
    """
    if sys.platform != "linux" or Path("/dev/nvidiactl").exists():
        return
    folder_of_parent()
    for spec in specs:
        spec.python = f"{sys.executable} {worker.__file__}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    slow = tiers.listed()
    for item in items:
        if item.nodeid.partition("[")[0] in slow:
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))


FROZEN = frozen()
"""Until the process ends."""


def pytest_collection_finish() -> None:
    """Frozen objects, here all tests and libraries, cost the collection of garbage no time.

    Engines of transformers collect it twice when they stop, for the memory of a GPU. Each also reads the map of all
    memory, to learn the nodes that it may use: they stay.
    """
    FROZEN.__enter__()
    if memory := sys.modules.get("transformers.generation.continuous_batching.utils"):
        memory._get_allowed_numa_nodes = cache(memory._get_allowed_numa_nodes)
    if engines := sys.modules.get("transformers.generation.continuous_batching.continuous_api"):
        engines.gc = SimpleNamespace(collect=lambda: None)


@pytest.fixture(scope="module", autouse=True)
def _freeze() -> None:
    """Freeze the objects that earlier files left behind: schemas alone cost every later engine ten seconds."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Servers of the tests, in this process or another, leave the user's jobs alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROPEWAY_DATABASE_URL", f"sqlite:///{tmp_path_factory.mktemp('jobs') / 'ropeway.db'}")
        yield


@pytest.fixture(scope="session", autouse=True)
def _patience() -> Iterator[None]:
    """More than httpx's 5 s, which an answer may take while several workers share two cores."""
    default = httpx._config.DEFAULT_TIMEOUT_CONFIG
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(default, "read", 60.0)
        patch.setattr(default, "connect", 60.0)
        yield


@pytest.fixture(scope="session", autouse=True)
def _one_certificate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Each HTTP client reads all certificates of the web, in 20 ms. The servers of the tests have none."""
    certificate, end, _ = certifi.contents().partition("-----END CERTIFICATE-----\n")
    file = tmp_path_factory.mktemp("certificates") / "one.pem"
    file.write_text(certificate + end)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(file))
        yield


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of golden vectors, models and texts beside the repository; skips where it is absent."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip(f"no folder {folder.name!r} beside the repository: golden vectors and models live there")
    return folder
