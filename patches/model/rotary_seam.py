"""Seam A, the rotary module of a patched model: the tables of each token by the schedule of its slot."""

from __future__ import annotations

from typing import Any

import torch

from patches.batch.slots import SlotTable, decode, positions_of
from patches.model.forward import Forwards
from patches.model.measuring.measurement import Measurement
from patches.model.replacement import NotCopied
from patches.model.rotary_tables import plain_positions, planes_of
from patches.model.steps_ahead import StepsAhead


class RotarySeam(NotCopied):
    """The rotary modules of one model."""

    def __init__(self, measurement: Measurement, slots: SlotTable, forwards: Forwards) -> None:
        self._tables, self._format = measurement.rotary_tables, measurement.table
        self._elsewhere = measurement.elsewhere
        self._slots, self._forwards = slots, forwards
        self._steps_ahead = StepsAhead()

    def rotary(
        self,
        x: torch.Tensor,
        position_ids: torch.Tensor,
        layer_type: str | None = None,
        *,
        module: torch.nn.Module | None = None,
    ) -> Any:
        """cos and sin of each token by its slot's schedule, in the format of the model's own ``module``.

        Tables that requests do not choose keep their own frequencies.

        Raises:
            ValueError: for a layer that rotates cached keys anew, in a packed row.
        """
        return self._forwards.current.call(self._rotary, x, position_ids, layer_type, module)

    def _rotary(
        self,
        x: torch.Tensor,
        position_ids: torch.Tensor,
        layer_type: str | None,
        module: torch.nn.Module | None,
    ) -> Any:
        forward = self._forwards.current
        encoded, planes = forward.position_ids, planes_of(position_ids)
        if module is not None and not self._tables.is_chosen(module, layer_type):
            arguments = () if layer_type is None else (layer_type,)
            return type(module).forward(module, x, positions_of(encoded), *arguments)
        elsewhere = module in self._elsewhere or position_ids.shape[-1] != encoded.shape[-1]
        if forward.recordings is not None and encoded.device.type == "cpu" and not elsewhere:
            kind = self._slots.uploads, x.dtype, planes
            return self._steps_ahead.table(encoded, kind, lambda steps: self._table(*decode(steps), x.dtype, planes))
        position, slot = decode(encoded)
        if elsewhere:  # cached tokens too, or keys that cover several
            if forward.packed is not None:
                raise ValueError("position_ids: a layer rotates cached keys anew, which a packed row does not carry")
            position, slot = plain_positions(position_ids), slot[:, -1:]
        if len(position) == 1:
            position = position.expand(position_ids.shape[-2], -1)
        return self._table(position, slot, x.dtype, planes)

    def _table(self, position: torch.Tensor, slot: torch.Tensor, dtype: torch.dtype, planes: int | None) -> Any:
        position, inv_freq, factor = self._slots.at_write(position, slot)
        return self._format.table(position, inv_freq, factor, dtype, planes)
