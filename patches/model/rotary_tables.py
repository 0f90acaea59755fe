"""The rotary tables of a model: one per rotary module, or one per layer type in it.

Works on attributes alone. ``patches.model.measurement`` finds out which layers turn by which table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn


class RotaryTable:
    """A rotary module's frequencies, or those of one layer type in it."""

    def __init__(self, module: nn.Module, layer_type: str | None = None) -> None:
        self.module, self.layer_type = module, layer_type

    @property
    def inv_freq(self) -> torch.Tensor:
        return self.module.get_buffer("inv_freq" if self.layer_type is None else f"{self.layer_type}_inv_freq")

    @property
    def attention_scaling(self) -> float:
        name = "attention_scaling" if self.layer_type is None else f"{self.layer_type}_attention_scaling"
        return float(getattr(self.module, name, 1.0))

    @property
    def arguments(self) -> tuple[str, ...]:
        """Arguments of the module's ``forward`` after the positions."""
        return () if self.layer_type is None else (self.layer_type,)

    def is_like(self, other: RotaryTable) -> bool:
        """True if both hold the same numbers."""
        same = self.inv_freq.shape == other.inv_freq.shape and torch.equal(self.inv_freq, other.inv_freq)
        return same and self.attention_scaling == other.attention_scaling


class RotaryTables:
    """The tables of one model. ``chosen`` are those that requests choose; they hold the same numbers."""

    def __init__(self, tables: Iterable[RotaryTable], chosen: Sequence[RotaryTable] = ()) -> None:
        self._tables = {(table.module, table.layer_type): table for table in tables}
        self.chosen = tuple(chosen)

    @property
    def modules(self) -> list[nn.Module]:
        return list(dict.fromkeys(module for module, _ in self._tables))

    def __iter__(self) -> Any:
        return iter(self._tables.values())

    def table(self, module: nn.Module | None, layer_type: str | None) -> RotaryTable | None:
        """The table that a call of ``module`` reads; None for a model without rotary modules."""
        return None if module is None else self._tables[module, layer_type]

    def is_chosen(self, module: nn.Module | None, layer_type: str | None) -> bool:
        """True if requests choose the table that this call reads."""
        return self.table(module, layer_type) in (None, *self.chosen)


def rotary_tables(model: nn.Module) -> RotaryTables:
    """The tables of the language model; those of parts for images or sound are not among them."""
    found: list[RotaryTable] = []
    for module in decoder_of(model).modules():
        names = [name for name in module._buffers if name.endswith("inv_freq") and "original" not in name]
        types = [name.removesuffix("_inv_freq") for name in names if name != "inv_freq"]
        found += [RotaryTable(module, layer_type) for layer_type in types]
        if names and not types:
            found.append(RotaryTable(module))
    return RotaryTables(found)


def decoder_of(model: nn.Module) -> nn.Module:
    """The language model without parts for images or sound."""
    get_decoder: Any = getattr(model, "get_decoder", None)
    decoder: nn.Module = model if get_decoder is None else get_decoder()
    return decoder if hasattr(decoder, "config") else model  # transformers also calls a last linear layer so
