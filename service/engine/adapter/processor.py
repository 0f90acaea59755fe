"""The work between two steps: a card that replays graphs waits for it. The rest comes after the next launch."""

from __future__ import annotations

from typing import Any

from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor
from transformers.generation.continuous_batching.requests import RequestState
from typing_extensions import override

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
        return ready

    @override
    def _generation_step(self, model: Any) -> None:
        inputs = self.inputs_and_outputs
        if inputs.rows is not None and inputs.is_brief:
            if self.model_runner.replay():
                self.hand_out()
                self.model_runner.expect()
                inputs.retrieve_device_outputs()
                return
            inputs.write_whole()
        self.hand_out()
        super()._generation_step(model)

    @override
    def update_batch(self) -> None:
        """As the base class. Of a step that replayed a graph, tokens are held."""
        inputs = self.inputs_and_outputs
        if not inputs.is_brief:
            super().update_batch()
            return
        futures, tokens, _ = inputs.prepare_batch_update()
        for future, token in zip(futures, tokens, strict=True):
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
