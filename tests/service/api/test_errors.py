"""Words of an error for the client, and those that only the log has."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from service.api import errors
from service.api.errors import answer
from service.jobs.database.opening import StoreOutOfReach
from service.sharing.limits import LimitsOutOfReach


@pytest.mark.parametrize(
    ("kind", "code", "store"),
    [
        (StoreOutOfReach, "jobs_out_of_reach", "database of jobs"),
        (LimitsOutOfReach, "limits_out_of_reach", "shared store of limits"),
    ],
)
def test_only_the_log_says_where_a_store_is(
    kind: type[Exception], code: str, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[tuple[str, dict[str, Any]]] = []
    log = SimpleNamespace(warning=lambda event, **fields: logged.append((event, fields)))
    monkeypatch.setattr(errors, "log", log)
    why = "connection to server at 127.0.0.1, port 8790 failed: /secret/place"
    told = answer(kind(why))
    assert told.status_code == 503
    body = json.loads(bytes(told.body))["error"]
    assert (body["code"], body["message"]) == (code, f"the {store} is out of reach: try again")
    assert logged == [("request_failed", {"code": code, "error": why})]
