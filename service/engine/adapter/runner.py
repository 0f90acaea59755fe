"""One step of the model: the forward of the packed row, and a token for each request."""

from __future__ import annotations

from typing import Any

import torch
from transformers.generation.continuous_batching.model_runner import ModelRunner
from typing_extensions import override

from patches import Patched
from service.engine.adapter.inputs import SlottedInputs
from service.engine.request import EngineRequest
from service.engine.sampling import sample


class RequestRunner(ModelRunner):
    """Runs the packed row under our attention, and draws each request from its own parameters and noise."""

    patch: Patched
    requests: dict[str, EngineRequest]
    inputs_and_outputs: SlottedInputs

    @override
    def _forward_process_and_sample(self, model: Any, batch_data: dict[str, Any], *args: Any) -> None:
        with self.patch.packed(self.inputs_and_outputs.batch, batch_data):
            super()._forward_process_and_sample(model, batch_data, *args)

    @override
    def _sample(self, scores: torch.Tensor, output_ids: torch.Tensor) -> None:
        states = [f.state for f in self.inputs_and_outputs.requests_in_batch if f.has_new_token]
        rows = [self.requests.get(state.request_id) for state in states]
        if rows:
            for request, state in zip(rows, states, strict=True):
                if request is not None:
                    request.generated = state.generated_len()
            noise = [None if r is None or r.generator is None else r.generator.get_state() for r in rows]
            drawn = [0 if r is None else len(r.logprobs) for r in rows]
            try:
                tokens = sample(scores[0, : len(rows)], rows)
            except Exception:
                _undo_draws(rows, noise, drawn)  # the step may be repeated
                raise
            output_ids[0, : len(rows)].copy_(tokens)


def _undo_draws(rows: list[EngineRequest | None], noise: list[torch.Tensor | None], drawn: list[int]) -> None:
    for request, state, length in zip(rows, noise, drawn, strict=True):
        if request is not None:
            del request.logprobs[length:]
            if request.generator is not None and state is not None:
                request.generator.set_state(state)
