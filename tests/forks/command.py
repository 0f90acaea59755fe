"""``ropeway`` of another folder as a fork: ``python -m tests.forks.command ARGUMENTS`` waits, and ends as it does."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.forks.python import use_sources, waited


def ropeway(folder: str, *arguments: str) -> None:
    """`ropeway` of the sources in ``folder``, in a process that has the libraries, and modules of other sources."""
    use_sources(folder)
    from service.cli import app

    app(list(arguments), prog_name="ropeway")


def main(arguments: list[str]) -> int:
    from tests.forks.parent import SERVERS

    folder = Path(__file__).resolve().parent.parent.parent
    return waited(SERVERS, ropeway, str(folder), *arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
