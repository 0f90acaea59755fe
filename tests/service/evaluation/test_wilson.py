"""Wilson's interval: its ends are 1.96 deviations away from the share."""

from __future__ import annotations

import math

import pytest

from service.evaluation.statistics.proportion import wilson


@pytest.mark.parametrize(("successes", "trials"), [(0, 9), (1, 9), (50, 100), (99, 100), (9, 9)])
def test_wilson_ends_where_the_share_is_1_96_deviations_away(successes: int, trials: int) -> None:
    interval, share = wilson(successes, trials), successes / trials
    assert 0 <= interval.low <= share <= interval.high <= 1
    for end in (interval.low, interval.high):
        if end not in (0.0, 1.0):
            deviations = abs(share - end) / math.sqrt(end * (1 - end) / trials)
            assert deviations == pytest.approx(1.959964, rel=1e-5)
    assert (interval.low == 0) == (successes == 0)
    assert (interval.high == 1) == (successes == trials)


def test_wilson_refuses_what_is_no_share() -> None:
    for successes, trials in ((0, 0), (5, 4), (-1, 4)):
        with pytest.raises(ValueError, match="trials"):
            wilson(successes, trials)
