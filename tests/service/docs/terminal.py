"""The commands of a page as a reader runs them: a clone, a plain terminal, one block after another."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sysconfig
import uuid
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.conftest import ROOT
from tests.forks.process import VARIABLE, folder_of_parent

NEEDED = ("bash", "curl", "git", "make")
"""Programs that the documentation takes for granted."""


SCRIPT = """import sys

from tests.forks.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""
"""The entry point, with its process as a fork. Ten commands import the libraries in a minute of CPU time otherwise."""


def blocks(page: Path) -> list[str]:
    """The commands of a page, block by block."""
    return re.findall(r"^```sh\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def repository(folder: Path) -> Path:
    """A git repository of the working tree as it is, changes that are not committed included."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    author = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init", "-q"], ["add", "-A"], [*author, "commit", "-q", "-m", "All"]):
        subprocess.run(["git", *command], cwd=folder, check=True)
    return folder


def installed(clone: Path) -> None:
    """The installation that ``make`` would make, of this interpreter's packages and the clone's code."""
    venv.create(clone / ".venv", with_pip=False, symlinks=True)
    (site,) = (clone / ".venv").glob("lib/python*/site-packages")
    (site / "ropeway.pth").write_text(f"{clone}\n{sysconfig.get_paths()['purelib']}\n")
    script = clone / ".venv/bin/ropeway"
    script.write_text(f"#!{clone}/.venv/bin/python\n{SCRIPT}")
    script.chmod(0o755)
    for stamp in ("run", "test", "dev"):
        (clone / f".venv/.installed-{stamp}").touch()


class Terminal:
    """One bash for all blocks, with nothing of this process's environment but what a login has."""

    def __init__(self, folder: Path, home: Path, **variables: str) -> None:
        environment = {"HOME": str(home), "PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self._bash = subprocess.Popen(
            ["bash", "--noprofile", "--norc"],
            cwd=folder,
            env={**environment, "OMP_NUM_THREADS": "1", VARIABLE: str(folder_of_parent()), **variables},
            text=True,
            start_new_session=True,
            **pipes,  # type: ignore[call-overload]
        )

    def run(self, block: str) -> tuple[int, str]:
        """Exit code of the first command that fails, or 0, and everything that was printed."""
        end = uuid.uuid4().hex
        steps = f"trap 'echo {end} $?' ERR\nset -E\n{block}\ntrap - ERR\necho {end} 0\n"
        assert self._bash.stdin is not None
        assert self._bash.stdout is not None
        self._bash.stdin.write(f"{steps}\n")
        self._bash.stdin.flush()
        printed, failed = [], 0
        for line in self._bash.stdout:
            text, mark, code = line.partition(end)
            printed.append(text)
            if mark:
                failed = failed or int(code)
                if int(code) == 0:
                    break
        return failed, "".join(printed)

    def begin(self, block: str) -> None:
        """Commands that go on: a server's."""
        assert self._bash.stdin is not None
        self._bash.stdin.write(f"{block}\n")
        self._bash.stdin.flush()

    def close(self) -> None:
        os.killpg(self._bash.pid, signal.SIGTERM)
        self._bash.communicate(timeout=30)


@contextmanager
def terminal(folder: Path, home: Path, **variables: str) -> Iterator[Terminal]:
    opened = Terminal(folder, home, **variables)
    try:
        yield opened
    finally:
        opened.close()


def missing() -> list[str]:
    return [program for program in NEEDED if shutil.which(program) is None]
