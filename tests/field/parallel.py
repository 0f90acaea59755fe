"""Every type that transformers can divide among ranks, computed by two processes and by one.

``python -m tests.field.parallel`` prints a table; ``python -m tests.field.parallel llama mixtral`` only these types. It
takes about two minutes. Both ranks load a checkpoint of random weights. They score under every method that the model
takes, and generate from the pages of the engine.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from patches import Patched, parse
from service.models.checkpoint.division import has_plan
from service.models.checkpoint.loading import ModelLoadError
from service.models.parallel.group import joined
from service.models.start import started
from service.settings import Settings
from tests.field.configurations import TYPES, VOCAB_SIZE, tiny_config, tiny_model
from tests.methods import rows
from tests.service.conftest import tiny_tokenizer

RANKS, TOKENS, LENGTH = 2, 50, 96
TOLERANCE = 1e-5
"""Of the largest logit."""

LIMIT_S = 90
"""Seconds for one type."""

Logits = dict[str, torch.Tensor]


def divisible() -> list[str]:
    """The types for which transformers has a plan."""
    found = []
    for name in TYPES:
        try:
            divides = has_plan(tiny_config(name))
        except Exception:  # in as many ways as there are types
            continue
        if divides:
            found.append(name)
    return found


def settings(folder: Path, ranks: int) -> Settings:
    return Settings(_env_file=None, model=str(folder), device="cpu", dtype="float32", tensor_parallel=ranks)


@torch.no_grad()
def computed(folder: Path, ranks: int) -> tuple[str, Logits]:
    """(hash of the contents, logits [TOKENS, vocabulary] by method) of a checkpoint. The start compares the engine."""
    ((start,),) = started(settings(folder, ranks))
    with start as ready:
        return ready.contents, {name: _logits(ready.patch, fields) for name, fields in _requests(ready.patch)}


def _requests(patch: Patched) -> list[tuple[str, dict[str, Any]]]:
    geometry, found = patch.geometry, []
    for row in rows(geometry.rotary_dim // 2, geometry.original_max_position_embeddings, geometry.num_attention_heads):
        for fields in (row.easy, row.hard):
            request = {"method": row.name, **fields}
            try:
                patch.resolve(parse(request), LENGTH)
            except ValueError:
                continue
            found.append((f"{len(found)} {row.name}", request))
    return found


def _logits(patch: Patched, request: dict[str, Any]) -> torch.Tensor:
    ids = torch.randint(3, VOCAB_SIZE, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    logits: torch.Tensor = patch.model(ids, **patch.encoding(request, LENGTH)).logits[0].double()
    return logits


def row_of(name: str, rank: int, store: Path) -> str:
    """The outcome for one type, on one rank."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        tiny_model(name).save_pretrained(folder)  # outside of a group, where every rank saves
        tiny_config(name).save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
        try:
            contents, expected = computed(folder, 1)
        except ModelLoadError as error:
            return f"not served by one process: {_said(error)}"
        try:
            with joined(settings(folder, RANKS), rank, store):
                of_ranks, found = computed(folder, RANKS)
        except ModelLoadError as error:
            return f"refused: {_said(error)}"
    far = {method: float((found[method] - one).abs().max() / one.abs().max()) for method, one in expected.items()}
    worst = max(far, key=far.__getitem__)
    wrong = sum(not distance <= TOLERANCE for distance in far.values())
    verdict = f"WRONG in {wrong}, most in {worst}" if wrong else "equal"
    if of_ranks != contents:
        verdict = f"WRONG hash, {verdict}"
    return f"{verdict}: {len(far)} encodings, within {far[worst]:.1e} of the largest logit"


def _said(error: Exception) -> str:
    return " ".join(str(error).partition("cannot be ")[2].split())[:300]


def _rank(name: str, rank: int, store: Path, rows_of: Any) -> None:
    torch.set_num_threads(1)
    try:
        row = row_of(name, rank, store)
    except Exception as error:  # in as many ways as there are types
        row = f"FAILS: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    rows_of.put((rank, row))
    rows_of.close()
    rows_of.join_thread()
    os._exit(0)


def of_both(name: str, context: Any) -> str:
    """The outcome of one type in two new processes."""
    rows_of, store = context.Queue(), Path(tempfile.mkdtemp()) / "store"
    processes = [context.Process(target=_rank, args=(name, rank, store, rows_of)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    found: dict[int, str] = {}
    try:
        for _ in processes:
            rank, row = rows_of.get(timeout=LIMIT_S)
            found[rank] = row
    except queue.Empty:
        return f"FAILS: only {found} within {LIMIT_S} s"
    finally:
        for process in processes:
            process.kill()
            process.join()
    return found[0] if len(set(found.values())) == 1 else f"FAILS: rank 0: {found[0]}; rank 1: {found[1]}"


def main(names: list[str]) -> int:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["service.models.start", "tests.field.parallel"])
    failed = 0
    for name in names or divisible():
        row = of_both(name, context)
        failed += row.startswith(("FAILS", "WRONG"))
        print(f"| {name} | {row} |", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
