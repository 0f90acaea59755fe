"""Ten tenants attack at once for a few seconds: the checks of the siege, without its timings."""

from __future__ import annotations

import pytest

from benchmarks import siege


@pytest.mark.slow
def test_attackers_make_no_answer_wrong_and_no_server_fail() -> None:
    rows = {what: (value, goal) for what, value, goal, _ in siege.run(quick=True).rows}
    exact = {what: value for what, (value, goal) in rows.items() if goal in ("0", "equal")}
    assert exact == {
        "probes not answered with 200": "0",
        "a job that ran meanwhile, against the same job alone": "equal",
        "5xx other than 503 and 504": "0",
    }
    most, bound = rows["most resident memory, children included"]
    assert float(most.split()[0]) < float(bound.split()[0])
    assert "seconds from SIGTERM to the end" in rows
