"""Tokens that a request has used, for all of the OpenAI-compatible routes."""

from __future__ import annotations

from collections.abc import Sequence

from service.api.generation.prepared import PreparedPrompt
from service.api.openai.answers import CompletionTokensDetails, PromptTokensDetails, Usage
from service.engine.generation import Generation


class TokensUsed:
    """Tokens of the prompts of one request, and of the answers that have ended.

    A prompt's cached tokens are those that each of its answers found in the cache. Scores find none there.
    """

    def __init__(self, prompts: Sequence[PreparedPrompt]) -> None:
        self._prompts = prompts
        self._cached: dict[int, int] = {}
        self.completion = self.reasoning = 0

    def add(self, generation: Generation, prompt: int = 0, reasoning: int = 0) -> None:
        """An answer to the prompt at this place has ended, with so many tokens of ``reasoning``."""
        self.completion += len(generation.token_ids)
        self.reasoning += reasoning
        found = 0 if self._prompts[prompt].wanted.scored else generation.cached_tokens
        self._cached[prompt] = min(found, self._cached.get(prompt, found))

    def usage(self) -> Usage:
        read = sum(len(each.prompt.token_ids) for each in self._prompts)
        return Usage(
            prompt_tokens=read,
            completion_tokens=self.completion,
            total_tokens=read + self.completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(self._cached.values())),
            completion_tokens_details=CompletionTokensDetails(reasoning_tokens=self.reasoning),
        )

    def so_far(self, generation: Generation, prompt: int = 0, reasoning: int = 0) -> Usage:
        """Usage of one answer that goes on."""
        alone = TokensUsed([self._prompts[prompt]])
        alone.add(generation, reasoning=reasoning)
        return alone.usage()
