"""Any result as a file of a table."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from service.evaluation.results import EvaluationResult, Row


def csv_of(result: EvaluationResult) -> str:
    """Every number of the result as ``csv_text``."""
    return csv_text(result.rows())


def csv_text(rows: Sequence[Row]) -> str:
    """Rows with the same keys, full precision, comma-separated with a header (RFC 4180)."""
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]) if rows else [])
    writer.writeheader()
    writer.writerows({name: _no_formula(value) for name, value in row.items()} for row in rows)
    return out.getvalue()


def parquet_of(result: EvaluationResult) -> bytes:
    """The same rows as a Parquet file."""
    from pyarrow import parquet

    out = io.BytesIO()
    parquet.write_table(result.to_arrow(), out)
    return out.getvalue()


def _no_formula(value: object) -> object:
    """Names come from requests: a spreadsheet must not run one that starts like a formula."""
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value
