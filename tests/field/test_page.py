"""docs/architectures.md has a row for every type; a sample is measured again here, the whole by its command."""

from __future__ import annotations

import os
import time

import pytest
import transformers

from patches.model.architectures.table import ARCHITECTURES
from tests.architectures import FILE, HEAD, MEANINGS, NOTES, changes, document, line, lines_of
from tests.field.children import rows
from tests.field.configurations import TYPES, VARIANTS, WITH_IMAGES
from tests.field.measurement import RESULTS, Row, measure

PAGE = FILE.read_text(encoding="utf-8")
SAMPLE = TYPES[5::32]

of_this_version = pytest.mark.skipif(
    f"transformers {transformers.__version__}:" not in PAGE,
    reason="the page is of another version of transformers: python -m tests.architectures",
)


@of_this_version
def test_every_type_has_a_row_and_none_is_wrong() -> None:
    found = lines_of(PAGE)
    assert set(found) - {*WITH_IMAGES} == {*TYPES, *VARIANTS}
    assert not [name for name in WITH_IMAGES if f"`{name}`" not in PAGE]
    assert not [entry for entry in found.values() if entry.startswith("Wrong")]


@of_this_version
def test_the_head_is_what_the_command_writes() -> None:
    assert PAGE.startswith(HEAD.format(version=transformers.__version__))
    assert NOTES in PAGE


@of_this_version
def test_types_with_an_entry_are_carried() -> None:
    assert not [name for name in ARCHITECTURES if not lines_of(PAGE).get(name, "Carried").startswith("Carried")]


def test_the_counts_are_those_of_the_rows() -> None:
    found = [entry.partition(" |")[0] for name, entry in lines_of(PAGE).items() if name in TYPES]
    for result in RESULTS:
        count = found.count(result.capitalize())
        assert (f"| {result} | {count} | {MEANINGS[result]} |" in PAGE) == (count > 0), result


@pytest.mark.slow
@of_this_version
@pytest.mark.parametrize("name", SAMPLE)
def test_a_row_is_what_is_measured(name: str) -> None:
    """On any processor: the last bit is that of the one that made the page."""
    row = measure(name)
    measured, written = f"{row.result.capitalize()} {line(row)}", lines_of(PAGE)[name]
    assert measured.replace("to the bit", "within 5e-6") == written.replace("to the bit", "within 5e-6")


def test_changes_name_each_type_that_differs() -> None:
    carried, refused = (
        Row("a", "carried", "", "plain RoPE", "every layer", "half-split", "to the bit"),
        Row("b", "refused", "x|y"),
    )
    before, after = document([carried, refused]), document([carried, Row("b", "refused", "z"), Row("c", "wrong", "w")])
    assert changes(before, before) == []
    assert changes(before, after) == [
        "- Refused | `b` | X\\|y |",
        "+ Refused | `b` | Z |",
        "+ Wrong | `c` | W |",
    ]


def hangs_crashes_or_measures(name: str) -> Row:
    if name == "hangs":
        time.sleep(600)
    if name == "crashes":
        os._exit(3)
    return Row(name, "carried")


@pytest.mark.slow
def test_a_child_that_hangs_costs_its_own_row_only() -> None:
    (row,) = rows(["hangs"], processes=1, limit_s=1.0, measure=hangs_crashes_or_measures)
    assert row == Row("hangs", "wrong", "no result within 1 s")


@pytest.mark.slow
def test_a_child_that_crashes_costs_its_own_row_only() -> None:
    found = {row.name: row for row in rows(["a", "crashes", "b"], processes=2, measure=hangs_crashes_or_measures)}
    assert [found[name].result for name in ("a", "crashes", "b")] == ["carried", "wrong", "carried"]
    assert found["crashes"].reason == "its process was killed, or ran out of memory"
