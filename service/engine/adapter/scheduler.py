"""Scheduling: tenants in turn, by the tokens that a step reads."""

from __future__ import annotations

from typing import Any

from transformers.generation.continuous_batching.requests import FutureRequestState, RequestState, RequestStatus
from transformers.generation.continuous_batching.scheduler import FIFOScheduler
from typing_extensions import override

from service.engine.adapter.pages.cache import EncodingCache
from service.engine.request import EngineRequest
from service.engine.thread.fairness import candidates
from service.sharing.turns import Turns


class FairScheduler(FIFOScheduler):
    """Takes the candidates of a step in the order of ``fairness``."""

    cache: EncodingCache
    requests: dict[str, EngineRequest]
    turns: Turns
    others: set[str]
    """Tenants with work beside generation, as the manager saw them before this step."""
    prefill_beside_others: int | None

    def tenant_of(self, state: RequestState) -> str:
        request = self.requests.get(state.request_id)
        return "" if request is None else request.tenant

    @override
    def schedule_batch(
        self, token_budget: int, cache_budget: int
    ) -> tuple[list[FutureRequestState] | None, bool, int, int]:
        """As the base class, from the candidates of this turn."""
        decoding, mine, token_budget = candidates(
            *self._by_work(), self.tenant_of, self.turns, self.others, token_budget, self.prefill_beside_others
        )
        rows = self.max_requests_per_batch - (1 if mine else 0)  # a full batch must not keep a prompt out for ever
        step = None if mine else self._of_single_tokens(decoding[:rows], token_budget, cache_budget)
        if step is not None:
            return step
        taken: set[str] = set()
        scheduled, failed, fast, tokens, read = self._process_candidates(
            [*decoding[:rows], *mine], token_budget, cache_budget, taken
        )
        self._cleanup_waiting_queue(taken)
        if not scheduled and failed:
            return None, fast, 0, 0
        return scheduled, fast, tokens, read

    def _of_single_tokens(
        self, states: list[RequestState], token_budget: int, cache_budget: int
    ) -> tuple[list[FutureRequestState], bool, int, int] | None:
        """The step of ``_process_candidates`` for requests that decode; None if it has to choose among them."""
        cache, read, longest = self.cache, 0, 0
        if not 0 < len(states) <= min(token_budget, self.max_requests_per_batch):
            return None
        scheduled = []
        for state in states:
            needed: int | None = cache.read_inside_page(state)
            complete: dict[str, int] = {}
            if not cache.is_inside_page(state):
                complete, needed = cache.count_new_complete_blocks(state, 1), cache.read_by_next(state)
            if needed is None or len(state.tokens_to_process) != 1:
                return None
            read, longest = read + needed, max(longest, state.position_offset)
            scheduled.append(FutureRequestState(state, True, complete, 1))
        if read >= cache_budget:
            return None
        self.starved_requests = []
        fast = cache.max_blocks_per_request > 0 and longest < cache.max_decode_fast_path_length
        return scheduled, fast, len(states), read

    def _by_work(self) -> tuple[list[RequestState], list[RequestState]]:
        """(requests that decode, requests with prompt left to read), oldest first."""
        active = self.active_requests.values()
        decoding = [state for state in active if state.status == RequestStatus.DECODING]
        reading = [state for state in active if state.status == RequestStatus.PREFILLING]
        return decoding, reading + ([] if self.block_new_requests else self._get_waiting_candidates())

    @override
    def _infer_request_tokens(self, state: RequestState, *args: Any) -> list[int]:
        """Also limits the count of cached tokens to those that a step of this request reads.

        All tokens of the request may be more than the cache has, and the request would never be scheduled again.
        """
        tokens = super()._infer_request_tokens(state, *args)
        self.cache.read_cache_limit = self.cache.most_read(state)  # read right after this, for this request
        return tokens
