"""The batches of a run: stages of text and of synthetic recall, from short rows to whole ones.

A model of this size learns no recall from books. It learns from rows that reward it, on short distances first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from service.models.training.corpus import PackedTokens, batch_order
from service.models.training.recall import RecallRows
from service.models.training.tokenizer import special_ids

Batch = tuple[torch.Tensor, torch.Tensor]
"""Inputs and targets, int64 [rows, context]; a target of ``recall.IGNORED`` does not count."""


@dataclass(frozen=True)
class Stage:
    """A ``share`` of a run's steps on rows of ``context`` tokens, of which the share ``recall`` is synthetic."""

    share: float
    context: int
    recall: float = 0.0


RECALL = (
    Stage(0.15, 64, recall=0.9),
    Stage(0.15, 128, recall=0.7),
    Stage(0.7, 256, recall=0.6),
)
"""For a model that was trained on text: induction appears on short rows and is stretched to whole ones."""


class Curriculum:
    """Batches of about ``tokens`` tokens over the packed text in ``path``, for a run of ``steps`` steps.

    The batch of a step is a pure function of the seed and the step. So a resumed run reads on where it stopped.
    """

    def __init__(
        self, path: Path, tokenizer: Tokenizer, stages: Sequence[Stage], tokens: int, steps: int, seed: int
    ) -> None:
        bos, _ = special_ids(tokenizer)
        self.stages, self.tokens, self.seed = stages, tokens, seed
        self._ends = np.round(np.cumsum([stage.share for stage in stages]) * steps).astype(int)
        self._text = [PackedTokens(path, bos, stage.context) for stage in stages]
        self._recall = [RecallRows(text.ids, tokenizer, text.context, seed) for text in self._text]

    def batch(self, step: int) -> Batch:
        """Rows of step ``step``: text first, then recall."""
        number = min(int(np.searchsorted(self._ends, step, side="right")), len(self.stages) - 1)
        stage, text = self.stages[number], self._text[number]
        rows = max(1, self.tokens // stage.context)
        recalled = round(rows * stage.recall)
        parts = [self._recall[number].row(step * rows + place) for place in range(recalled)]
        batches = [with_bos(text.bos_token_id, *map(np.stack, zip(*parts, strict=True)))] if parts else []
        if rows > recalled:
            batches.insert(0, text.rows(batch_order(len(text), rows - recalled, step, self.seed)))
        inputs, targets = zip(*batches, strict=True)
        return torch.cat(inputs), torch.cat(targets)


def with_bos(bos_token_id: int, ids: np.ndarray, targets: np.ndarray) -> Batch:
    """Token ids as the inputs that predict them: BOS, then all but the last."""
    bos = np.full((len(ids), 1), bos_token_id, dtype=ids.dtype)
    return torch.from_numpy(np.concatenate((bos, ids[:, :-1]), axis=1)), torch.from_numpy(targets)
