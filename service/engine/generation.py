"""A running generation: its tokens, and the seconds that each phase took."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from service.engine.request import EngineRequest, TokenLogprobs


@dataclass
class Generation:
    """Tokens so far. Times are in seconds; ``first_token_s`` counts from admission."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    first_token_s: float | None = None
    cached_tokens: int = 0

    @property
    def elapsed_s(self) -> float:
        """From admission to the latest token."""
        return self.queue_s + self.prefill_s + self.decode_s

    def update(self, request: EngineRequest, output: Any, created: float, now: float) -> None:
        """Take over one output of the manager; ``created`` and ``now`` are on the clock of ``time.perf_counter``."""
        if self.first_token_s is None:
            self.first_token_s = now - created
            self.queue_s = output.lifespan[0] - created
            self.prefill_s = self.first_token_s - self.queue_s
            self.cached_tokens = request.cached_tokens
        self.decode_s = now - created - self.queue_s - self.prefill_s
        self.token_ids = output.generated_tokens
        self.logprobs = request.logprobs[: len(output.generated_tokens)]
        if output.is_finished():
            ended = bool(self.token_ids) and self.token_ids[-1] in request.ends_at
            self.finish_reason = "stop" if ended else "length"
