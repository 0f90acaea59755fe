"""Tokens with bits above them: equal texts of different cache keys have different hashes."""

from __future__ import annotations

from transformers.generation.continuous_batching.requests import RequestState, RequestStatus


class Salted:
    """``tokens`` with bits above them, made for the part that is read: the cache reads the last page of a text."""

    def __init__(self, tokens: list[int], salt: int) -> None:
        self._tokens, self._salt = tokens, salt

    def __getitem__(self, part: slice) -> list[int]:
        return [token | self._salt for token in self._tokens[part]]

    def __add__(self, none: list[int]) -> Salted:
        return self


class TokensOf:
    """A request state with salted tokens, as far as the cache reads it."""

    def __init__(self, state: RequestState, tokens: Salted) -> None:
        self.request_id = state.request_id
        # The cache skips finished requests, whose blocks are gone in asynchronous batching. Ours still have theirs,
        # and a request for a single token would leave nothing to share.
        self.status = RequestStatus.DECODING
        self.initial_tokens, self.generated_tokens = tokens, []  # type: ignore[var-annotated]
