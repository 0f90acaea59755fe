"""The table of perplexities in the cards of the demo models."""

from __future__ import annotations

from benchmarks.quality.demo_table import perplexity_markdown
from tests.service.results import result_of

RESULT = result_of({"default": [6.5, 70.25, 81234.5], "yarn(factor=4)": [6.75, 7.0, 7.5]}, [256, 512, 1024])


def test_has_methods_as_rows_and_lengths_as_columns_with_the_best_in_bold() -> None:
    assert perplexity_markdown(RESULT).splitlines() == [
        "| method | 256 | 512 | 1,024 |",
        "| --- | ---: | ---: | ---: |",
        "| default | **6.500** | 70.25 | 81,234 |",
        "| yarn(factor=4) | 6.750 | **7.000** | **7.500** |",
    ]


def test_names_the_model_that_answered_instead() -> None:
    result = result_of({"alibi": [6.5]}, [256], models={"alibi": "tiny-alibi"})
    assert "| alibi on tiny-alibi |" in perplexity_markdown(result)


def test_escapes_the_column_separator() -> None:
    rows = perplexity_markdown(result_of({"a|b": [6.5]}, [256])).splitlines()
    assert rows[-1] == r"| a\|b | **6.500** |"
