"""The list of slow tests: made from a log of durations, and about tests that exist."""

from __future__ import annotations

import ast
from functools import cache

from tests import tiers
from tests.conftest import ROOT
from tests.methods import ROWS
from tests.patches.attention import test_scores

LOG = """
0.50s call     tests/a.py::test_one[x-1]
0.40s setup    tests/a.py::test_one[x-2]
0.70s call     tests/a.py::TestGroup::test_two
9.00s anything tests/a.py::test_three
"""


def test_cases_and_fixtures_of_a_function_add_up() -> None:
    assert tiers.slow(LOG.splitlines()) == ["tests/a.py::test_one"]


def test_comparisons_with_the_papers_are_in_the_fast_tier_whatever_their_time() -> None:
    """A new method with a wrong formula fails in `make test-fast`: one comparison has every row with an oracle."""
    (kept,) = tiers.KEPT
    assert tiers.slow([f"9.00s call     {kept}[yarn]"]) == []
    assert kept not in tiers.listed()
    file, _, function = kept.partition("::")
    assert function in functions(file)
    (marker,) = test_scores.test_attention_equals_the_paper.pytestmark
    assert [row.name for row in marker.args[1]] == [row.name for row in ROWS]


@cache
def functions(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_listed_test_exists() -> None:
    for name in tiers.listed():
        file, *_, function = name.split("::")
        assert function in functions(file), name
