"""The one table of methods, and the description of each."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from patches.encoding.method import FrequencyMethod, Method
from patches.methods.absolute import (
    Learned,
    LearnedHierarchical,
    LearnedInterpolation,
    Sinusoidal,
    SinusoidalInterpolation,
)
from patches.methods.biases.alibi import Alibi
from patches.methods.biases.kerple import KerpleLog, KerplePower
from patches.methods.biases.sandwich import Sandwich
from patches.methods.biases.t5_bias import T5Bias
from patches.methods.drope import Drope
from patches.methods.frequencies.by_parts import DynamicYarn, NtkByParts, Yarn, YarnPaper
from patches.methods.frequencies.clipped_rope import ClippedRope
from patches.methods.frequencies.custom import Custom
from patches.methods.frequencies.default import Default
from patches.methods.frequencies.linear import DynamicLinear, Linear
from patches.methods.frequencies.llama3 import Llama3
from patches.methods.frequencies.longrope import LongRope
from patches.methods.frequencies.mrrope import MrRopeProgressive, MrRopeUniform, TailSpline
from patches.methods.frequencies.ntk import DynamicNtk, Ntk
from patches.methods.frequencies.proportional import Proportional
from patches.methods.frequencies.resonance import Resonance
from patches.methods.frequencies.su_ntk import NtkFixed, NtkMixed
from patches.methods.none import NoPositions
from patches.methods.position_maps.dpe import Dpe
from patches.methods.position_maps.dual_chunk import DualChunk
from patches.methods.position_maps.rerope import LeakyReRope, ReRope
from patches.methods.position_maps.self_extend import SelfExtend
from patches.methods.position_maps.string import String
from patches.methods.relative import Shaw, TransformerXL
from patches.methods.windows.lm_infinite import LmInfinite
from patches.methods.windows.streaming import Streaming

FREQUENCIES: dict[str, type[FrequencyMethod]] = {
    "default": Default,
    "linear": Linear,
    "ntk": Ntk,
    "dynamic": DynamicNtk,
    "ntk_by_parts": NtkByParts,
    "yarn": Yarn,
    "llama3": Llama3,
    "longrope": LongRope,
    "dynamic_linear": DynamicLinear,
    "dynamic_yarn": DynamicYarn,
    "yarn_paper": YarnPaper,
    "ntk_fixed": NtkFixed,
    "ntk_mixed": NtkMixed,
    "mrrope_uni": MrRopeUniform,
    "mrrope_pro": MrRopeProgressive,
    "tailspline": TailSpline,
    "proportional": Proportional,
    "custom": Custom,
}
"""Frequency schedules: every ``base`` may be any of these."""

METHODS: dict[str, type[Method]] = {
    **FREQUENCIES,
    "resonance": Resonance,
    "clipped_rope": ClippedRope,
    "none": NoPositions,
    "drope": Drope,
    "alibi": Alibi,
    "sandwich": Sandwich,
    "kerple_log": KerpleLog,
    "kerple_power": KerplePower,
    "t5_bias": T5Bias,
    "self_extend": SelfExtend,
    "rerope": ReRope,
    "leaky_rerope": LeakyReRope,
    "dual_chunk": DualChunk,
    "string": String,
    "dpe": Dpe,
    "lm_infinite": LmInfinite,
    "streaming": Streaming,
    "learned": Learned,
    "learned_interpolation": LearnedInterpolation,
    "learned_hierarchical": LearnedHierarchical,
    "sinusoidal": Sinusoidal,
    "sinusoidal_interpolation": SinusoidalInterpolation,
    "shaw": Shaw,
    "transformer_xl": TransformerXL,
}


ABOUT = (
    "summary",
    "use",
    "avoid",
    "reach",
    "evidence",
    "training_free",
    "paper",
    "formula",
    "cost",
    "rotates_at",
    "family",
)
"""Class attributes that describe a method, in the order of listings."""


QUESTIONS: dict[str, tuple[str, ...]] = {
    "tuned with a factor": ("yarn", "linear", "llama3", "longrope"),
    "untuned, up to 4 times the trained length": ("dynamic", "ntk", "dynamic_yarn"),
    "untuned, far beyond it": ("self_extend", "rerope", "dual_chunk"),
    "constant memory": ("streaming", "lm_infinite"),
    "trained without rotation": ("alibi", "learned_interpolation", "none"),
}
"""Questions of people who choose a method, and the methods to try first."""


def check_described(methods: Mapping[str, type[Method]]) -> None:
    """Raises:
    TypeError: naming a method and the class attributes that it lacks: every listing of all methods reads them.
    """
    for kind in methods.values():
        missing = [f"`{field}`" for field in ABOUT if not hasattr(kind, field)]
        if missing:
            raise TypeError(f"{kind.__name__}: needs {', '.join(missing)}; patches/encoding/method.py describes them")


check_described(METHODS)


def questions(name: str) -> list[str]:
    """The questions that a method answers."""
    return [question for question, names in QUESTIONS.items() if name in names]


def examples() -> list[dict[str, Any]]:
    """Encodings worth comparing on any rotary model, as request fields: for documentation and demos."""
    return [{"method": "default"}, {"method": "yarn", "factor": 8}, {"method": "alibi"}]


def describe_methods() -> list[dict[str, Any]]:
    """Every method with its JSON schema, for listings and generated tables."""
    return [describe_method(name) for name in METHODS]


def describe_method(name: str) -> dict[str, Any]:
    """The description of a method, and its JSON schema."""
    about = {field: getattr(METHODS[name], field) for field in ABOUT}
    return {"method": name, **about, "parameters": _schema(name)}


@cache
def _schema(name: str) -> dict[str, Any]:
    return METHODS[name].model_json_schema()  # 25 to 60 ms
