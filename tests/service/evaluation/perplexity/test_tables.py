"""Tables of a perplexity result: every number is there, in the right cell, and safe to open."""

from __future__ import annotations

import csv
import io
import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from service.evaluation.formatting import short_number, spaced
from service.evaluation.long_perplexity.results import LongPerplexityResult
from service.evaluation.perplexity.results import PerplexityResult
from service.evaluation.tables import csv_of
from service.reports.numbers import summaries
from service.reports.terminal import BEST, table_of
from tests.service.figures.measured import long_perplexity
from tests.service.results import result_of

LENGTHS = [256, 512, 1024]
RESULT = result_of({"default": [6.5, 70.25, 81234.5], "yarn(factor=4)": [6.75, 7.0, 7.5]}, LENGTHS)


def printed(result: object, width: int = 100) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(result)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


class TestCsv:
    def rows(self) -> list[dict[str, str]]:
        return list(csv.DictReader(io.StringIO(csv_of(RESULT))))

    def test_has_one_row_per_method_and_length(self) -> None:
        keys = [(row["method"], int(row["length"])) for row in self.rows()]
        assert keys == [(method.label, length) for method in RESULT.methods for length in LENGTHS]

    def test_keeps_every_number_exactly(self) -> None:
        measured = [at for method in RESULT.methods for at in method.lengths]
        for row, at in zip(self.rows(), measured, strict=True):
            assert at.interval
            assert float(row["perplexity"]) == at.perplexity
            assert float(row["nll_sum"]) == at.nll_sum
            assert float(row["bits_per_byte"]) == at.bits_per_byte
            assert (float(row["interval_low"]), float(row["interval_high"])) == (at.interval.low, at.interval.high)
            assert int(row["tokens_scored"]) == at.tokens_scored

    def test_leaves_a_missing_interval_empty(self) -> None:
        text = csv_of(result_of({"default": [6.5]}, [256], kind=None))
        (row,) = csv.DictReader(io.StringIO(text))
        assert (row["interval_low"], row["interval_high"], row["interval_kind"]) == ("", "", "")

    @pytest.mark.parametrize("result", [RESULT, long_perplexity()], ids=["perplexity", "long_perplexity"])
    def test_has_the_parameters_of_the_protocol(self, result: PerplexityResult | LongPerplexityResult) -> None:
        tail = {"protocol": "tail", "parameters": {"stride": 256, "tail": 64, "windows": 8}, "bos": True}
        columns = ("protocol", "protocol_stride", "protocol_tail", "protocol_windows", "bos")
        for made, values in ((result, ["curve", "", "", "", "False"]),
                             (result.model_copy(update=tail), ["tail", "256", "64", "8", "True"])):  # fmt: skip
            row = next(csv.DictReader(io.StringIO(csv_of(made))))
            assert [row[name] for name in columns] == values

    @pytest.mark.parametrize("label", ["=1+1", "+1", "-1", "@SUM(A1)", "a,b", 'a"b', "a\nb"])
    def test_label_is_one_cell_and_never_a_formula(self, label: str) -> None:
        text = csv_of(result_of({label: [6.5]}, [256]))
        (row,) = csv.DictReader(io.StringIO(text, newline=""))
        assert row["method"].removeprefix("'") == label
        assert not row["method"].startswith(("=", "+", "-", "@"))


