"""One typical request per method, for a model of any size and inputs of ``reach`` times its trained length.

The numbers follow from what each method says of its reach and from the model's shape. None is tuned to a model.
Lists that would have to be searched or learned (longrope, custom, dpe, t5_bias) are made by a rule.
"""

from __future__ import annotations

import math
from typing import Any

from patches import METHODS, Method, RopeGeometry

Fields = dict[str, Any]

REACH = 16
"""Times the trained length."""


def typical(geometry: RopeGeometry, reach: int = REACH) -> dict[str, Fields]:
    """Name -> request, for every method of the registry; those that do not apply to the model are among them."""
    pairs, trained = max(1, geometry.rotary_dim // 2), geometry.original_max_position_embeddings
    whole, half = float(reach), float(2 * reach)  # half: of what serves about half of its factor
    yarn = {"method": "yarn", "factor": whole}
    given: dict[str, Fields] = {
        **{name: {"factor": whole} for name, kind in METHODS.items() if _needs_factor(kind)},
        **{name: {"factor": whole} for name in ("yarn", "llama3", "drope")},
        **{name: {"factor": half} for name in ("ntk", "ntk_fixed")},
        "ntk_mixed": {"factor": 1.5 * whole},  # reaches between factor / 2 and factor
        "longrope": {"factor": whole, "short_factor": [1.0] * pairs, "long_factor": _rising(pairs, whole)},
        "proportional": {"partial_rotary_factor": 0.75},
        "custom": {"inv_freq": _slow_pairs_divided(geometry, pairs, whole)},
        "resonance": {"base": yarn},
        "clipped_rope": {"n": max(2, 20 * pairs // 64)},  # published: 20 of 64
        "t5_bias": {"relative_attention_bias": _falling(32, geometry.num_attention_heads)},
        # Windows are a quarter of the trained length. Self-Extend's authors advise to use half to two thirds of what
        # a group size reaches. So the size is twice the extension.
        "self_extend": {"group_size": 2 * reach, "neighbor_window": max(1, trained // 4)},
        "leaky_rerope": {"scaling_factor": 1.5 * whole},
        "dpe": {"group_factors": [2 * reach, 4 * reach], "neighbor_window": max(1, trained // 4)},
        "learned_interpolation": {"align": "ends"},
    }
    return {name: {"method": name, **given.get(name, {})} for name in METHODS}


def _needs_factor(kind: type[Method]) -> bool:
    factor = kind.model_fields.get("factor")
    return factor is not None and factor.is_required()


def _rising(pairs: int, most: float) -> list[float]:
    """From 1 to ``most``, geometrically."""
    return [most ** (pair / max(1, pairs - 1)) for pair in range(pairs)]


def _slow_pairs_divided(geometry: RopeGeometry, pairs: int, by: float) -> list[float]:
    """The model's own frequencies; those that make no whole turn within the trained length divided."""
    own = [(geometry.rope_theta or 1e4) ** (-pair / pairs) for pair in range(pairs)]
    slow = 2 * math.pi / geometry.original_max_position_embeddings
    return [frequency / by if frequency < slow else frequency for frequency in own]


def _falling(buckets: int, heads: int) -> list[list[float]]:
    """A bias per bucket and head that falls with the distance, faster in later heads."""
    return [[-(head + 1) / heads * math.log1p(bucket) for head in range(heads)] for bucket in range(buckets)]
