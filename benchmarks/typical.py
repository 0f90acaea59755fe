"""One typical request per method, for a model of any size and inputs of ``reach`` times its trained length.

The numbers follow from what each method says of its reach and from the model's shape. None is tuned to a model.
They are those of the method's own ``example``, except where another number serves ``reach`` better.
"""

from __future__ import annotations

from typing import Any

from patches import METHODS, RopeGeometry

Fields = dict[str, Any]

REACH = 16
"""Times the trained length."""


def typical(geometry: RopeGeometry, reach: int = REACH) -> dict[str, Fields]:
    """Name -> request, for every method of the registry; those that do not apply to the model are among them."""
    pairs, trained = max(1, geometry.rotary_dim // 2), geometry.original_max_position_embeddings
    whole, half = float(reach), float(2 * reach)  # half: of what serves about half of its factor
    given: dict[str, Fields] = {
        "llama3": {"factor": whole},
        **{name: {"factor": half} for name in ("ntk", "ntk_fixed")},
        "ntk_mixed": {"factor": 1.5 * whole},  # reaches between factor / 2 and factor
        "resonance": {"base": {"method": "yarn", "factor": whole}},
        "clipped_rope": {"n": max(2, 20 * pairs // 64)},  # published: 20 of 64
        # Windows are a quarter of the trained length. Self-Extend's authors advise to use half to two thirds of what
        # a group size reaches. So the size is twice the extension.
        "self_extend": {"group_size": 2 * reach, "neighbor_window": max(1, trained // 4)},
        "leaky_rerope": {"scaling_factor": 1.5 * whole},
        "dpe": {**METHODS["dpe"].example(geometry, whole), "neighbor_window": max(1, trained // 4)},
        "learned_interpolation": {"align": "ends"},
    }
    return {
        name: {"method": name, **(given[name] if name in given else kind.example(geometry, whole))}
        for name, kind in METHODS.items()
    }
