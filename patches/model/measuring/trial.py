"""One forward under tables of our choice, which records the states that reach each layer's attention."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set
from typing import Any, NamedTuple

import torch
from torch import nn

from patches.attention.layer import among_others, bias_of, index_of, is_among_tokens
from patches.model.architectures import MaskKind
from patches.model.measuring.geometry import UnsupportedModel
from patches.model.rotary_tables import RotaryTable, RotaryTables, TableFormat, plain_positions, planes_of

TOKENS = 16

UNUSED = frozenset({"position_ids", "s_aux", "sinks"})
"""Tensors that attention gets and needs no more, or that it has an argument for."""


class CachedStates(NamedTuple):
    """States of one token in one layer of a paged cache. Rows are alike in all layers, for keys and for values.

    A row has ``numbers``, as many as the largest layer needs. ``heads`` are the most key heads of a layer, ``alike`` if
    every layer has them. ``expanded`` are the numbers of a row once each query head has its own. A layer that attends
    ``calls`` times in a forward, over other values each time (DiffLlama), has as many rows.
    """

    heads: int = 0
    numbers: int = 0
    expanded: int = 0
    alike: bool = True
    calls: int = 1

    @property
    def width(self) -> int:
        """Numbers per head and row of a page."""
        return -(-self.numbers // self.heads)


class Trial:
    """One forward of ``tokens`` tokens under chosen frequencies. It computes no attention.

    It records each layer's states [rows, heads, tokens, dim]: queries, keys and values. ``windowed`` are the layers
    with a sliding window. ``biased`` are those that choose keys or add numbers to scores, ``indexed`` those that only
    choose. ``compressed`` are those that attend to more keys than tokens. ``shared`` are those that attend to the keys
    and values of an earlier layer, and that layer (Gemma 3n). ``elsewhere`` are the rotary modules that it
    asks for other positions than those of the tokens, or not at all. Layers get whole masks of the kind ``mask``, or
    those that the model insists on.
    """

    packs = False

    def __init__(
        self,
        frequencies: Mapping[RotaryTable | None, torch.Tensor],
        tables: RotaryTables,
        formats: Mapping[RotaryTable | None, TableFormat],
        tokens: int = TOKENS,
        mask: MaskKind | None = None,
        unwindowed: Set[int] = frozenset(),
    ) -> None:
        """``frequencies`` by table; None is the table of a model without rotary modules.

        ``unwindowed`` are layers whose mask is local, but no sliding window.
        """
        self.states: dict[int, tuple[torch.Tensor, ...]] = {}
        self.windowed: dict[int, int] = {}
        self.biased: set[int] = set()
        self.indexed: set[int] = set()
        self.compressed: set[int] = set()
        self.shared: dict[int, int] = {}
        self.tokens = tokens
        self._mask, self._insists_on_masks, self._unwindowed = mask, False, unwindowed
        self._by_token: dict[nn.Module, bool] = {}
        self._built: list[tuple[torch.Tensor, int | None]] = []
        self.has_local_masks = False
        self._frequencies, self._tables, self._formats = frequencies, tables, formats
        self._calls: Counter[int] = Counter()
        self._given: dict[tuple[int, int], tuple[int, torch.Tensor, torch.Tensor]] = {}
        """Keys and values that reached a layer, by their identity: they must live as long as it decides."""

    def rotary(
        self,
        x: torch.Tensor,
        position_ids: torch.Tensor,
        layer_type: str | None = None,
        *,
        module: nn.Module | None = None,
    ) -> Any:
        """Seam A: the frequencies of this trial."""
        by_token = position_ids.shape[-1] == self.tokens
        position = torch.arange(self.tokens, device=x.device)[None] if by_token else plain_positions(position_ids)
        if module is not None:
            self._by_token[module] = by_token and self._by_token.get(module, True)
        table = self._tables.table(module, layer_type)
        inv_freq = self._frequencies[table].to(x.device)
        return self._formats[table].table(position[..., None], inv_freq, 1.0, x.dtype, planes_of(position_ids))

    def attention(  # noqa: PLR0913 - as many inputs as attention has
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float = 1.0,
        *_: Any,
        sliding_window: int | None = None,
        indices: torch.Tensor | None = None,
        block_indices: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """Seam B: zeros [rows, tokens, heads, value dim].

        Raises:
            UnsupportedModel: for an argument that the attention of the patch does not have.
        """
        unknown = [name for name, value in others.items() if isinstance(value, torch.Tensor) and name not in UNUSED]
        if unknown:
            raise UnsupportedModel(f"its layers hand {', '.join(unknown)} to their attention, which ours does not have")
        if not is_among_tokens(module):
            return among_others(query, key, value, scaling), None
        layer = index_of(module)
        if sliding_window is None and layer not in self._unwindowed:
            sliding_window = self._window_by(attention_mask)
        if key.shape[2] < query.shape[2]:
            raise UnsupportedModel("its layers attend to fewer keys than tokens")
        if key.shape[2] > query.shape[2]:
            self.compressed.add(layer)
        bias = bias_of(attention_mask, indices, query, key.shape[2])
        changes = bias is not None and not self._is_plain(attention_mask, indices, sliding_window)
        if changes or block_indices is not None or position_bias is not None:
            self.biased.add(layer)
        if block_indices is not None or (bias is not None and changes and _only_excludes(bias)):
            self.indexed.add(layer)
        source = self._given.setdefault((id(key), id(value)), (layer, key, value))[0]
        if source != layer:
            self.shared[layer] = source
        self.states[layer] = query.detach(), key.detach(), value.detach()
        if sliding_window is not None:
            self.windowed[layer] = int(sliding_window)
        self._calls[layer] += 1
        return value.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None

    @property
    def cached(self) -> CachedStates:
        """The states that the layers cache."""
        sizes = [(q.shape[1], k.shape[1], max(k.shape[-1], v.shape[-1])) for q, k, v in self.states.values()]
        heads = {heads for _, heads, _ in sizes}
        numbers, expanded = max(n * width for _, n, width in sizes), max(n * width for n, _, width in sizes)
        return CachedStates(max(heads), numbers, expanded, len(heads) == 1, max(self._calls.values()))

    def mask_kind(self, *, insists: bool, local: bool) -> MaskKind | None:
        """A model that asks for a whole mask may choose keys by it."""
        self._insists_on_masks |= insists
        self.has_local_masks |= local
        return "booleans" if insists and self._mask is None else self._mask

    def built(self, mask: torch.Tensor, local_size: int | None) -> torch.Tensor:
        """``mask``, whose way to the layers is followed."""
        self._built.append((mask, local_size))
        return mask

    def _window_by(self, mask: torch.Tensor | None) -> int | None:
        """The window of a built mask that reached a layer, whole or in part."""
        whole = mask if mask is None or mask._base is None else mask._base
        return next((size for built, size in self._built if whole is built or mask is built), None)

    def _is_plain(self, mask: torch.Tensor | None, indices: torch.Tensor | None, window: int | None) -> bool:
        """True for a causal mask that reached the attention as it was built: the layer chooses no keys by it.

        A type that also takes images asks for one without them (Gemma 4 unified).
        """
        if indices is not None or mask is None or all(mask is not built for built, _ in self._built):
            return False
        distance = torch.arange(self.tokens)[:, None] - torch.arange(self.tokens)
        causal = (distance >= 0) & (distance < (self.tokens if window is None else window))
        seen = mask.cpu() if mask.dtype == torch.bool else mask.cpu() == 0
        return mask.shape[-2:] == causal.shape and bool((seen == causal).all())

    @property
    def masks(self) -> tuple[dict[int, int], MaskKind | None, bool]:
        """(window of layers that have one, masks by which the model chooses keys, chooses keys)."""
        insists: MaskKind | None = "booleans" if self._insists_on_masks and self.biased else None
        return self.windowed, self._mask or insists, bool(self.biased)

    @property
    def elsewhere(self) -> frozenset[nn.Module]:
        return frozenset(module for module in self._tables.modules if not self._by_token.get(module, False))

    @property
    def has_uncalled(self) -> bool:
        """True if the forward was too short for some rotary module, or has no use for it."""
        return any(module not in self._by_token for module in self._tables.modules)

    def moved(self, still: Trial) -> set[int]:
        """Layers with other queries than in ``still``."""
        return {layer for layer, (query, *_) in self.states.items() if not torch.equal(query, still.states[layer][0])}


def _only_excludes(bias: torch.Tensor) -> bool:
    """True if every number of ``bias`` is 0 or -inf: a choice of keys. Doge adds other ones."""
    return not bool(bias[bias.isfinite()].any())
