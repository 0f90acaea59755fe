"""One step of the model: the forward of the packed row, and a token for each request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import structlog
import torch
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.continuous_batching.utils import stream_context
from typing_extensions import override

from patches import PagedBatch, Patched, Recordings
from service.engine.adapter.cards.ahead import Ahead, Drawn
from service.engine.adapter.cards.graphs import DecodeGraphs, GraphUse
from service.engine.adapter.inputs import SlottedInputs
from service.engine.request import EngineRequest
from service.engine.sampling import sample, undone_on_error
from service.engine.thread.out_of_memory import is_out_of_memory

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
    drawn: Drawn | None
    """Tokens of the last step that a graph replayed."""
    ahead: Ahead | None
    """The step that the card computes after it."""

    @override
    def compute_batch(self, model: Any, batch_data: dict[str, Any]) -> None:
        self._wait_for_current_stream()
        super().compute_batch(model, batch_data)

    def _wait_for_current_stream(self) -> None:
        """Inputs and tables of encodings were written on it."""
        stream = self.inputs_and_outputs.compute_stream
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(stream.device))

    def replay(self) -> bool:
        """Launch the step that ``rows`` of the inputs describe, and its sampling; False without a graph of it.

        If it runs since ``go_ahead``, nothing is launched.
        """
        rows, ahead = self.inputs_and_outputs.rows, self.ahead
        assert self.graphs is not None
        assert rows is not None
        if ahead is not None and ahead.is_step_of(rows):
            self.ahead, self.drawn, variant = None, ahead.drawn, ahead.variant
        else:
            self.drop_ahead()
            launched = self._launched(partial(self.graphs.replayed, rows), 0)
            if launched is None:
                return False
            self.drawn, variant = launched
        self.on_step("replayed", variant)
        self.graphs.expect()
        return True

    def go_ahead(self) -> None:
        """Launch the next step, if it is the expected one: the card need not wait for the host between both."""
        rows, before = self.inputs_and_outputs.rows, self.drawn
        assert self.graphs is not None
        assert rows is not None
        assert before is not None, "the step before was replayed"
        try:
            launched = self._launched(partial(self.graphs.replayed_ahead, before.tokens), 1)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._wait_for_card()  # the step comes again
            return
        if launched is not None:
            self.ahead = Ahead(rows.following, rows.known, before, *launched)

    def drop_ahead(self) -> None:
        """Forget a step that was launched in vain, once the card has ended it: another one uses its memory."""
        if self.ahead is not None:
            self.ahead = None
            self._wait_for_card()

    def let_steps_end(self) -> None:
        """Have work on the current stream behind all steps: it may write tables of encodings that they read."""
        stream = self.inputs_and_outputs.compute_stream
        if stream is not None:
            torch.cuda.current_stream(stream.device).wait_stream(stream)

    def _wait_for_card(self) -> None:
        stream = self.inputs_and_outputs.compute_stream
        if stream is not None:
            stream.synchronize()

    @torch.inference_mode()
    def _launched(
        self, replay: Callable[[], tuple[Mapping[int, int], torch.Tensor] | None], ahead: int
    ) -> tuple[Drawn, str] | None:
        """Tokens of a step and the kernel's variant, or None if ``replay`` has no graph.

        Requests have ``ahead`` tokens more than the host knows.
        """
        self._wait_for_current_stream()
        with stream_context(self.inputs_and_outputs.compute_stream):
            found = replay()
            if found is None:
                return None
            longest, scores = found
            return Drawn(self._draw(scores, ahead)), self.patch.variant(longest).label

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
            variant = self.patch.variant(batch.longest).label
        self.on_step(use, variant)

    def _by_graph(self, batch_data: dict[str, Any]) -> tuple[GraphUse, torch.Tensor | None]:
        """(what the step has of a graph, logits [rows, vocabulary] or None for the ordinary forward)."""
        if self.graphs is None or not self.inputs_and_outputs.decodes:
            return "none", None
        return self.graphs.logits(batch_data)

    @override
    def _sample(self, scores: torch.Tensor, output_ids: torch.Tensor) -> None:
        tokens = self._draw(scores[0])
        output_ids[0, : len(tokens)].copy_(tokens)

    def _draw(self, scores: torch.Tensor, ahead: int = 0) -> torch.Tensor:
        """Tokens int64 [n] of the requests that get one, from ``scores`` float32 [n or more, vocabulary].

        Requests have ``ahead`` tokens more than the host knows.
        """
        states = [f.state for f in self.inputs_and_outputs.requests_in_batch if f.has_new_token]
        rows = [self.requests.get(state.request_id) for state in states]
        for request, state in zip(rows, states, strict=True):
            if request is not None:
                request.before_token(state.generated_tokens, ahead)
        with undone_on_error(rows):  # the step may be repeated
            return sample(scores[: len(rows)], rows)
