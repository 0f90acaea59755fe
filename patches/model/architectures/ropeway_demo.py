"""The demo model of families that no Llama carries (``service/models/architecture.py``), found by attribute names.

Its attention dispatches by name and is an explicit softmax. Ours is a fused kernel where one fits, so the two are equal
within float32 rounding.
"""

from __future__ import annotations

from typing import Any

from patches.model.absolute import AbsoluteEmbedding, LearnedTable, Sinusoid
from patches.model.architectures.architecture import Architecture, never

NATIVE = {
    "sinusoidal": "sinusoidal",
    "learned": "learned",
    "t5": "t5_bias",
    "shaw": "shaw",
    "transformer_xl": "transformer_xl",
}
"""``position_family`` of a configuration -> its native encoding."""


def positions(model: Any) -> AbsoluteEmbedding | None:
    module = model.model.embed_positions
    if model.config.position_family == "learned":
        return LearnedTable(module)
    return None if module is None else Sinusoid(module, module.weights, interleaved=True)


def in_weights(model: Any) -> dict[str, Any]:
    family = model.config.position_family
    native: dict[str, Any] = {"method": NATIVE[family]}
    if family == "t5":
        native["relative_attention_bias"] = model.model.relative_attention_bias.weight.tolist()
    rows = model.config.max_position_embeddings if family == "learned" else None
    return {"native": native, "table_rows": rows}


ROPEWAY_DEMO = Architecture(rotates=never, positions=positions, in_weights=in_weights)
