"""Token ids and an encoding in, one negative log-likelihood per token out. Everything else is arithmetic.

Prefill runs in chunks through a cache and never holds logits of more than one chunk. A chunk's targets
reach one token past its inputs, so the prediction across each boundary is scored too.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import numpy as np
import torch
import torch.nn.functional as F

from patches import Patched, encode

Nll = np.ndarray
LOGITS_BYTES = 64 << 20
"""Most bytes of one chunk's float32 logits: with a large vocabulary, chunks get shorter."""


def chunk_length(wanted: int, vocab_size: int) -> int:
    """Tokens per chunk, at most ``wanted``."""
    return max(16, min(wanted, LOGITS_BYTES // (4 * vocab_size)))


def token_nll(patch: Patched, token_ids: Sequence[int], slot: int, chunk: int) -> Generator[int, None, Nll]:
    """NLL in nats of tokens 1 .. n-1 of ``token_ids``, float64 [n - 1]; yields tokens per chunk done.

    A generator because the caller runs it between generation steps, one chunk at a time.
    """
    model, device = patch.model, patch.model.device
    chunk = chunk_length(chunk, model.config.get_text_config().vocab_size)
    nll = np.empty(max(len(token_ids) - 1, 0), dtype=np.float64)
    cache = None
    for start in range(0, len(token_ids) - 1, chunk):
        # The last token is only ever a target: it needs no forward of its own.
        stop = min(start + chunk, len(token_ids) - 1)
        ids = torch.tensor([token_ids[start : stop + 1]], device=device)
        position_ids = encode(torch.arange(start, stop, device=device), slot)[None]
        with torch.no_grad():
            output = model(input_ids=ids[:, :-1], position_ids=position_ids, past_key_values=cache, use_cache=True)
            losses = F.cross_entropy(output.logits[0].float(), ids[0, 1:], reduction="none")
        nll[start:stop] = losses.double().cpu().numpy()
        cache = output.past_key_values
        del output, losses
        yield stop - start
    return nll
