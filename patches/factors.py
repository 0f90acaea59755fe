"""Factors per rotary pair: those of a method, and the encoding that has given ones.

LongRoPE (arXiv:2402.13753, section 3) searches such factors. It starts from those of three methods.
"""

from __future__ import annotations

from collections.abc import Sequence

from patches.encoding.bands import Band
from patches.encoding.geometry import RopeGeometry
from patches.encoding.method import Method
from patches.methods.frequencies.by_parts import Yarn
from patches.methods.frequencies.linear import Linear
from patches.methods.frequencies.longrope import LongRope
from patches.methods.frequencies.ntk import Ntk
from patches.proposals import UNSCALED
from patches.resolution import resolve


def starts(times: float) -> list[Method]:
    """The methods whose factors begin a search for ``times`` the trained length."""
    return [kind.model_validate({"factor": times}) for kind in (Linear, Ntk, Yarn)]


def by_factors(
    factors: Sequence[float], geometry: RopeGeometry, times: float, attention_factor: float | None = None
) -> Method:
    """The encoding that divides the frequency of each pair by its factor past the trained length.

    ``factors`` are those of the pairs that rotate. ``attention_factor`` multiplies cos and sin; None: by LongRoPE's
    formula for an extension of ``times``.
    """
    pairs = geometry.rotary_dim // 2
    fields = {
        "factor": times,
        "attention_factor": attention_factor,
        "short_factor": [1.0] * pairs,
        "long_factor": [*factors, *[factors[-1]] * (pairs - len(factors))],
    }
    return LongRope.model_validate(fields)


def factors_of(method: Method, geometry: RopeGeometry, length: int) -> list[float] | None:
    """The factors of the pairs that rotate, at ``length`` tokens; None for a method that is no frequency schedule, or
    that stops a pair.

    Raises:
        ValueError: when the method does not fit the model.
    """
    found, plain = resolve(method, geometry, length), resolve(UNSCALED, geometry, length)
    if found.recipe.schedule is None or found.recipe.bands != (Band(),) or found.recipe.score_bias is not None:
        return None
    pairs = [(before, after) for before, after in zip(plain.inv_freq, found.inv_freq, strict=True) if before]
    return [before / after for before, after in pairs] if all(after for _, after in pairs) else None
