"""New queries of many sequences in two calls, for all scores and all outputs: float32 on a CPU.

Scores are the entries of a sparse matrix of queries by keys, which ``torch.sparse.sampled_addmm`` computes. Outputs are
weighted sums of values (``torch.embedding_bag``). So sequences have any lengths and places. The few keys that turn are
copied into spare places of the cache; no other is. The ordinary kernel multiplies matrices of a few rows for each
sequence, and their calls take most of its time.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby

import numpy as np
import torch

from patches.attention.decode.sums.changes import Changes, Stretch, stretches_of
from patches.attention.decode.sums.columns import Keys, Member, TurnedKeys, columns_of, edges, with_turned
from patches.attention.decode.sums.entries import Biases
from patches.encoding.rotary import turn_into

MOST_HEADS = 8
"""Query heads of each key head. Each reads the keys again; the ordinary kernel reads them once for all."""

FEW_HEADS, MOST_NUMBERS = 3, 1 << 17
"""More query heads of a key head than so few need it in a core's own cache: 512 KB for its keys in a sequence."""

INSTRUCTIONS = ("AVX2", "AVX512")
"""Processors that FBGEMM has kernels for."""


@dataclass
class RaggedBatch:
    """Sequences ``members``, by their number in the step.

    A row of ``scores`` [rows, kv_heads x places] is one head of a sequence under one turn of its query. Their
    ``entries`` [n] are at the ``columns`` [n]. Rows of one head follow one another: ``distributions`` [heads, keys] are
    views of the entries, and ``bags`` [members x heads] begin there. Entries of ``turned`` keys have their values at
    other ``values`` [n] than ``columns``.

    It serves so many ``steps`` of the same sequences, in ``stretches``. A step has its ``biases`` of the entries, and
    its ``changes`` of queries; None without any.
    """

    members: list[int]
    scores: torch.Tensor
    entries: torch.Tensor
    columns: torch.Tensor
    values: torch.Tensor
    turned: list[TurnedKeys]
    distributions: list[torch.Tensor]
    bags: torch.Tensor
    stretches: list[Stretch]
    biases: Biases | None
    steps: int
    interleaved: bool
    offset: int
    step: int = 0
    changes: Changes | None = None

    @property
    def ahead(self) -> int:
        """Steps behind this one."""
        return self.steps - 1 - self.step

    def begin(self, step: int) -> None:
        """Have a ``step``, the one behind that before. All layers will end it."""
        if step and self.biases is not None:
            self.biases.move(step)
        stretch = next(each for each in reversed(self.stretches) if each.first <= step)
        stretch.begin(step)
        self.step, self.changes = step, stretch.changes


