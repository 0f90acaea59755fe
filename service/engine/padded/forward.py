"""Forwards of the padded engine: a chunk of one prompt, or one new token for each of several rows."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from patches import Patched, encode, uploaded
from service.engine.padded.sequence import Batch, Sequence
from service.engine.sampling import sample, undone_on_error


class BatchForward:
    """The patched model as the engine calls it."""

    def __init__(self, patch: Patched) -> None:
        self.patch = patch
        self._options: dict[str, Any] = {"use_cache": True}
        if keeps_logits(patch.model):
            self._options["logits_to_keep"] = 1

    @torch.no_grad()
    def __call__(self, rows: list[Sequence], new_tokens: int) -> torch.Tensor:
        """float32 logits [rows, vocabulary] after the next ``new_tokens`` tokens of every row, which enter its cache.

        An exception leaves the caches of ``rows`` in no defined state.
        """
        batch, device = Batch.of(rows), self.patch.model.device
        tokens = uploaded(torch.tensor([row.pending[:new_tokens] for row in rows]), device)
        computed = uploaded(torch.tensor([row.num_computed for row in rows]), device)[:, None]
        slots = uploaded(torch.tensor([row.request.slot for row in rows]), device)[:, None]
        output = self.patch.model(
            input_ids=tokens,
            position_ids=encode(computed + torch.arange(new_tokens, device=device), slots),
            cache=batch.cache,
            attention_mask=_padding_mask([row.num_computed for row in rows], new_tokens, device),
            **self._options,
        )
        cache = getattr(output, "cache", None)
        if cache is None:
            raise RuntimeError("its forward returns no cache")
        batch.computed(cache, new_tokens)
        if rows[0].request.sink_window is not None:  # alone in its batch
            self.patch.evict(rows[0].cache, rows[0].request.slot)
        logits: torch.Tensor = output.logits[:, -1]
        return logits.float()

    def next_tokens(self, rows: list[Sequence], new_tokens: int) -> list[int]:
        """A forward over the next ``new_tokens`` tokens of ``rows``; a token for each row, or none if more are left."""
        logits, requests = self(rows, new_tokens), [row.request for row in rows]
        if rows[0].pending:
            return []
        for row in rows:
            row.request.before_token(row.generated())
        with undone_on_error(requests):
            drawn: list[int] = sample(logits, requests).tolist()
        return drawn


def keeps_logits(model: Any) -> bool:
    """True if a forward computes the logits of the last ``logits_to_keep`` tokens only."""
    return "logits_to_keep" in inspect.signature(model.forward).parameters


def _padding_mask(computed: list[int], new_tokens: int, device: torch.device) -> torch.Tensor | None:
    """Mask [rows, tokens] of rows padded on the left to the longest; None for rows of one length."""
    longest = max(computed)
    if min(computed) == longest:
        return None
    columns = torch.arange(longest + new_tokens, device=device)
    return (columns >= longest - uploaded(torch.tensor(computed), device)[:, None]).long()
