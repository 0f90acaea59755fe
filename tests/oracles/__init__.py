"""The papers' formulas, in float64 and plain loops. Written from the formulas, never from ``patches``.

Notation of the papers: d rotated width, b base, L0 trained length, s factor, m query position,
n key position. Nothing here is fast and nothing here imports the project.
"""

from __future__ import annotations

from tests.oracles.absolute import hierarchical, sinusoid, table_at
from tests.oracles.biases import alibi_slopes, shaw, t5_bucket, transformer_xl
from tests.oracles.encodings import Encoding, Model, encoding
from tests.oracles.frequencies import default, linear, longrope_attention_factor, ntk_base, resonance
from tests.oracles.matrices import attention, scores
from tests.oracles.temperatures import temperature

__all__ = [
    "Encoding",
    "Model",
    "alibi_slopes",
    "attention",
    "default",
    "encoding",
    "hierarchical",
    "linear",
    "longrope_attention_factor",
    "ntk_base",
    "resonance",
    "scores",
    "shaw",
    "sinusoid",
    "t5_bucket",
    "table_at",
    "temperature",
    "transformer_xl",
]
