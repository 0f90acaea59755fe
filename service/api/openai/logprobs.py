"""Log-probabilities in the three shapes that clients read: legacy completions, chat, and vLLM's prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from service.api.generation.pieces import Token
from service.api.generation.token_names import TokenNames
from service.api.openai.answers import ChatAlternative, ChatLogprobs, ChatToken, LegacyLogprobs, PromptLogprob
from service.engine.request import TokenLogprobs
from service.evaluation.scoring.token_scores import TokenScores

LOWEST = -9999.0
"""JSON has no -inf; this is what OpenAI sends for it."""


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)


def legacy(tokens: Sequence[Token], names: TokenNames) -> LegacyLogprobs:
    """The shape of ``/v1/completions``."""
    return LegacyLogprobs(
        tokens=[names(token.token_id) for token in tokens],
        token_logprobs=[None if t.logprobs is None else _finite(t.logprobs.logprob) for t in tokens],
        top_logprobs=[None if t.logprobs is None else _by_name(t.token_id, t.logprobs, names) for t in tokens],
        text_offset=[token.start for token in tokens],
    )


def _by_name(token_id: int, logprobs: TokenLogprobs, names: TokenNames) -> dict[str, float]:
    """The token itself and the alternatives. Clients compare the token's own value with the largest: same number."""
    values = {names(token_id): _finite(logprobs.logprob)}
    for other, logprob in logprobs.top:
        if other != token_id:
            name = names(other)
            values[f"token_id:{other}" if name in values else name] = _finite(logprob)
    return values


def chat(tokens: Sequence[Token], names: TokenNames) -> ChatLogprobs:
    """The shape of ``/v1/chat/completions``."""

    def alternative(token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": names(token_id), "logprob": _finite(logprob), "bytes": names.bytes_of(token_id)}

    content = []
    for token in tokens:
        assert token.logprobs is not None  # only the first token of a prompt has none, and chats echo no prompt
        top = [ChatAlternative(**alternative(*pair)) for pair in token.logprobs.top]
        content.append(ChatToken(**alternative(token.token_id, token.logprobs.logprob), top_logprobs=top))
    return ChatLogprobs(content=content)


def prompt_tokens(prompt_ids: Sequence[int], starts: Sequence[int], scores: TokenScores, top: int) -> list[Token]:
    """Prompt tokens as a completion's own: the first one has no prediction."""
    tokens = [Token(prompt_ids[0], starts[0], None)]
    for row, (token_id, start) in enumerate(zip(prompt_ids[1:], starts[1:], strict=True)):
        tokens.append(Token(token_id, start, row_logprobs(scores, row, top)))
    return tokens


def row_logprobs(scores: TokenScores, row: int, top: int) -> TokenLogprobs:
    """One row of ``scores`` as the engine reports a generated token."""
    pairs = zip(scores.top_ids[row, :top].tolist(), scores.top_logprobs[row, :top].tolist(), strict=True)
    return TokenLogprobs(float(scores.logprobs[row]), tuple(pairs))


def prompt_logprobs(
    prompt_ids: Sequence[int], scores: TokenScores, top: int, names: TokenNames
) -> list[dict[str, PromptLogprob] | None]:
    """vLLM's ``prompt_logprobs``: null, then per token the alternatives and itself, by token id."""
    entries: list[dict[str, PromptLogprob] | None] = [None]
    for row, token_id in enumerate(prompt_ids[1:]):
        logprobs = row_logprobs(scores, row, top)
        found = [(other, logprob, rank) for rank, (other, logprob) in enumerate(logprobs.top, 1)]
        if token_id not in {other for other, _, _ in found}:
            found.append((token_id, logprobs.logprob, int(scores.ranks[row])))
        entries.append(
            {
                str(other): PromptLogprob(logprob=_finite(logprob), rank=rank, decoded_token=names(other))
                for other, logprob, rank in found
            }
        )
    return entries
