"""Python as a forked process calls it: fork servers of multiprocessing and modules are forks too, with their libraries.

``python.py ARGUMENTS -c CODE`` or ``python.py -m MODULE ARGUMENTS``. A new interpreter imports for three to seven
seconds, which each worker and server would spend.
"""

from __future__ import annotations

import multiprocessing.spawn
import os
import re
import runpy
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

OURS = ("benchmarks", "patches", "service", "tests")
SOURCES = "SOURCES_OF_FORKS"
"""Names the folder of other sources, which a process and all that it starts use."""
SERVER = re.compile(r"(from multiprocessing\.forkserver import main; main\()(\d+), (\d+),")
"""Its descriptors: the socket that it listens on, and the pipe that ends with its client."""


def written(folder: Path) -> Path:
    """A program in ``folder`` that runs ``main`` below."""
    program = folder / "python"
    code = f"import sys\nsys.path.insert(0, {str(Path.cwd())!r})\nfrom tests.forks.python import main\n"
    program.write_text(f"#!{sys.executable}\n{code}sys.exit(main(sys.argv[1:]))\n")
    program.chmod(0o700)
    return program


def start_forks() -> None:
    """From here on, this process starts forks where it starts Python."""
    sys.executable = multiprocessing.spawn.get_executable()


def use_sources(folder: str) -> None:
    """Import from ``folder`` in this process, which has modules of other sources, and in those that it starts."""
    os.environ[SOURCES] = folder
    for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
        del sys.modules[name]
    sys.path.insert(0, folder)
    start_forks()


def run(code: str) -> None:
    _use_named_sources()
    exec(code, {"__name__": "__main__"})


def run_module(name: str, arguments: list[str]) -> None:
    _use_named_sources()
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _use_named_sources() -> None:
    if folder := os.environ.get(SOURCES):
        use_sources(folder)


def waited(kind: str, function: Callable[..., object], *arguments: Any, streams: tuple[int, ...] = (0, 1, 2)) -> int:
    """Exit code of ``function(*arguments)`` in a fork, which gets the signals of this process."""
    from tests.forks.process import fork

    running = fork(kind, function, arguments, Path.cwd(), streams)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: os.kill(running.pid, received))
    return running.wait()


def main(arguments: list[str]) -> int:
    from tests.forks.parent import SERVERS, WORKERS

    if arguments[0] == "-m":
        return waited(WORKERS if arguments[1] == "pytest" else SERVERS, run_module, arguments[1], arguments[2:])
    found = SERVER.match(arguments[-1])
    if found is None:
        os.execv(sys.executable, [sys.executable, *arguments])
    code = SERVER.sub(r"\g<1>3, 4,", arguments[-1])
    return waited(WORKERS, run, code, streams=(0, 1, 2, int(found[2]), int(found[3])))
