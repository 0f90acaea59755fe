"""Choices of products in the database: the first hold."""

from __future__ import annotations

import pytest
from structlog.testing import CapturingLogger

from service.jobs.database.opening import StoreOutOfReach
from service.jobs.storage import products
from service.jobs.storage.products import ProductMemory
from service.jobs.storage.store import JobStore

ONE, OTHER = ({"plain": [[1, name], [1 << 62, "plain"]], "packed": None} for name in ("by_groups", "by_columns"))


def test_the_first_choices_hold(store: JobStore) -> None:
    first, second = ProductMemory(store.database), ProductMemory(store.database)
    assert first.read(["a", "b"]) == {}
    assert first.keep({"a": ONE}) == {"a": ONE}
    assert second.keep({"a": OTHER, "b": OTHER}) == {"a": ONE, "b": OTHER}
    assert first.read(["a", "b", "c"]) == {"a": ONE, "b": OTHER}


def test_choices_timed_anew_replace_them_once(store: JobStore) -> None:
    """Two models of one start have the same ones."""
    ProductMemory(store.database).keep({"a": ONE})
    anew = ProductMemory(store.database, anew=True)
    assert anew.read(["a"]) == {}
    assert anew.keep({"a": OTHER}) == {"a": OTHER}
    assert anew.read(["a"]) == {"a": OTHER}
    assert anew.keep({"a": ONE}) == {"a": OTHER}
    assert ProductMemory(store.database).read(["a"]) == {"a": OTHER}


def test_without_the_database_a_server_has_its_own(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    log = CapturingLogger()
    monkeypatch.setattr(products, "log", log)

    def fails() -> None:
        raise StoreOutOfReach("gone")

    monkeypatch.setattr(store.database, "reading", fails)
    monkeypatch.setattr(store.database, "writing", fails)
    memory = ProductMemory(store.database)
    assert memory.read(["a"]) == {}
    assert memory.keep({"a": ONE}) == {"a": ONE}
    assert [call.args for call in log.calls] == [("products_not_read",), ("products_not_kept",)]
