"""Steps of the padded engine: one token for every row that decodes, then chunks of prompts."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable

from patches import Patched
from service.engine.limits import EngineLimits
from service.engine.padded.caches import sizes
from service.engine.padded.forward import BatchForward
from service.engine.padded.sequence import Sequence, batches
from service.engine.request import EngineRequest
from service.engine.thread.fairness import PREFILL_BESIDE_OTHERS, candidates
from service.engine.thread.out_of_memory import OutOfMemory, give_back, is_out_of_memory
from service.sharing.turns import Turns


class Steps:
    """Runs requests. Other threads put them, and ids to cancel, into ``inbox``; ``deliver`` takes every output.

    ``heartbeat`` is the time of the last forward. ``together`` lets rows share a forward. A forward that runs out of
    memory fails the longest of its rows; the others compute their tokens again.
    """

    def __init__(
        self,
        patch: Patched,
        limits: EngineLimits,
        turns: Turns,
        deliver: Callable[[Sequence, Exception | None], None],
        *,
        together: bool,
    ) -> None:
        self.inbox: queue.SimpleQueue[EngineRequest | str] = queue.SimpleQueue()
        self.sequences: dict[str, Sequence] = {}
        """Request id -> sequence, in order of arrival."""
        self.heartbeat = time.monotonic()
        self._forward, self._turns, self._deliver, self.together = BatchForward(patch), turns, deliver, together
        self._limits, self._most, self._measured = limits, limits.max_requests_per_batch, False
        self._prefill_beside_others = PREFILL_BESIDE_OTHERS if patch.model.device.type == "cpu" else None

    def take(self) -> None:
        """Empty the inbox."""
        while not self.inbox.empty():
            new = self.inbox.get()
            if isinstance(new, EngineRequest):
                self.sequences[new.request_id] = Sequence(new)
            else:
                self.sequences.pop(new, None)

    def run(self, others: set[str]) -> bool:
        """One step beside ``others``, the tenants with interleaved work; false when there is nothing to do."""
        self.take()
        every, full = list(self.sequences.values()), self._is_full()
        decoding, reading, token_budget = candidates(
            [sequence for sequence in every if sequence.is_decoding],
            [sequence for sequence in every if not sequence.is_decoding and (sequence.has_state or not full)],
            lambda sequence: sequence.request.tenant,
            self._turns,
            others,
            self._limits.max_batch_tokens,
            self._prefill_beside_others,
        )
        began, computed = time.perf_counter(), []
        for rows in batches(decoding, together=self.together):
            computed += [(row.request.tenant, 1) for row in rows]
            self._advance(rows, 1, others)
        token_budget = max(1, token_budget - len(computed))
        for sequence in reading:
            if token_budget > 0 and (sequence.has_state or not self._is_full()):
                count = self._chunk(sequence, token_budget)
                computed.append((sequence.request.tenant, count))
                token_budget -= count
                self._advance([sequence], count, others)
                self._limit_rows(sequence)
        self._turns.charge(time.perf_counter() - began, computed)
        return bool(computed)

    def _is_full(self) -> bool:
        """True if a new sequence has to wait until another one ends."""
        return sum(sequence.has_state for sequence in self.sequences.values()) >= self._most

    def _chunk(self, sequence: Sequence, token_budget: int) -> int:
        """Tokens of a prompt's next forward: all of them where a layer drops its state at a second chunk."""
        pending = len(sequence.pending)
        if pending <= token_budget or not self._forward.patch.continues:
            return pending
        # Some recurrent layers compute a single token by another formula: the last chunk of a prompt has two at least.
        return token_budget - 1 if pending == token_budget + 1 > 2 else token_budget

    def _advance(self, rows: list[Sequence], new_tokens: int, others: set[str]) -> None:
        """A forward over the next tokens of ``rows``, and a token for each that has no more."""
        self.take()
        rows = [row for row in rows if row.request.request_id in self.sequences]  # the others were cancelled
        if not rows:
            return
        for row in rows:
            row.began = time.perf_counter() if row.began < 0 else row.began
        ran_out = False
        try:
            drawn = self._forward.next_tokens(rows, new_tokens)
        except Exception as error:
            ran_out = is_out_of_memory(error)
            if not ran_out:
                raise
        self.heartbeat = time.monotonic()
        if ran_out:
            self._give_up_longest(rows, others)
            return
        for row, token in zip(rows, drawn, strict=False):
            row.token_ids.append(token)
            self._finish(row)
        if not drawn and rows[0].request.on_prefill is not None and not rows[0].num_generated:
            rows[0].request.on_prefill(rows[0].num_computed)

    def _finish(self, row: Sequence, error: Exception | None = None) -> None:
        """Deliver its tokens or ``error``, and forget it at its end."""
        if row.is_complete() or error is not None:
            self.sequences.pop(row.request.request_id, None)
            row.forget()
        self._deliver(row, error)

    def _give_up_longest(self, rows: list[Sequence], others: set[str]) -> None:
        blamed = max(rows, key=lambda row: len(row.token_ids))
        for row in rows:
            row.forget()  # the forward may have changed some layers
        give_back()
        alone = not others and len(self.sequences) == 1
        blamed.request.failure = OutOfMemory("decoding" if blamed.num_generated else "prefill", alone=alone)
        self._finish(blamed, blamed.request.failure)

    def _limit_rows(self, row: Sequence) -> None:
        """Measure once: the states of all rows take no more memory than keys and values of the whole cache."""
        if self._measured or row.cache is None or row.request.sink_window is not None:
            return
        self._measured = True
        keys, states = sizes(row.cache)
        if states:
            most = self._limits.cache_tokens * keys // row.num_computed // states
            self._most = max(1, min(self._limits.max_requests_per_batch, most))
