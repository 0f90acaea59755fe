"""Inputs of a step of single new tokens: as transformers makes them, in half the time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs
from transformers.generation.continuous_batching.requests import TMP_TOKEN_ID, FutureRequestState

from patches import encode
from service.engine.adapter.pages.cache import EncodingCache


def prepare_decode(
    inputs: ContinuousBatchingIOs,
    cache: EncodingCache,
    requests: Sequence[FutureRequestState],
    slots: Sequence[int],
    max_kv_read: int,
    *,
    by_tables: bool,
) -> None:
    """``ContinuousBatchingIOs.prepare_batch_tensors`` for ``requests`` with one new token each, on the host.

    Positions have the requests' ``slots`` above them. With ``by_tables``, attention reads block tables and needs no
    places. Neither masks nor padding are written.
    """
    states, count = [request.state for request in requests], len(requests)
    past = [state.position_offset for state in states]
    inputs.use_block_table, inputs.num_request_in_batch = by_tables, count
    inputs.num_q_tokens = inputs.total_seqlen_q = count
    inputs.max_kv_read, inputs.max_length_q = 0 if by_tables else max_kv_read, 1
    inputs.requests_in_batch = list(requests)
    inputs.req_id_to_new_token_position = {state.request_id: row for row, state in enumerate(states)}
    _write(inputs.input_ids, [state.tokens_to_process[0] for state in states])
    _write(inputs.position_ids, encode(np.array(past), np.array(slots)))
    _write(inputs.cumulative_seqlens_q, np.arange(count + 1))
    _write(inputs.logits_indices, np.arange(count))
    for state in states:
        state.position_offset += 1
        state.tokens_to_process = [TMP_TOKEN_ID]
    for allocator in cache.allocators:
        kind = allocator.layer_type
        lengths = [allocator.keys_of(state.request_id, n, 1) for state, n in zip(states, past, strict=True)]
        edges = np.cumsum([0, *lengths])
        inputs.max_length_k[kind], inputs.total_seqlen_k[kind] = max(lengths), int(edges[-1])
        _write(inputs.cumulative_seqlens_k[kind], edges)
    if not by_tables:
        _write_places(inputs, cache, [(state.request_id, n) for state, n in zip(states, past, strict=True)])


def _write_places(inputs: ContinuousBatchingIOs, cache: EncodingCache, past: Sequence[tuple[str, int]]) -> None:
    """The places in the cache that each request writes to and reads from; ``past`` counts its earlier keys."""
    count = len(cache.cache_allocators)
    written: list[list[int]] = [[] for _ in range(count)]
    read: list[list[int]] | None = [[] for _ in range(count)] if inputs.max_kv_read else None
    for request_id, length in past:
        cache.extend_read_and_write_indices(request_id, length, 1, read, written)
    for row, places in enumerate(written):
        _write(inputs.write_index_storage[row], places)
        inputs.true_write_sizes[row] = len(places)
    for row, places in enumerate(read or ()):
        _write(inputs.read_index_storage[row], places)
    inputs.true_read_sizes = [len(places) for places in read] if read is not None else [0] * count


def _write(target: torch.Tensor, numbers: Sequence[int] | np.ndarray) -> None:
    """``target[: len(numbers)] = numbers``, which takes torch ten times as long."""
    target.numpy()[: len(numbers)] = numbers
