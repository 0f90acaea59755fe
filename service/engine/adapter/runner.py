"""One step of the model: the forward of the packed row, and a token for each request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import structlog
import torch
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.continuous_batching.utils import stream_context
from typing_extensions import override

from patches import DecodeStep, PagedBatch, Patched, Recordings
from service.engine.adapter.graphs import DecodeGraphs, GraphUse
from service.engine.adapter.inputs import SlottedInputs
from service.engine.request import EngineRequest
from service.engine.sampling import sample, undone_on_error

log = structlog.get_logger()

OnStep = Callable[[GraphUse, str], object]
"""Called after each step with what it had of a graph, and with the kernel's variant, or "none" without one."""


def recordings(failures: list[str]) -> Recordings:
    """Lists of decode steps. The reason of a size that is refused one goes to ``failures`` and is logged, once."""

    def failed(reason: str) -> None:
        failures.append(reason)
        log.warning("recording_failed", error=reason)

    return Recordings(failed)


class RequestRunner(ModelRunner):
    """Runs the packed row under our attention, and draws each request from its own parameters and noise."""

    patch: Patched
    requests: dict[str, EngineRequest]
    inputs_and_outputs: SlottedInputs
    graphs: DecodeGraphs | None
    recordings: Recordings | None
    on_step: OnStep

    @override
    def compute_batch(self, model: Any, batch_data: dict[str, Any]) -> None:
        self._wait_for_current_stream()
        super().compute_batch(model, batch_data)

    def _wait_for_current_stream(self) -> None:
        """Inputs and tables of encodings were written on it."""
        stream = self.inputs_and_outputs.compute_stream
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(stream.device))

    @torch.inference_mode()
    def replay(self) -> bool:
        """Launch the step that ``rows`` of the inputs describe, and its sampling; False without a graph of it."""
        inputs = self.inputs_and_outputs
        assert self.graphs is not None
        assert inputs.rows is not None
        self._wait_for_current_stream()
        with stream_context(inputs.compute_stream):
            found = self.graphs.replayed(inputs.rows)
            if found is None:
                return False
            longest, scores = found
            self._sample(scores[None], inputs.output_ids)
        self.on_step("replayed", self.patch.variant(longest).label)
        return True

    def expect(self) -> None:
        """While the card computes: prepare for the next step."""
        assert self.graphs is not None
        self.graphs.expect()

    @override
    @torch.inference_mode()  # without version counters, a step of many small operations takes 5 to 10 % less time
    def _forward_process_and_sample(self, model: Any, batch_data: dict[str, Any], *args: Any) -> None:
        batch, (*_, output_ids) = self.inputs_and_outputs.batch, args
        use, scores = self._by_graph(batch_data)
        if scores is None:
            recordings = self.recordings if self.inputs_and_outputs.decodes else None
            with self.patch.packed(batch, batch_data, recordings):
                super()._forward_process_and_sample(model, batch_data, *args)
            use = use if recordings is None else recordings.use
        else:
            self._sample(scores[None], output_ids)
        variant = "none"
        if isinstance(batch, PagedBatch) and batch.backend == "triton":
            variant = self.patch.variant(batch.step.longest).label
        self.on_step(use, variant)

    def _by_graph(self, batch_data: dict[str, Any]) -> tuple[GraphUse, torch.Tensor | None]:
        """(what the step has of a graph, logits [rows, vocabulary] or None for the ordinary forward)."""
        inputs = self.inputs_and_outputs
        if self.graphs is None or not inputs.decodes:
            return "none", None
        assert isinstance(inputs.batch, PagedBatch), "graphs are for block tables only"
        step = inputs.batch.step
        assert not isinstance(step, DecodeStep), "it comes from the inputs"
        tokens = [token for tokens in inputs.tokens_in_batch for token in tokens]
        return self.graphs.logits(batch_data, step.sequences, tokens)

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
