"""The tests marked ``gpu``: figures of a kernel that is wrong are worth nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec

from benchmarks.gpu.scale import Row, Scale
from benchmarks.paths import ROOT

WORKERS = ("-n", "4") if find_spec("xdist") else ()
"""Kernels are compiled for seconds each, so every file has several processes."""

OPTIONS = ("-c", os.devnull, "--rootdir", str(ROOT), "-m", "gpu", "-q", "-p", "no:cacheprovider")
"""Neither the project's settings nor its plugins of pytest: a machine with a card may have none of them."""

LIMIT_S = 120.0

NONE_RAN = 5
"""pytest's exit code."""


def tests(scale: Scale) -> Iterator[Row]:
    """Each file has its own processes on a card. Elsewhere all are skipped."""
    files = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text()]
    groups = [[path] for path in files] if scale.device == "cuda" else [files]
    end = time.monotonic() + LIMIT_S
    with ExitStack() as closed:
        logs = [closed.enter_context(tempfile.TemporaryFile("w+")) for _ in groups]
        running = [
            subprocess.Popen(
                [sys.executable, "-m", "pytest", *OPTIONS, *(WORKERS if len(groups) > 1 else ()), *map(str, group)],
                cwd=ROOT,
                stdout=log,
                stderr=log,
            )
            for group, log in zip(groups, logs, strict=True)
        ]
        for group, process, log in zip(groups, running, logs, strict=True):
            try:
                code = process.wait(max(end - time.monotonic(), 1))
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
            log.seek(0)
            output = log.read()
            last = (output.strip().splitlines() or ["no output"])[-1].strip("= ")
            # Skipping all of them is no success with a card.
            is_fine = code == 0 and "passed" in last if scale.device == "cuda" else code in (0, NONE_RAN)
            if not is_fine:
                print(output)
            yield ", ".join(path.stem for path in group), code, "exit code", ("" if is_fine else "failed: ") + last
