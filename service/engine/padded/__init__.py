"""An engine over the model's own caches, for models that pages cannot cache, such as those with recurrent layers.

Each sequence has the cache that the model itself builds. A prompt is read in chunks, as a batch of one row. Rows that
decode are joined into padded batches of one new token per row. So padding never enters a recurrent state.

Limits:

- Prefixes are not shared, because a recurrent state cannot be cut.
- Batches grow by copying, and up to half of a batch is padding. A row whose encoding forgets tokens runs alone.
- The states of all rows take at most as much memory as keys and values of the whole cache. Other requests wait.
- Rows do not share a forward if padding changes their keys. This holds for blocks and keys of several tokens, which
  begin at fixed columns. If the check at the start misses it, the first rows that do not join end the sharing.
- After a forward without enough memory, its other rows compute their tokens again.
- A model that drops its state at a second chunk (``Patched.continues``) reads each prompt in one forward.
"""

from __future__ import annotations

from service.engine.padded.loop import OnApart, PaddedLoop

__all__ = ["OnApart", "PaddedLoop"]
