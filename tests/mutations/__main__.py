"""Mutations: small faults put into a copy of the sources, one at a time; the named tests must catch each.

``python -m tests.mutations [--only NAME ...]`` exits with 1 if a mutation survives or its text is not found once.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.mutations import MUTATIONS
from tests.mutations.mutation import Mutation

ROOT = Path(__file__).resolve().parent.parent.parent
COPIED = ("benchmarks", "docs", "patches", "service", "tests")
HEAVY = (
    *("torch", "transformers", "transformers.generation.continuous_batching", "fastapi", "sqlalchemy", "pyarrow"),
    *("schemathesis", "hypothesis", "pytest_asyncio", "transformers.models.llama.modeling_llama"),
)
"""Imported once, before a process is forked for every run."""

LONGEST_S = 900
ENDED = 64
"""Added to pytest's exit code, so that a process that breaks is not taken for a test that fails."""

PASSED, FAILED = ENDED + pytest.ExitCode.OK, ENDED + pytest.ExitCode.TESTS_FAILED


def copied(folder: Path) -> Path:
    """A copy of the sources below ``folder``, beside a link to the shared data."""
    root = folder / "repository"
    root.mkdir()
    for name in COPIED:
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", root)
    shared = ROOT.parent / "shared"
    if shared.is_dir():
        (folder / shared.name).symlink_to(shared)
    return root


def tested(root: Path, tests: Sequence[str]) -> int:
    """Exit code of a fork of this process that runs ``tests`` in the sources of ``root``."""
    process = multiprocessing.get_context("fork").Process(target=run_pytest, args=(root, tests))
    process.start()
    process.join(LONGEST_S)
    if process.is_alive():
        process.kill()
        process.join()
    assert process.exitcode is not None
    return process.exitcode


def run_pytest(root: Path, tests: Sequence[str]) -> None:
    """Silently, with the sources of ``root`` in place of these."""
    for name in [name for name in sys.modules if name.partition(".")[0] in COPIED]:
        del sys.modules[name]
    os.chdir(root)
    os.environ["PYTHONPATH"] = str(root)
    sys.path.insert(0, str(root))
    sys.dont_write_bytecode = True
    silence = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(silence, stream)
    options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    os._exit(ENDED + pytest.main([*options, *tests], plugins=[WithoutShrinking()]))


class WithoutShrinking:
    """One example that fails is enough; hypothesis would look for the smallest."""

    @staticmethod
    def pytest_collection() -> None:
        from hypothesis import Phase, settings

        phases = (Phase.explicit, Phase.generate)
        settings.register_profile("unshrunk", settings.get_profile("ropeway"), phases=phases)
        settings.load_profile("unshrunk")


def verdict(mutation: Mutation, root: Path) -> str:
    """ "caught", "survived" or why it was not tested; the sources of ``root`` are restored."""
    try:
        path = mutation.file(root)
    except LookupError as error:
        return f"not applied: {error}"
    source = path.read_text(encoding="utf-8")
    path.write_text(source.replace(mutation.text, mutation.wrong), encoding="utf-8")
    try:
        code = tested(root, mutation.tests)
    finally:
        path.write_text(source, encoding="utf-8")
    return {PASSED: "survived", FAILED: "caught"}.get(code, f"not tested: the process ended with {code}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=[mutation.name for mutation in MUTATIONS], metavar="NAME")
    parser.add_argument("--tests-pass", action="store_true", help="do not run the tests without a mutation first")
    arguments = parser.parse_args()
    chosen = [mutation for mutation in MUTATIONS if arguments.only is None or mutation.name in arguments.only]
    os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported
    for module in HEAVY:
        importlib.import_module(module)
    with tempfile.TemporaryDirectory() as folder:
        root = copied(Path(folder))
        tests = sorted({test for mutation in chosen for test in mutation.tests})
        if not arguments.tests_pass and tested(root, tests) != PASSED:
            print("the tests fail without any mutation")
            return 1
        verdicts = {}
        for mutation in chosen:
            verdicts[mutation.name] = verdict(mutation, root)
            print(f"{mutation.name}: {verdicts[mutation.name]}", flush=True)
    print()
    for mutation in chosen:
        print(f"| {mutation.name} | {mutation.folder} | {verdicts[mutation.name]} |")
    caught = sum(found == "caught" for found in verdicts.values())
    print(f"{caught} of {len(chosen)} caught")
    return 0 if caught == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
