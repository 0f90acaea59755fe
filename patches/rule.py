"""Encodings by reserved length, for a model without a calibration.

A rotary model has its own encoding up to its trained length L0. Up to the length that it declares, it has its
own scaling. Beyond, dynamic YaRN (arXiv:2309.00071, section 3.3) scales by the reserved length. Any other model keeps
its own encoding. So does one whose rotating layers all attend within a window or chunk of at most L0 tokens (Llama 4).
No distance in them is untrained.
"""

from __future__ import annotations

from patches.encoding.geometry import RopeGeometry
from patches.encoding.method import Method
from patches.methods.frequencies.by_parts import DynamicYarn
from patches.methods.frequencies.default import Default


def ranges_by_rule(geometry: RopeGeometry) -> list[tuple[int | None, Method]]:
    """(longest reserved length, method) of every range, ascending. The last range ends where the model's table does."""
    own, trained = Default(), geometry.original_max_position_embeddings
    if not geometry.rotates or (geometry.window is not None and geometry.window <= trained):
        return [(geometry.table_rows, own)]
    ranges: list[tuple[int | None, Method]] = [(trained, own)]
    if (declared := _declared_length(geometry)) > trained:
        ranges.append((declared, own))
    return [*ranges, (None, DynamicYarn())]


def _declared_length(geometry: RopeGeometry) -> int:
    """The longest length of the checkpoint's own scaling, in tokens; the trained length without one."""
    trained = geometry.original_max_position_embeddings
    if geometry.native is None:
        return trained
    factor = getattr(geometry.native, "factor", None) or 1.0
    return max(geometry.max_position_embeddings, round(factor * trained))