class TestTerminal:
    def test_names_control_no_terminal(self) -> None:
        text = printed(table_of(result_of({"\x1b[31mred\n\x1b]0;title\x07": [7.0]}, [256]), 80))
        assert "[31mred ]0;title" in text
        assert not {"\x1b", "\x07"} & set(text)

    def test_shows_every_number(self) -> None:
        text = " ".join(printed(table_of(RESULT, 80)).split())
        for word in ("default", "yarn(factor=4)", "1,024", "6.500", "70.25", "81,234", "trained length 256"):
            assert word in text

    def test_many_lengths_fit_in_80_columns_and_say_what_is_left_out(self) -> None:
        lengths = list(range(256, 256 * 257, 256))
        text = printed(table_of(result_of({"default": [7.0] * 256}, lengths), 80), width=80)
        shown = next(line for line in text.splitlines() if "method" in line).split()[1:]
        assert shown[0] == "256"
        assert shown[-1] == "65,536"
        assert f"{256 - len(shown)} more measured" in " ".join(text.split())
        assert max(map(len, text.splitlines())) <= 80

    def test_intervals_are_below_the_numbers(self) -> None:
        lines = printed(table_of(RESULT, 80), width=80).splitlines()
        row = next(at for at, line in enumerate(lines) if line.strip().startswith("default"))
        assert lines[row].split() == ["default", "6.500", "70.25", "81,234"]
        assert lines[row + 1].split() == ["[6.17,", "6.89]", "[66.7,", "74.5]", "[77,173,", "86,109]"]
        assert "below: 95 % interval over quarters of the document" in " ".join(" ".join(lines).split())

    def test_without_room_a_table_names_the_place_of_its_intervals(self) -> None:
        text = printed(table_of(result_of({"default": [7.0] * 7}, [256 << n for n in range(7)]), 80), width=80)
        assert "[" not in text
        assert "95 % interval over quarters of the document: in --csv" in " ".join(text.split())

    def test_without_intervals_a_table_gives_the_reason(self) -> None:
        text = printed(table_of(result_of({"default": [7.0]}, [256], kind=None), 80))
        assert "too few documents or tokens for an interval" in " ".join(text.split())
        assert "--csv" not in text

    @pytest.mark.parametrize(
        ("scores", "best"),
        [([6.5, 7.0, 6.5 * (1 + 1e-8)], {0, 2}), ([6.5, 6.5 * (1 + 1e-8)], set()), ([6.5], {0}), ([7.0, 6.5], {1})],
    )
    def test_the_best_is_the_same_up_to_rounding_in_a_terminal_and_in_a_report(
        self, scores: list[float], best: set[int]
    ) -> None:
        result = result_of({str(row): [score] for row, score in enumerate(scores)}, [256])
        column = table_of(result, 80).columns[1]
        assert {row for row, cell in enumerate(column.cells) if str(getattr(cell, "style", "")) == BEST} == best
        assert {row for row, (_, cells) in enumerate(summaries(result)[0].rows) if cells[0].is_best} == best

    def test_markup_in_a_label_is_shown_as_it_is(self) -> None:
        assert "[red]x[/red]" in printed(table_of(result_of({"[red]x[/red]": [6.5]}, [256]), 80))

    def test_heading_names_model_protocol_and_documents(self) -> None:
        result = result_of({"default": [6.5]}, [256], documents=["a.txt", "b.txt", "c.txt", "d.txt"])
        for word in ("tiny", "curve", "a.txt, b.txt, c.txt and 1 more", "20,000 tokens"):
            assert word in result.heading()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((1.0, "1.000"), (9.8765, "9.877"), (45.678, "45.68"), (812.34, "812.3"), (56789.4, "56,789")),
        *((9.9996, "10.00"), (99.996, "100.0"), (999.96, "1,000"), (999_999.7, "1.0e+06"), (1.2e9, "1.2e+09")),
    ],
)
def test_short_number(value: float, text: str) -> None:
    assert short_number(value) == text


@given(
    st.sets(st.integers(2, 1 << 20), min_size=1, max_size=256).map(sorted),
    st.integers(1, 1 << 20),
    st.integers(2, 16),
)
def test_spaced_lengths_keep_both_ends_and_their_distance(lengths: list[int], trained: int, most: int) -> None:
    chosen = spaced(lengths, trained, most)
    assert chosen == sorted(set(chosen) & set(lengths))
    assert len(chosen) <= most
    assert (chosen[0], chosen[-1]) == (lengths[0], lengths[-1])
    gap = math.log2(lengths[-1] / lengths[0]) / (most - 1)
    assert all(math.log2(b / a) >= gap * 0.999 for a, b in pairwise(chosen))