def has_sums(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
    """True if many sums take less time than ordinary calls.

    ``query`` is [1, heads, sequences, head_dim]; ``keys`` and ``values`` [kv_heads, places, dim] are a whole cache.
    """
    heads, kv_heads = query.shape[1], keys.shape[0]
    return (
        query.dtype == keys.dtype == torch.float32
        and not query.requires_grad
        and keys.is_contiguous()
        and values.is_contiguous()
        and heads <= MOST_HEADS * kv_heads
        and query.device.type == "cpu"
        and torch.backends.cpu.get_cpu_capability() in INSTRUCTIONS
    )


def is_short(keys: int, heads: int, kv_heads: int, dim: int) -> bool:
    """True for a sequence whose sums over so many ``keys`` take less time than its ordinary call."""
    return heads <= FEW_HEADS * kv_heads or keys * dim <= MOST_NUMBERS


def ragged_batch(
    members: Sequence[Member], sequences: int, heads: int, keys: torch.Tensor, spare: int = 0
) -> RaggedBatch:
    """The batch of ``members``, out of so many ``sequences``. Of ``keys`` as in ``has_sums``, the shape counts.

    Places from ``spare`` on are for keys that turn. The batch begins with its first step. There is one more for each of
    the readings ahead, of which all members have as many.
    """
    kv_heads, places = keys.shape[:2]
    own, shape = [Keys.of(member) for member in members], (kv_heads, places, keys.shape[2])
    counts, room = [sum(each.sizes) for each in own], len(members[0].ahead)
    integer = np.int32 if places * kv_heads < 1 << 31 else np.int64
    values = columns_of(own, heads, (kv_heads, places), integer)
    columns, turned = with_turned(own, values, heads, (kv_heads, places), spare)
    entries = torch.zeros(len(columns), dtype=torch.float32)  # another model that loads changes the default
    sizes = [size for each in own for size in each.sizes * heads]
    scores = _sparse(torch.from_numpy(edges(sizes).astype(integer)), columns, entries, places * kv_heads)
    bags = torch.from_numpy(edges(np.repeat(counts, heads))[:-1].astype(integer))
    readings = [member.reading for member in members]
    is_biased = any(part.bias is not None for reading in readings for part in reading.parts)
    batch = RaggedBatch(
        [member.number for member in members],
        scores,
        entries,
        columns,
        torch.from_numpy(values),
        turned,
        _distributions(entries, counts, heads),
        bags,
        stretches_of(members, sequences, heads, shape),
        Biases(members, own, heads) if room or is_biased else None,
        1 + room,
        *next(((each.interleaved, each.offset) for each in readings if each.turns_states), (False, 0)),
    )
    batch.begin(0)
    return batch


def ragged_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float, batch: RaggedBatch
) -> torch.Tensor:
    """Output [1, members, heads, value dim] of the members' queries in ``query``. Tensors are as in ``has_sums``."""
    heads, entries, changes = query.shape[1], batch.entries, batch.changes
    states = query[0].transpose(0, 1).reshape(-1, query.shape[-1])
    rows = keys.view(-1, keys.shape[-1])
    if changes is not None:
        states = changes.applied(states, rows, interleaved=batch.interleaved, offset=batch.offset)
    for source, spare, table in batch.turned:
        own = keys[:, source] if isinstance(source, slice) else keys.index_select(1, source)
        turn_into(keys[:, spare], own, *table, interleaved=batch.interleaved, offset=batch.offset)
    beta = 0.0 if batch.biases is None else 1.0
    if batch.biases is None:
        entries.zero_()  # they are added times 0, and infinity times 0 is no number
    else:
        entries.copy_(batch.biases.bias)
    torch.ops.aten.sparse_sampled_addmm.out(batch.scores, states, rows.t(), beta=beta, alpha=scaling, out=batch.scores)
    for each in batch.distributions:
        torch.softmax(each, -1, out=each)
    values = values.view(-1, values.shape[-1])
    out = torch.embedding_bag(values, batch.values, batch.bags, False, 0, False, entries)[0]
    return out.view(1, len(batch.members), heads, -1)


def _sparse(rows: torch.Tensor, columns: torch.Tensor, entries: torch.Tensor, width: int) -> torch.Tensor:
    """A sparse matrix [rows, ``width``] over the memory of ``entries``."""
    _leave_out_warning()
    return torch.sparse_csr_tensor(rows, columns, entries, (len(rows) - 1, width), check_invariants=False)


@cache
def _leave_out_warning() -> None:
    """torch warns of the first such matrix in a process, since their interface may change. Tests would see that."""
    warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta", UserWarning)
    torch.zeros(1, 1).to_sparse_csr()


def _distributions(entries: torch.Tensor, counts: Sequence[int], heads: int) -> list[torch.Tensor]:
    """``entries`` by head [heads, keys]; sequences of one length that follow one another are one tensor."""
    groups = [(count, heads * len(list(group))) for count, group in groupby(counts)]
    parts = entries.split([count * rows for count, rows in groups])
    return [part.view(rows, count) for part, (count, rows) in zip(parts, groups, strict=True)]
