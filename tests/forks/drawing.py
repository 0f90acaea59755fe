"""Python as multiprocessing calls it from a forked process: its fork server is a fork too, which can draw already.

``drawing.py ARGUMENTS -c CODE``. Importing what draws takes three seconds, which each worker and server would spend.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

SERVER = re.compile(r"(from multiprocessing\.forkserver import main; main\()(\d+), (\d+),")
"""Its descriptors: the socket that it listens on, and the pipe that ends with its client."""


def run(code: str) -> None:
    exec(code, {"__name__": "__main__"})


def main(arguments: list[str]) -> int:
    from tests.forks.parent import WORKERS
    from tests.forks.process import fork

    code = arguments[-1]
    found = SERVER.match(code)
    if found is None:
        os.execv(sys.executable, [sys.executable, *arguments])
    streams = 0, 1, 2, int(found[2]), int(found[3])
    return fork(WORKERS, run, (SERVER.sub(r"\g<1>3, 4,", code),), Path.cwd(), streams).wait()
