"""Values of settings that are refused at start, with the name of the setting and what is allowed."""

from __future__ import annotations

from typing import Any

import pytest

from service.cli.server import StartFailed, settings_with
from service.settings import Settings


def refusal(**given: Any) -> str:
    """The line of a start that these settings stop."""
    with pytest.raises(StartFailed) as refused:
        settings_with(**given)
    return str(refused.value)


@pytest.mark.parametrize(("size", "allowed"), [(3, "greater than or equal to 4"), (1025, "less than or equal to 1024")])
def test_a_page_has_a_least_and_a_largest_size(size: int, allowed: str) -> None:
    assert refusal(page_size=size) == f"ROPEWAY_PAGE_SIZE: Input should be {allowed}"


def test_a_page_is_no_larger_than_the_cache() -> None:
    assert refusal(cache_tokens=64, page_size=65).endswith("at most ROPEWAY_CACHE_TOKENS (64), not 65")
    assert Settings(_env_file=None, cache_tokens=64, page_size=64).page_size == 64
