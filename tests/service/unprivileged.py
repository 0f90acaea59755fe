"""A user without privileges, where the tests run as root."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NOBODY = 65534
ROOT = hasattr(os, "geteuid") and os.geteuid() == 0


@contextmanager
def unprivileged() -> Iterator[Path]:
    """A folder of a user without privileges, as whom the block runs: root may read and write everything."""
    with tempfile.TemporaryDirectory(prefix="ropeway-") as folder:
        if ROOT:
            os.chown(folder, NOBODY, NOBODY)
            os.seteuid(NOBODY)
        try:
            yield Path(folder)
        finally:
            if ROOT:
                os.seteuid(0)
