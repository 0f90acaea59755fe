"""New queries of many sequences in two calls, for all scores and all outputs: float32 on a CPU.

Scores are the entries of a sparse matrix of queries by keys, which ``torch.sparse.sampled_addmm`` computes. Outputs are
weighted sums of values (``torch.embedding_bag``). So sequences have any lengths and places. The few keys that turn are
copied into spare places of the cache; no other is. The ordinary kernel multiplies matrices of a few rows for each
sequence, and their calls take most of its time.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch

from patches.attention.decode.columns import Keys, Member, NewRows, TurnedKeys, columns_of, edges, with_turned
from patches.attention.decode.tables import Table
from patches.encoding.rotary import turn_, turn_into, upcast

MOST_HEADS = 8
"""Query heads of each key head. Each reads the keys again; the ordinary kernel reads them once for all."""

FEW_HEADS, MOST_NUMBERS = 3, 1 << 17
"""More query heads of a key head than so few need it in a core's own cache: 512 KB for its keys in a sequence."""

INSTRUCTIONS = ("AVX2", "AVX512")
"""Processors that FBGEMM has kernels for."""


class Changed(NamedTuple):
    """Memory for ``queries`` [rows, head_dim], by their ``numbers`` in the step, with their ``factor`` [rows, 1].

    ``new`` keys [n, head_dim] are behind them, at the rows ``written`` of the cache, and turn to its rows ``kept``. The
    ``whole`` memory has the ``rotation``. A field is None without it.
    """

    whole: torch.Tensor
    queries: torch.Tensor
    numbers: torch.Tensor
    factor: torch.Tensor | None
    rotation: Table | None
    new: torch.Tensor
    rows: NewRows | None

    def states(self, query: torch.Tensor, cached: torch.Tensor, *, interleaved: bool, offset: int) -> torch.Tensor:
        """The changed ones of ``query`` [all rows, head_dim]. New keys turn within ``cached``."""
        torch.index_select(query, 0, self.numbers, out=self.queries)
        if self.factor is not None:
            self.queries.mul_(self.factor)
        if self.rows is not None:
            torch.index_select(cached, 0, self.rows.written, out=self.new)
        if self.rotation is not None:
            turn_(self.whole, *self.rotation, interleaved=interleaved, offset=offset)
        if self.rows is not None:
            cached.index_copy_(0, self.rows.turned, self.new)
        return self.queries


class RaggedBatch(NamedTuple):
    """Sequences ``members``, by their number in the step.

    A row of ``scores`` [rows, kv_heads x places] is one head of a sequence under one turn of its query. Their
    ``entries`` [n] are at the ``columns`` [n]. Rows of one head follow one another: ``distributions`` [heads, keys] are
    views of the entries, and ``bags`` [members x heads] begin there. Queries may be ``changed``, and entries have the
    ``bias`` [n]. Entries of ``turned`` keys have their values at other ``values`` [n] than ``columns``. A field is None
    without it.
    """

    members: list[int]
    scores: torch.Tensor
    entries: torch.Tensor
    columns: torch.Tensor
    values: torch.Tensor
    turned: list[TurnedKeys]
    distributions: list[torch.Tensor]
    bags: torch.Tensor
    changed: Changed | None
    bias: torch.Tensor | None
    interleaved: bool
    offset: int


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

    Places from ``spare`` on are for keys that turn.
    """
    kv_heads, places = keys.shape[:2]
    own = [Keys.of(member) for member in members]
    counts = [sum(each.sizes) for each in own]
    integer = np.int32 if places * kv_heads < 1 << 31 else np.int64
    values = columns_of(own, heads, (kv_heads, places), integer)
    columns, turned = with_turned(own, values, heads, (kv_heads, places), spare)
    entries = torch.zeros(len(columns), dtype=torch.float32)  # another model that loads changes the default
    sizes = [size for each in own for size in each.sizes * heads]
    scores = _sparse(torch.from_numpy(edges(sizes).astype(integer)), columns, entries, places * kv_heads)
    bags = torch.from_numpy(edges(np.repeat(counts, heads))[:-1].astype(integer))
    turning = [
        each.reading for each in members if any(part.query or part.pieces or part.once for part in each.reading.parts)
    ]
    return RaggedBatch(
        [member.number for member in members],
        scores,
        entries,
        columns,
        torch.from_numpy(values),
        turned,
        _distributions(entries, counts, heads),
        bags,
        _changed(members, own, sequences, heads, keys.shape),
        _bias(own, heads),
        *((turning[0].interleaved, turning[0].offset) if turning else (False, 0)),
    )


def ragged_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float, batch: RaggedBatch
) -> torch.Tensor:
    """Output [1, members, heads, value dim] of the members' queries in ``query``. Tensors are as in ``has_sums``."""
    heads, entries, changed = query.shape[1], batch.entries, batch.changed
    states = query[0].transpose(0, 1).reshape(-1, query.shape[-1])
    rows = keys.view(-1, keys.shape[-1])
    if changed is not None:
        states = changed.states(states, rows, interleaved=batch.interleaved, offset=batch.offset)
    for source, spare, table in batch.turned:
        own = keys[:, source] if isinstance(source, slice) else keys.index_select(1, source)
        turn_into(keys[:, spare], own, *table, interleaved=batch.interleaved, offset=batch.offset)
    entries.zero_()  # they are added times 0, and infinity times 0 is no number
    torch.ops.aten.sparse_sampled_addmm.out(batch.scores, states, rows.t(), beta=0.0, alpha=scaling, out=batch.scores)
    if batch.bias is not None:
        entries += batch.bias
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


