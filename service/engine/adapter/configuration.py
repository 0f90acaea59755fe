"""The configuration of continuous batching, and the model's as the manager reads it to size its cache."""

from __future__ import annotations

from typing import Any, Self

from transformers import ContinuousBatchingConfig

from patches import Patched, UnsupportedModel
from service.engine.limits import EngineLimits
from service.engine.window import LocalWindow, Sectors

ATTENDING = ("full_attention", "sliding_attention", "chunked_attention")
"""Types of layers that cache keys and values only, as pages do."""


def is_divided(model: Any) -> bool:
    """True if several ranks compute the model."""
    return (getattr(model, "tp_size", None) or 1) > 1


def is_whole_on_cpu(model: Any) -> bool:
    """True if this process alone computes the model, on a CPU."""
    return model.device.type == "cpu" and not is_divided(model)


def batching_config(limits: EngineLimits, *, divided: bool) -> ContinuousBatchingConfig:
    """Continuous batching of transformers within ``limits``, without those of its parts that ours replace.

    A ``divided`` cache gets its memory from us.
    """
    return ContinuousBatchingConfig(
        page_size=limits.page_size,
        num_blocks=1 if divided else -(-limits.cache_tokens // limits.page_size),
        max_batch_tokens=limits.max_batch_tokens,
        max_requests_per_batch=limits.max_requests_per_batch,
        max_memory_percent=1.0,  # the budget is ours: num_blocks is already measured against free memory
        allow_block_sharing=limits.prefix_sharing,
        safety_margin=0.0,  # admission reserves all that a request ever caches; kept prefixes give way to it
        auto_switch_to_flash=False,
        use_cuda_graph=False,  # those of transformers contain its sampling; ours end before it
        use_async_batching=False,
        disable_nccl_graph_mixing=False,  # without graphs it has no effect, and other ranks would be warned of it
    )


def sectors_of(patch: Patched, page_size: int) -> Sectors | None:
    """The division of a cache, if some layers attend to a window or a chunk only."""
    masks, local, calls = set(patch.local_masks.values()), _are_local(patch), patch.cached.calls
    if not any(local):
        return None
    window = LocalWindow(tuple(masks), max(mask.most_keys for mask in masks), page_size)
    return Sectors(local.count(False) * calls, local.count(True) * calls, window)


def _are_local(patch: Patched) -> list[bool]:
    """For each layer that has pages: True if it attends to a window or a chunk only."""
    layers, masks = range(patch.model.config.get_text_config().num_hidden_layers), patch.local_masks
    return [layer in masks for layer in layers if layer not in patch.shared]


class AsCached:
    """A model as the manager reads it to size its cache: a view, for other threads read the model meanwhile.

    Its configuration has the sizes of the cached states. It has no other ranks: our leader alone schedules, and sends
    its forwards to them.

    Raises:
        UnsupportedModel: naming types of layers that pages cannot cache.
    """

    _device_mesh = None

    def __init__(self, patch: Patched) -> None:
        self._model, self.config = patch.model, _SizesAsCached(patch)

    def eval(self) -> Self:
        """The manager keeps this as its model."""
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class _SizesAsCached:
    """The configuration of a model, except for the sizes of its cache.

    Heads and width are those that reach the attention (latent attention caches less by itself). A layer that attends
    twice is two, and one that shares the keys of another is none. The manager does not know layers that attend within
    chunks: all that attend locally are sliding ones to it.
    """

    def __init__(self, patch: Patched) -> None:
        config, cached = patch.model.config.get_text_config(), patch.cached
        self._config = config
        self.num_key_value_heads, self.head_dim = cached.heads, cached.width
        kinds = getattr(config, "layer_types", None) or ()
        unknown = sorted({str(kind) for kind in kinds if kind not in ATTENDING})
        if unknown:
            raise UnsupportedModel(
                f"the paged engine holds keys and values only, and it has layers of the types {', '.join(unknown)}. "
                f"Types that can be served are {', '.join(ATTENDING)}"
            )
        own = ["sliding_attention" if local else "full_attention" for local in _are_local(patch)]
        self.num_hidden_layers, self.layer_types = len(own) * cached.calls, own * cached.calls

    def get_text_config(self) -> Self:
        """Itself: it is that of the part that generates."""
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)
