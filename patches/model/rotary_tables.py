"""A model's rotary tables, one per rotary module or per layer type in it, and the formats of such tables.

Works on attributes alone. ``patches.model.measuring.measurement`` finds out which layers turn by which table.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn

from patches.encoding.rotary import rotary_table

TableLayout = Literal["half", "interleaved", "pairs", "complex"]
"""Tables of rotary modules: cos and sin as wide as the rotation, in either layout. Others have one number per pair
(gpt-oss), or one complex number per pair (Llama 4, DeepSeek-V2)."""


@dataclass(frozen=True)
class TableFormat:
    """``float32``: tables keep that dtype for half-precision inputs. ``by_plane``: multimodal positions give a table
    per plane, whose sections the layers put together (Qwen2.5-VL)."""

    layout: TableLayout = "half"
    float32: bool = False
    by_plane: bool = False

    def table(
        self,
        position: torch.Tensor,
        inv_freq: torch.Tensor,
        factor: torch.Tensor | float,
        dtype: torch.dtype,
        planes: int | None = None,
    ) -> tuple[torch.Tensor, ...] | torch.Tensor:
        """The rotary table of ``position`` [..., 1 or pairs], as the model's own module returns it for ``dtype``.

        All ``planes`` of a text have the same positions.
        """
        table = formatted(position, inv_freq, factor, self.layout)
        if isinstance(table, torch.Tensor):
            return table
        if self.by_plane and planes is not None:
            table = tuple(part.expand(planes, *part.shape) for part in table)
        return table if self.float32 else tuple(part.to(dtype) for part in table)


class RotaryTable:
    """A rotary module's frequencies, or those of one layer type in it."""

    def __init__(self, module: nn.Module, layer_type: str | None = None) -> None:
        self.module, self.layer_type = module, layer_type
        self.order: torch.Tensor | None = None
        """Pair -> its place in the module's buffer, where a measurement finds another order (Ernie 4.5 VL)."""

    @property
    def inv_freq(self) -> torch.Tensor:
        """Frequencies of the pairs [rotary_dim / 2], without learned factors."""
        kept = self.module.get_buffer("inv_freq" if self.layer_type is None else f"{self.layer_type}_inv_freq")
        return kept if self.order is None else kept[self.order]

    @property
    def learned_factors(self) -> tuple[float, ...] | None:
        """Factors on the frequencies, whose logarithms were trained (Mistral Large 4); None elsewhere."""
        logarithms = getattr(self.module, "alpha", None)
        if not isinstance(logarithms, nn.Parameter):
            return None
        return tuple(logarithms.detach().float().exp().tolist())

    @property
    def turns(self) -> torch.Tensor:
        """Angles per position [rotary_dim / 2], with learned factors."""
        learned = self.learned_factors
        kept = self.inv_freq.float()
        return kept if learned is None else kept * torch.tensor(learned, device=kept.device)

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
        same = self.inv_freq.shape == other.inv_freq.shape and torch.equal(self.turns, other.turns)
        return same and self.attention_scaling == other.attention_scaling


class RotaryTables:
    """The tables of one model. ``chosen`` are those that requests choose; they hold the same numbers."""

    def __init__(self, tables: Iterable[RotaryTable]) -> None:
        """Tables of one layer type with the same numbers are one, also in different modules (DeepSeek-V4)."""
        self._tables: dict[tuple[nn.Module, str | None], RotaryTable] = {}
        for table in tables:
            alike = (one for one in self if table.layer_type is not None and table.layer_type == one.layer_type)
            same = next((one for one in alike if one.is_like(table)), table)
            self._tables[table.module, table.layer_type] = same
        self.chosen: tuple[RotaryTable, ...] = ()

    def choosing(self, chosen: Sequence[RotaryTable]) -> RotaryTables:
        """These tables, of which requests choose ``chosen``."""
        found = copy.copy(self)
        found.chosen = tuple(chosen)
        return found

    @property
    def modules(self) -> list[nn.Module]:
        return list(dict.fromkeys(module for module, _ in self._tables))

    def __iter__(self) -> Any:
        return iter(dict.fromkeys(self._tables.values()))

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


def planes_of(position_ids: torch.Tensor) -> int | None:
    """Number of planes of multimodal positions [planes, rows, tokens]; None for plain positions."""
    return position_ids.shape[0] if position_ids.ndim == 3 else None


def plain_positions(position_ids: torch.Tensor) -> torch.Tensor:
    """[rows, tokens] of positions that may be multimodal: the planes of a text are alike."""
    return position_ids[0] if position_ids.ndim == 3 else position_ids


def formatted(
    position: torch.Tensor, inv_freq: torch.Tensor, factor: torch.Tensor | float, layout: TableLayout
) -> tuple[torch.Tensor, ...] | torch.Tensor:
    """The table of ``rotary_table`` as the model's own rotary module returns it, bit for bit."""
    if layout in ("half", "interleaved"):
        return rotary_table(position, inv_freq, factor, interleaved=layout == "interleaved")
    angles = position.float() * inv_freq
    if layout == "complex":
        return torch.polar(torch.ones_like(angles), angles) * factor
    return angles.cos() * factor, angles.sin() * factor


def layout_of(output: object, position: torch.Tensor, turns: torch.Tensor, factor: float) -> TableLayout | None:
    """Layout of the table that the rotary module returned for ``position`` [1, tokens]; None for one that we do not
    know."""
    for layout in get_args(TableLayout):
        expected = formatted(position[..., None], turns, factor, layout)
        if type(output) is type(expected) and _alike(output, expected):
            return layout  # type: ignore[no-any-return]
    return None


def orders_of(output: Any, inv_freq: torch.Tensor) -> Iterator[torch.Tensor]:
    """Orders of ``inv_freq`` that the table for positions from 0 on may have, by its angles at position 1."""
    cos, sin = (output.real, output.imag) if isinstance(output, torch.Tensor) else output[:2]
    angles, pairs = torch.atan2(sin, cos)[0, 1].float(), len(inv_freq)
    for turned in (angles[:pairs], angles[:: len(angles) // pairs]):
        yield inv_freq.argsort()[turned.argsort().argsort()]


def _alike(left: object, right: object) -> bool:
    if isinstance(left, tuple) and isinstance(right, tuple):
        return len(left) == len(right) and all(_alike(*pair) for pair in zip(left, right, strict=True))
    assert isinstance(left, torch.Tensor)
    assert isinstance(right, torch.Tensor)
    return left.shape == right.shape and left.dtype == right.dtype and torch.allclose(left, right, atol=1e-5)
