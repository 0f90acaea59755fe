"""The inputs of one step: a packed row of requests, each with its slot and perhaps its pages."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs
from transformers.generation.continuous_batching.requests import TMP_TOKEN_ID, FutureRequestState
from typing_extensions import override

from patches import Batch, PagedBackend, PagedSequence, encode, packed_batch, paged_batch
from service.engine.adapter.cards.decode_rows import DecodeRows
from service.engine.adapter.decode_inputs import prepare_decode
from service.engine.adapter.pages.cache import EncodingCache
from service.engine.adapter.pages.windowed import Turn, whole_of
from service.engine.request import EngineRequest


class SlottedInputs(ContinuousBatchingIOs):
    """Writes each request's slot above its positions, and describes the packed row to our attention.

    With a ``backend`` of paged attention, the row has block tables, and no lists of places to read and write. For a
    card, it is written into ``staged`` on the host. Nothing waits for the copies to the card.
    """

    cache: EncodingCache
    backend: PagedBackend | None
    staged: ContinuousBatchingIOs | None
    requests: dict[str, EngineRequest]
    rows: DecodeRows | None
    """Rows for graphs, where there are any."""
    is_brief: bool
    """True for a step that a graph may replay: of its inputs, there are ``rows`` only."""
    batch: Batch
    arguments: dict[str, Any]
    tokens_in_batch: list[list[int]]

    @override
    def prepare_batch_tensors(self, requests_in_batch: list[Any], **arguments: Any) -> None:  # type: ignore[override]
        self.arguments = arguments
        self.tokens_in_batch = [future.state.tokens_to_process for future in requests_in_batch]
        self.is_brief = self.rows is not None and _decode(requests_in_batch)
        if self.is_brief:
            self._prepare_rows(requests_in_batch)
        else:
            known = [self.requests.get(future.state.request_id) for future in requests_in_batch]
            # A request that was cancelled meanwhile has any slot: its result is dropped.
            self._prepare_whole(requests_in_batch, [0 if request is None else request.slot for request in known])

    def _prepare_rows(self, requests: list[FutureRequestState]) -> None:
        assert self.rows is not None
        states = [future.state for future in requests]
        self.rows.take(states)
        self.requests_in_batch, self.num_request_in_batch = requests, len(requests)
        for state in states:
            state.position_offset += 1
            state.tokens_to_process = [TMP_TOKEN_ID]

    def make_room(self) -> None:
        """Have room for the places of all keys that a step reads, of a cache that was divided meanwhile."""
        size = self.cache.max_tokens_read + self.write_index_storage.shape[1]
        self.read_index_storage = self.read_index_storage.new_empty((self.cache.groups, size))

    def write_whole(self) -> None:
        """Write the inputs of a step that has no graph after all, with the slots of its ``rows``."""
        assert self.rows is not None
        self._rewind()
        self.is_brief = False
        self._prepare_whole(self.requests_in_batch, self.rows.numbers[:, 0].tolist())

    def _prepare_whole(self, requests_in_batch: list[FutureRequestState], slots: list[int]) -> None:
        arguments = self.arguments
        if self.cache.has_sectors:  # a prompt has left pages: those of a request depend on its position alone
            for future in requests_in_batch:
                self.cache.evict(future.state)
        sequences = [
            (slot, future.state.position_offset, future.query_length)
            for slot, future in zip(slots, requests_in_batch, strict=True)
        ]
        windowed = whole_of(self.cache)
        ids = [future.state.request_id for future in requests_in_batch]
        decodes = windowed is not None and all(length == 1 for *_, length in sequences)
        self.cache.in_place = windowed.places(ids) if decodes else {}  # type: ignore[union-attr]
        written = self if self.staged is None else self.staged
        if written.device.type == "cpu" and self._are_single(requests_in_batch):
            by_tables, max_kv_read = self.backend is not None, arguments["max_kv_read"]
            prepare_decode(written, self.cache, requests_in_batch, slots, max_kv_read, by_tables=by_tables)
        else:
            self._prepare_by_theirs(written, requests_in_batch)
            self._add_slots(written, sequences)
        if self.backend is None:
            places = [self.cache.in_place[name] for name in ids] if self.cache.in_place else None
            self.batch = packed_batch(sequences, places, ids)
        else:
            pages = zip(*(self.cache.pages_of(name) for name in ids), strict=True)
            groups = [
                [PagedSequence(*sequence, *one) for sequence, one in zip(sequences, own, strict=True)] for own in pages
            ]
            self.batch = paged_batch(groups, self.cache.page_size, self.device, self.backend)
        new = sum(future.has_new_token for future in requests_in_batch)
        if new < len(requests_in_batch):  # the model computes logits for each of them
            written.logits_indices[new : len(requests_in_batch)].zero_()
        if self.staged is not None:
            self._take(self.staged)

    def _are_single(self, requests: list[FutureRequestState]) -> bool:
        """True if ``requests`` decode, and nothing is padded or masked."""
        mask: Any = self.attention_mask
        return mask is None and not self.arguments["use_padding"] and _decode(requests)

    def _prepare_by_theirs(self, written: ContinuousBatchingIOs, requests: list[FutureRequestState]) -> None:
        windowed = whole_of(self.cache)
        turns = [Turn(f.state.request_id, f.state.position_offset, f.query_length) for f in requests]
        by_tables = {} if self.backend is None else {"use_decode_fast_path": True}
        with nullcontext() if windowed is None else windowed.asked_in_turn(turns):
            if written is self:
                super().prepare_batch_tensors(requests, **self.arguments | by_tables)
            else:
                written.prepare_batch_tensors(requests, **self.arguments | by_tables)

    @staticmethod
    def _add_slots(written: ContinuousBatchingIOs, sequences: list[tuple[int, int, int]]) -> None:
        """Put the slots of ``sequences`` (slot, first position, new tokens) above the positions."""
        if any(slot for slot, *_ in sequences):
            numbers = [slot for slot, _, count in sequences for _ in range(count)]
            slots = torch.tensor(numbers, dtype=torch.int32, device=written.device)
            written.position_ids[: len(slots)] = encode(written.position_ids[: len(slots)], slots)

    def _take(self, staged: ContinuousBatchingIOs) -> None:
        """Copy a batch to the card. The step before has ended, so its inputs may be overwritten on both sides."""
        staged._transfer_inputs(self, torch.cuda.current_stream(self.device), non_blocking=True)
        self.requests_in_batch = staged.requests_in_batch
        self.req_id_to_new_token_position = staged.req_id_to_new_token_position

    @override
    def _reset_static_tensors(self, full_reset: bool = False) -> None:
        """Only counts between steps. Without padding and masks, a step reads nothing but what it has written."""
        mask: Any = self.attention_mask
        if full_reset or mask is not None:
            super()._reset_static_tensors(full_reset)
            return
        self.max_length_q = 0
        for layer_type in self.cumulative_seqlens_k:
            self.max_length_k[layer_type] = self.total_seqlen_k[layer_type] = 0

    @property
    def decodes(self) -> bool:
        """True if every request of the batch has one new token, and gets the next one."""
        return _decode(self.requests_in_batch)

    def undo_step(self) -> FutureRequestState:
        """Reset the requests of the batch to their state before it was prepared.

        Returns the one to blame: that with the most new tokens, then the longest.
        """
        self._rewind()
        self.cache.kept.clear()  # only some layers have turned the keys of the step
        return max(self.requests_in_batch, key=lambda future: (future.query_length, future.state.position_offset))

    def _rewind(self) -> None:
        """Have the requests of the batch as they were before it was prepared."""
        for future, tokens in zip(self.requests_in_batch, self.tokens_in_batch, strict=True):
            future.state.position_offset -= future.query_length
            future.state.tokens_to_process = tokens
        if self.rows is not None:
            self.rows.forget()

    def prepare_again(self, without: FutureRequestState) -> None:
        """The same batch without one request; an empty batch if none is left."""
        rest = [future for future in self.requests_in_batch if future is not without]
        if rest:
            arguments = self.arguments | {"num_q_tokens": sum(future.query_length for future in rest)}
            self.prepare_batch_tensors(rest, **arguments)
        else:
            self.requests_in_batch, self.num_request_in_batch = [], 0


def _decode(requests: list[FutureRequestState]) -> bool:
    return all(future.query_length == 1 and future.has_new_token for future in requests)


def on_host(processor: ContinuousBatchProcessor) -> ContinuousBatchingIOs:
    """Inputs of ``processor`` in memory that a card copies from by itself."""
    built: ContinuousBatchingIOs = processor.inputs_and_outputs  # type: ignore[assignment]
    return ContinuousBatchingIOs(
        built.cache,
        built.config,
        processor.cb_config,
        torch.device("cpu"),
        built.model_dtype,
        processor.logit_processor,
    )
