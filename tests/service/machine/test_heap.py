"""The heap of a server: blocks that it frees stay, until it has no work."""

from __future__ import annotations

import subprocess
import sys

import pytest

from service.machine import heap

PROGRAM = """
import resource, sys, threading
from service.machine.heap import keep_one_heap, trim

def pages():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1])

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = bytearray(1) * (48 << 20)
    block = None
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if sys.argv[1] == "kept":
    keep_one_heap()
found = []
thread = threading.Thread(target=lambda: found.extend(faults() for _ in range(3)))
thread.start()
thread.join()
kept = pages()
trim()
print(min(found), kept - pages())
"""


@pytest.mark.skipif(heap._glibc() is None, reason="glibc alone has these heaps")
def test_freed_blocks_stay_until_they_are_trimmed() -> None:
    """Its pages are missing again, if a block went back to the system."""
    found = {}
    for kind in ("usual", "kept"):
        output = subprocess.run([sys.executable, "-c", PROGRAM, kind], check=True, capture_output=True, text=True)
        found[kind] = [int(number) for number in output.stdout.split()]
    assert found["kept"][0] < found["usual"][0]
    assert found["kept"][1] > 10_000
