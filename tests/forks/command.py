"""``ropeway`` of another folder as a fork: ``python -m tests.forks.command ARGUMENTS`` waits, and ends as it does."""

from __future__ import annotations

import multiprocessing
import signal
import sys
from pathlib import Path

OURS = ("benchmarks", "patches", "service", "tests")


def ropeway(folder: str, *arguments: str) -> None:
    """`ropeway` of the sources in ``folder``, in a process that has the libraries, and modules of other sources."""
    for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
        del sys.modules[name]
    multiprocessing.set_executable(sys.executable)  # the usual fork server draws with the modules of others
    sys.path.insert(0, folder)
    from service.cli import app

    app(list(arguments), prog_name="ropeway")


def main(arguments: list[str]) -> int:
    from tests.forks.parent import SERVERS
    from tests.forks.process import fork

    folder = Path(__file__).resolve().parent.parent.parent
    running = fork(SERVERS, ropeway, (str(folder), *arguments), Path.cwd(), (0, 1, 2))
    signal.signal(signal.SIGTERM, lambda *_: running.terminate())
    return running.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
