"""A result as CSV, without the modules that draw: the server writes small tables on a thread.

The first child process of a server starts for seconds.
"""

from __future__ import annotations

import gzip

from service.evaluation.catalogue import result_type
from service.evaluation.results import EvaluationResult
from service.evaluation.tables import csv_of
from service.reports.rendered import Rendered


def table_of_packed(evaluation: str, packed: bytes) -> Rendered:
    """The table of the result in ``packed``, JSON under gzip."""
    return table(result_type(evaluation).model_validate_json(gzip.decompress(packed)))


def table(result: EvaluationResult) -> Rendered:
    """CSV under gzip."""
    return Rendered(gzip.compress(csv_of(result).encode(), 6, mtime=0), "text/csv", True)


def unpacked_size(packed: bytes) -> int:
    """Bytes of ``packed`` before gzip, which writes their number at its end (RFC 1952), modulo 2^32."""
    return int.from_bytes(packed[-4:], "little")
