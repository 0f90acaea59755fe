"""A test worker as a fork: xdist calls this file as it would call Python, ``worker.py -u -c CODE``."""

from __future__ import annotations

import sys
from pathlib import Path


def run(arguments: list[str]) -> None:
    """As ``python`` with these arguments. The code reads the rest from standard input."""
    sys.argv = ["-c"]
    exec(arguments[arguments.index("-c") + 1], {"__name__": "__main__"})


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
    from tests.forks.parent import WORKERS
    from tests.forks.process import fork
    from tests.forks.worker import run as run_fork

    sys.exit(fork(WORKERS, run_fork, (sys.argv[1:],), Path.cwd(), (0, 1, 2)).wait())
