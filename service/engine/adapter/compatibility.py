"""Checks that the installed transformers has the private parts that the adapter relies on.

The manager takes no classes for its parts, so ``adopt`` changes the class of each part after it is built. A part that
transformers renames, or calls in another order, would otherwise fail late or give wrong numbers.
"""

from __future__ import annotations

import inspect
from importlib.metadata import version
from itertools import takewhile

from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.cache_allocators import FullAttentionCacheAllocator
from transformers.generation.continuous_batching.cache_allocators.cache_allocator import BlockLedger
from transformers.generation.continuous_batching.cache_allocators.cache_pool import RegularTrees
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.continuous_batching.scheduler import FIFOScheduler

from patches import UnsupportedModel

EXPECTED = "5.24"

ATTRIBUTES: dict[type, str] = {
    ContinuousBatchingIOs: "cache device position_ids requests_in_batch num_request_in_batch total_seqlen_q "
    "compute_stream attention_mask logits_indices max_length_q max_length_k total_seqlen_k cumulative_seqlens_k "
    + "config model_dtype req_id_to_new_token_position _transfer_inputs input_ids cumulative_seqlens_q num_q_tokens "
    "use_block_table max_kv_read true_read_sizes true_write_sizes read_index_storage write_index_storage",
    ContinuousBatchProcessor: "inputs_and_outputs model_runner scheduler cache output_router",
    ModelRunner: "inputs_and_outputs",
    PagedAttentionCache: "cache_allocators layer_to_allocator pool num_blocks read_cache_limit "
    "evict_cached_blocks num_sectors bytes_per_sector max_tokens_read use_prefix_sharing",
    FIFOScheduler: "active_requests waiting_requests max_requests_per_batch block_new_requests cache finish_request "
    "_process_candidates _cleanup_waiting_queue _get_waiting_candidates",
    FullAttentionCacheAllocator: "index pool ledger block_table tokens_per_page block_physical_stride "
    "write_trash_index layer_indices cache_tensor blocks_per_sector _copy_view _kv_token_views _kv_page_views "
    "bytes_per_block _compute_blocks_needed",
    BlockLedger: "cached_blocks hash_to_block block_to_hash",
    RegularTrees: "trees elems_per_tree pop_leaves _length",
}
"""Class of a part -> its attributes that the adapter uses without overriding them."""

SCHEDULING = ("_infer_request_tokens", "read_cache_limit", "can_store_request_tokens")
"""Names in the order in which ``_process_candidates`` uses them for one request."""


class IncompatibleTransformers(UnsupportedModel):
    """No model can be served with the installed transformers; the message names both versions and the difference."""

    def __init__(self, difference: str) -> None:
        super().__init__(
            f"the paged engine is written for transformers {EXPECTED}, and {version('transformers')} is installed: "
            f"{difference}"
        )


def adopt(built: object, kind: type, **attributes: object) -> None:
    """Make ``built``, a part of the manager, an instance of the subclass ``kind`` with additional ``attributes``.

    Raises:
        IncompatibleTransformers: when the part is not what ``kind`` extends.
    """
    ours = list(takewhile(lambda each: each not in ATTRIBUTES, kind.__mro__))
    base = kind.__mro__[len(ours)]
    if type(built) is not base:
        raise IncompatibleTransformers(f"the manager builds {type(built).__name__} in place of {base.__name__}")
    check_attributes(built, base)
    taken = [name for name in attributes if hasattr(built, name)]
    if taken:
        raise IncompatibleTransformers(f"{base.__name__} already uses the name {', '.join(taken)}")
    for each in ours:
        check_overrides(each)
    built.__class__ = kind
    vars(built).update(attributes)


def check_attributes(built: object, base: type) -> None:
    """Check that ``built`` has what the adapter uses of a ``base``.

    Raises:
        IncompatibleTransformers: naming what it lacks.
    """
    missing = [name for name in ATTRIBUTES[base].split() if not hasattr(built, name)]
    if missing:
        raise IncompatibleTransformers(f"{base.__name__} has no {', '.join(missing)}")


def check_overrides(kind: type) -> None:
    """Compare each method that ``kind`` marks with ``override`` with that of its base class, by its parameters.

    Raises:
        IncompatibleTransformers: naming the first method that the base class lacks, or whose parameters differ.
    """
    base = kind.__bases__[0]
    for name, method in vars(kind).items():
        if not getattr(method, "__override__", False):
            continue
        if not hasattr(base, name):
            raise IncompatibleTransformers(f"{base.__name__} has no {name}")
        ours, theirs = (inspect.signature(function).parameters for function in (method, getattr(base, name)))
        named = [parameter.name for parameter in ours.values() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
        if named != list(theirs)[: len(named) if len(named) < len(ours) else None]:
            raise IncompatibleTransformers(f"{base.__name__}.{name} takes ({', '.join(theirs)})")


def check_scheduling() -> None:
    """Check that the scheduler reads the limit of the cache right after it has asked for a request's tokens.

    Raises:
        IncompatibleTransformers: when it does not.
    """
    names = FIFOScheduler._process_candidates.__code__.co_names  # in the order of their first use
    if [name for name in names if name in SCHEDULING] != list(SCHEDULING):
        raise IncompatibleTransformers(
            f"FIFOScheduler._process_candidates does not use {', '.join(SCHEDULING)} in turn"
        )
