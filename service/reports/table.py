"""A result as CSV, without the modules that draw: the server writes small tables on a thread.

The first child process of a server starts for seconds.
"""

from __future__ import annotations

from service.evaluation.catalogue import result_in
from service.evaluation.results import EvaluationResult
from service.evaluation.tables import csv_of
from service.reports.rendered import Rendered, packed_text


def table_of_packed(evaluation: str, packed: bytes) -> Rendered:
    """The table of the result in ``packed``, JSON under gzip."""
    return table(result_in(packed, evaluation))


def table(result: EvaluationResult) -> Rendered:
    """CSV under gzip."""
    return packed_text(csv_of(result), "text/csv")


def unpacked_size(packed: bytes) -> int:
    """Bytes of ``packed`` before gzip, which writes their number at its end (RFC 1952), modulo 2^32."""
    return int.from_bytes(packed[-4:], "little")
