"""An engine over the model's own caches, for models that pages cannot cache, such as those with recurrent layers.

Each sequence has the cache that the model itself builds. A prompt is read in chunks, as a batch of one row. Rows that
decode are joined into padded batches of one new token per row, so padding never enters a recurrent state. Nothing here
uses private names of transformers. Prefixes are not shared, because a recurrent state cannot be cut.
"""

from __future__ import annotations

from service.engine.padded.loop import PaddedLoop

__all__ = ["PaddedLoop"]
