"""The work between two steps: a card that replays graphs waits for it. The rest comes after the next launch."""

from __future__ import annotations

from typing import Any

from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor
from transformers.generation.continuous_batching.requests import RequestState
from typing_extensions import override

from service.engine.adapter.cards.ahead import MOST_ROWS
from service.engine.adapter.inputs import SlottedInputs
from service.engine.adapter.runner import RequestRunner
from service.engine.request import EngineRequest


class StepProcessor(ContinuousBatchProcessor):
    """Tokens of a step that replayed a graph are handed out while the card computes the next one.

    ``held`` are the requests with such tokens. An idle thread, an error and a step without a graph hand them out too.
    """

    inputs_and_outputs: SlottedInputs
    model_runner: RequestRunner
    requests: dict[str, EngineRequest]
    held: list[RequestState]
    tokens: list[int]
    """Those that the last replayed step has drawn."""

    def hand_out(self) -> None:
        """Deliver the tokens of ``held``, without those of requests that are cancelled."""
        held, self.held = self.held, []
        outputs = [state.to_generation_output() for state in held if state.request_id in self.requests]
        if outputs:
            self.output_router.deliver_batch(outputs)

    @override
    def prepare_next_batch(self) -> bool:
        ready: bool = super().prepare_next_batch()
        if not ready:
            self.hand_out()
            self.model_runner.drop_ahead()
        return ready

    @override
    def _generation_step(self, model: Any) -> None:
        inputs = self.inputs_and_outputs
        if inputs.rows is not None and inputs.is_brief:
            if self.model_runner.replay():
                if self._goes_on():
                    self.model_runner.go_ahead()
                self.hand_out()
                assert self.model_runner.drawn is not None
                self.tokens = self.model_runner.drawn.read()
                return
            inputs.write_whole()
        self.hand_out()
        self.model_runner.drop_ahead()
        super()._generation_step(model)

    def _goes_on(self) -> bool:
        """True if the next step has the requests of this one, unless one ends by its token or is cancelled.

        A request that wants log-probabilities waits for its token anyway; penalties and grammars depend on it.
        """
        states = [future.state for future in self.inputs_and_outputs.requests_in_batch]
        scheduler = self.scheduler
        if len(states) > MOST_ROWS or len(scheduler.active_requests) > len(states) or scheduler.waiting_requests:
            return False
        if any(each is None or not each.empty() for each in (self.input_queue, self.cancel_queue)):
            return False
        requests = [self.requests.get(state.request_id) for state in states]
        return all(
            request is not None
            and request.sampling.logprobs is None
            and not request.sampling.needs_tokens
            and state.generated_len() + 1 < request.max_new_tokens
            for request, state in zip(requests, states, strict=True)
        )

    @override
    def update_batch(self) -> None:
        """As the base class. Of a step that replayed a graph, tokens are held."""
        inputs = self.inputs_and_outputs
        if not inputs.requests_in_batch:  # the last one ran out of memory
            return
        if not inputs.is_brief:
            super().update_batch()
            return
        for future, token in zip(inputs.requests_in_batch, self.tokens, strict=True):
            state = future.state
            finished = state.update_and_check_completion(token, None)
            if future.complete_blocks:  # before the request gives its blocks back
                self.cache.mark_complete_blocks(state, future.complete_blocks)
            if finished:
                self.scheduler.finish_request(state.request_id)
                self.scheduler.block_new_requests = False
            self.held.append(state)

    @override
    def _handle_request_error(self, error: Exception, state: RequestState) -> None:
        self.hand_out()  # an error is the last output
        super()._handle_request_error(error, state)
