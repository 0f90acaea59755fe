"""Tables at 80 columns: names stay in one piece, numbers too, and no word is cropped."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from rich.table import Table
from rich.text import Text

from service.cli.shared.terminal import new_table, print_table, stdout
from service.client import Ropeway
from service.evaluation.scores import Overview
from service.reports.terminal import table_of
from service.settings import Settings
from tests.service.cli.shell import ropeway

NAME = "ropeway-demo-alibi-of-many-words"


@pytest.fixture(autouse=True)
def _narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stdout, "_width", 80)


def printed(table: Table, capsys: pytest.CaptureFixture[str]) -> str:
    print_table(table)
    shown = capsys.readouterr().out
    assert all(len(line) <= 80 for line in shown.splitlines())
    return shown


def test_settings_crop_no_word() -> None:
    words = set(re.split(r"\s", ropeway("serve", "--settings").stdout))
    assert set(Settings.model_fields) <= words
    for field in Settings.model_fields.values():
        assert {word for word in (field.description or "").split() if len(word) < 18} <= words


def test_names_and_numbers_stay_whole(capsys: pytest.CaptureFixture[str]) -> None:
    table = new_table("model", "parameters", "device", "engine", numbers=("parameters",))
    table.add_row(NAME, "8,030,261,248", "cpu float32", "paged, recorded steps, and more words than fit into a line")
    shown = printed(table, capsys)
    assert NAME in shown
    assert "8,030,261,248" in shown


def test_a_name_without_room_is_folded(capsys: pytest.CaptureFixture[str]) -> None:
    table = new_table("model", "parameters", "device", numbers=("parameters",))
    table.add_row("x" * 70, "8,030,261,248", "cpu float32")
    shown = printed(table, capsys)
    assert shown.count("x") == 70
    assert "8,030,261,248" in shown


@pytest.mark.parametrize("caption", ["a [word] " * 12, Text("a [word] " * 12)], ids=type)
def test_a_caption_below_a_narrow_table_has_the_width_of_the_terminal(
    caption: str | Text, capsys: pytest.CaptureFixture[str]
) -> None:
    table = new_table("model", "tokens")
    table.add_row("tiny", "8")
    table.caption = caption
    lines = [line.strip() for line in printed(table, capsys).splitlines()[-2:]]
    assert lines == [" ".join(["a [word]"] * 9), " ".join(["a [word]"] * 3)]


def test_encodings_of_a_recommendation_stay_whole(capsys: pytest.CaptureFixture[str]) -> None:
    name = "self_extend(group_size=4)"
    row = [name, "1,234.5", "100 %", "0.123", "32", "as good as the best, and cheaper"]
    columns = ["method", "perplexity", "recall", "above", "windows", "verdict"]
    result: Any = SimpleNamespace(overview=lambda: Overview(columns, [row], frozenset(), ""))
    shown = printed(table_of(result, 80), capsys)
    assert all(cell in shown for cell in row[:-1])


def test_models_are_listed_with_their_variants(server: str) -> None:
    shown = ropeway("models", "--server", server).stdout
    assert "variant of tiny for alibi: tiny-alibi" in shown


def test_models_are_listed_with_their_products_and_the_reason_of_a_slower_engine(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Ropeway(server) as client:
        tiny, other = client.models()
    tiny.products = ["192x448: by_groups up to 1, by_onednn", "448x192: by_onednn"]
    tiny.engine_reason, other.engine_reason = None, "[pages] cannot cache it"
    other.products = []
    monkeypatch.setattr(Ropeway, "models", lambda client: [tiny, other])
    assert not re.search("(products|memory) of", ropeway("models", "--server", server).stdout)
    shown = " ".join(ropeway("models", "--verbose", "--server", server).stdout.split())
    assert f"engine of {other.id}: [pages] cannot cache it" in shown
    assert f"products of {tiny.id}: {'; '.join(tiny.products)}" in shown
    assert (shown.count("engine of"), shown.count("products of")) == (1, 1)
    weights, cache = tiny.memory.weights >> 20, tiny.memory.cache >> 20
    assert f"memory of {tiny.id}: weights {weights} MiB, cache {cache} MiB" in shown