def _changed(
    members: Sequence[Member], own: Sequence[Keys], sequences: int, heads: int, cached: Sequence[int]
) -> Changed | None:
    numbers, turns = [member.number for member in members], [len(each.turns) for each in own]
    factor, rotation, new = _factor(members, own, heads), _rotation(own, heads, cached[0]), NewRows.of(own, *cached[:2])
    if numbers == list(range(sequences)) and max(turns) == 1 and factor is None and rotation is None:
        return None
    rows = [np.repeat(number * heads + np.arange(heads), count) for number, count in zip(numbers, turns, strict=True)]
    queries = torch.from_numpy(np.concatenate(rows))
    edge, count = len(queries), 0 if new is None else len(new.written)
    whole = torch.empty(edge + count, cached[2], dtype=torch.float32)
    return Changed(whole, whole[:edge], queries, factor, rotation, whole[edge:], new)


def _factor(members: Sequence[Member], own: Sequence[Keys], heads: int) -> torch.Tensor | None:
    readings = [member.reading for member in members]
    if all(reading.factor is None and reading.multiplier == 1.0 for reading in readings):
        return None
    factors = [reading.multiplier * (1.0 if reading.factor is None else float(reading.factor)) for reading in readings]
    rows = [heads * len(each.turns) for each in own]
    return torch.from_numpy(np.repeat(np.array(factors, np.float32), rows))[:, None]


def _rotation(own: Sequence[Keys], heads: int, kv_heads: int) -> Table | None:
    """Rotations [rows, rotary_dim] of queries, by nothing where one does not turn, and then of new keys."""
    tables = [table for each in own for table in each.turns if table is not None]
    numbers = iter(range(1, 1 + len(tables)))
    rows = [row for each in own for row in [0 if table is None else next(numbers) for table in each.turns] * heads]
    count = 1 + len(tables)
    for new in (new for each in own for new in each.new):
        rows += [*range(count, count + len(new.places))] * kv_heads
        tables.append(new.table)
        count += len(new.places)
    if not tables:
        return None
    cos, sin = ([table[part].numpy() for table in tables] for part in (0, 1))
    still = np.ones_like(cos[0][:1]), np.zeros_like(sin[0][:1])
    whole = np.concatenate((still[0], *cos)), np.concatenate((still[1], *sin))
    return torch.from_numpy(whole[0][rows]), torch.from_numpy(whole[1][rows])


def _bias(own: Sequence[Keys], heads: int) -> torch.Tensor | None:
    if all(part.bias is None for each in own for part, _ in each.parts):
        return None
    bias = np.zeros(heads * sum(sum(each.sizes) for each in own), np.float32)
    stop = 0
    for each in own:
        start, stop = stop, stop + heads * sum(each.sizes)
        if all(part.bias is None for part, _ in each.parts):
            continue
        column, by_head = 0, bias[start:stop].reshape(heads, -1)
        for part, size in each.parts:
            if part.bias is not None:
                by_head[:, column : column + size] = upcast(part.bias[0, :, 0]).numpy()
            column += size
    return torch.from_numpy(bias)
