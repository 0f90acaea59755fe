"""One step of the model: the forward of the packed row, and a token for each request."""

from __future__ import annotations

from typing import Any

import torch
from transformers.generation.continuous_batching.model_runner import ModelRunner
from typing_extensions import override

from patches import Patched
from service.engine.adapter.inputs import SlottedInputs
from service.engine.request import EngineRequest
from service.engine.sampling import sample, undone_on_error


class RequestRunner(ModelRunner):
    """Runs the packed row under our attention, and draws each request from its own parameters and noise."""

    patch: Patched
    requests: dict[str, EngineRequest]
    inputs_and_outputs: SlottedInputs

    @override
    @torch.inference_mode()  # without version counters, a step of many small operations takes 5 to 10 % less time
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
            with undone_on_error(rows):  # the step may be repeated
                tokens = sample(scores[0, : len(rows)], rows)
            output_ids[0, : len(rows)].copy_(tokens)
