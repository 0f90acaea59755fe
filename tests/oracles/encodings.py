"""From a request to everything that its paper says about a score."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tests.oracles.biases import alibi_slopes, bfloat16, kerple_log, kerple_power, sandwich, t5_bucket
from tests.oracles.distances import (
    Distance,
    chunk_llama_distance,
    dpe_distance,
    dual_chunk_distance,
    leaky_rerope_distance,
    lm_infinite_distance,
    rerope_distance,
    self_extend_distance,
    streaming_distance,
    string_distance,
)
from tests.oracles.frequencies import (
    clipped,
    default,
    dynamic,
    dynamic_linear,
    linear,
    llama3,
    longrope,
    longrope_attention_factor,
    ntk,
    ntk_by_parts,
    progressive_steps,
    proportional,
    radix,
    resonance,
    su_fixed,
    su_mixed,
    tail_spline,
    turns_range,
    uniform_steps,
    yarn,
    yarn_attention_factor,
    yarn_paper,
)
from tests.oracles.temperatures import temperature


@dataclass(frozen=True)
class Model:
    """Sizes of a model and of one attention layer, as the formulas need them.

    ``window`` is the layer's own sliding window: only the last ``window`` keys count, the query's own included.
    ``head_dim`` is for heads of which only d dimensions rotate.
    """

    b: float
    d: int
    l0: int
    max_length: int
    heads: int
    scaling: float = 1.0
    interleaved: bool = False
    window: int | None = None
    head_dim: int = 0


@dataclass(frozen=True)
class Encoding:
    """Everything a paper says about the score of query m and key n; distance None: the key is not attended.

    ``bias`` is of (head, m, n), heads from 0.
    """

    inv_freq: Sequence[float] = ()
    attention_factor: float = 1.0
    distance: Callable[[int, int], Distance | None] = lambda m, n: m - n
    bias: Callable[[int, int, int], float] | None = None
    temperature: Callable[[int], float] = lambda m: 1.0


Fields = Mapping[str, Any]


def _yarn(p: Fields, model: Model, length: int) -> Encoding:
    s, turns = p["factor"], (p.get("beta_fast", 32.0), p.get("beta_slow", 1.0))
    factor = p.get("attention_factor") or yarn_attention_factor(s, p.get("mscale"), p.get("mscale_all_dim"))
    return Encoding(yarn(model.b, model.d, s, model.l0, turns, p.get("truncate", True)), factor)


def _ntk_by_parts(p: Fields, model: Model, length: int) -> Encoding:
    beta = p.get("beta_0", 1.25), p.get("beta_1", 0.75)
    gamma = p.get("gamma_0", 16.0), p.get("gamma_1", 2.0)
    return Encoding(ntk_by_parts(model.b, model.d, p["factor"], model.l0, beta, gamma))


def _llama3(p: Fields, model: Model, length: int) -> Encoding:
    turns = p.get("low_freq_factor", 1.0), p.get("high_freq_factor", 4.0)
    return Encoding(llama3(model.b, model.d, p.get("factor", 8.0), model.l0, *turns))


def _longrope(p: Fields, model: Model, length: int) -> Encoding:
    s = p.get("factor") or model.max_length / model.l0
    factor = p.get("attention_factor") or longrope_attention_factor(s, model.l0)
    return Encoding(longrope(model.b, model.d, p["short_factor"], p["long_factor"], model.l0, length), factor)


def _self_extend(p: Fields, model: Model, length: int) -> Encoding:
    group, window = p.get("group_size", 8), p.get("neighbor_window", model.l0 // 4)
    return _moved(p, model, length, lambda m, n: self_extend_distance(m, n, group, window))


def _rerope(p: Fields, model: Model, length: int) -> Encoding:
    window = p.get("window", model.l0 // 4)
    return _moved(p, model, length, lambda m, n: rerope_distance(m, n, window))


def _leaky_rerope(p: Fields, model: Model, length: int) -> Encoding:
    window, k = p.get("window", model.l0 // 4), p.get("scaling_factor", 16.0)
    return _moved(p, model, length, lambda m, n: leaky_rerope_distance(m, n, window, k))


def _dual_chunk(p: Fields, model: Model, length: int) -> Encoding:
    size = p.get("chunk_size", model.l0 * 3 // 4)
    local = p.get("local_window", model.l0 // 8)
    if p.get("formulation") == "paper":
        return _moved(p, model, length, lambda m, n: dual_chunk_distance(m, n, size, model.l0))
    return _moved(p, model, length, lambda m, n: chunk_llama_distance(m, n, size, local))


def _string(p: Fields, model: Model, length: int) -> Encoding:
    offset = p.get("shifted_offset", model.l0 // 3)
    local = p.get("small_local_value", min(128, offset // 4))
    return _moved(p, model, length, lambda m, n: string_distance(m, n, offset, local))


def _dpe(p: Fields, model: Model, length: int) -> Encoding:
    factors, window = p["group_factors"], p.get("neighbor_window", min(1024, model.l0 // 4))
    groups = [factors[i * len(factors) // (model.d // 2)] for i in range(model.d // 2)]
    return _moved(p, model, length, lambda m, n: dpe_distance(m, n, groups, window))


def _lm_infinite(p: Fields, model: Model, length: int) -> Encoding:
    n_global, n_local, limit = p.get("n_global", 10), p.get("n_local", model.l0), p.get("limit_distance", model.l0)
    return _moved(p, model, length, lambda m, n: lm_infinite_distance(m, n, n_global, n_local, limit))


def _streaming(p: Fields, model: Model, length: int) -> Encoding:
    sinks, absolute = p.get("sink_tokens", 4), p.get("absolute_positions", False)
    window = p.get("window", model.l0 - sinks)
    return _moved(p, model, length, lambda m, n: streaming_distance(m, n, sinks, window, absolute))


def _turns(p: Fields) -> tuple[float, float]:
    return p.get("beta_fast", 32.0), p.get("beta_slow", 1.0)


def _radix(steps: Callable[[float, float], float]) -> Callable[[Fields, Model, int], Encoding]:
    def encode(p: Fields, model: Model, length: int) -> Encoding:
        factor = p.get("attention_factor") or yarn_attention_factor(p["factor"])
        pairs = turns_range(*_turns(p), model.b, model.d, model.l0, p.get("truncate", True))
        return Encoding(radix(steps, model.b, model.d, p["factor"], *pairs), factor)

    return encode


def _dynamic_yarn(p: Fields, model: Model, length: int) -> Encoding:
    s = max(1.0, length / model.l0)
    frequencies = yarn(model.b, model.d, s, model.l0, _turns(p), p.get("truncate", True))
    return Encoding(frequencies, yarn_attention_factor(s))


def _yarn_paper(p: Fields, model: Model, length: int) -> Encoding:
    factor = p.get("attention_factor") or yarn_attention_factor(p["factor"])
    ramp_turns = p.get("alpha", 1.0), p.get("beta", 32.0)
    return Encoding(yarn_paper(model.b, model.d, p["factor"], model.l0, *ramp_turns), factor)


def _proportional(p: Fields, model: Model, length: int) -> Encoding:
    return Encoding(proportional(model.b, model.d, p.get("partial_rotary_factor", 1.0), p.get("factor", 1.0)))


def _base(p: Fields, model: Model, length: int) -> Encoding:
    return encoding(p.get("base") or {"method": "default"}, model, length)


def _moved(p: Fields, model: Model, length: int, distance: Callable[[int, int], Distance | None]) -> Encoding:
    return replace(_base(p, model, length), distance=distance)


def _resonance(p: Fields, model: Model, length: int) -> Encoding:
    base = _base(p, model, length)
    return replace(base, inv_freq=resonance(base.inv_freq))


def _clipped_rope(p: Fields, model: Model, length: int) -> Encoding:
    base = _base(p, model, length)
    n = p.get("n", min(20, model.d // 2))
    return replace(base, inv_freq=clipped(base.inv_freq, n, p.get("hard", False)))


def _alibi(p: Fields, model: Model, length: int) -> Encoding:
    factor = p.get("slope_factor", 1.0)
    divisor = max(1.0, length / model.l0) if factor == "dynamic" else factor
    slopes = [slope / divisor for slope in alibi_slopes(model.heads, p.get("alibi_bias_max", 8.0))]
    scale = 1 / math.sqrt(model.head_dim or model.d) if p.get("scaled") else 1.0
    if p.get("bias_dtype") == "bfloat16":
        return Encoding(bias=lambda head, m, n: bfloat16(bfloat16(slopes[head]) * bfloat16(n)) * scale)
    return Encoding(bias=lambda head, m, n: -slopes[head] * (m - n) * scale)


def _kerple(kernel: Callable[[int, float, float], float], *default: float) -> Callable[[Fields, Model, int], Encoding]:
    def encode(p: Fields, model: Model, length: int) -> Encoding:
        given = [p.get(name, value) for name, value in zip(("r1", "r2"), default, strict=True)]
        r1, r2 = ([value] * model.heads if isinstance(value, float) else value for value in given)
        return Encoding(bias=lambda head, m, n: kernel(m - n, r1[head], r2[head]))

    return encode


def _t5_bias(p: Fields, model: Model, length: int) -> Encoding:
    table = p["relative_attention_bias"]
    sizes = p.get("relative_attention_num_buckets", 32), p.get("relative_attention_max_distance", 128)
    return Encoding(bias=lambda head, m, n: float(table[t5_bucket(m - n, *sizes)][head]))


def _sandwich(p: Fields, model: Model, length: int) -> Encoding:
    return Encoding(bias=lambda head, m, n: sandwich(m - n, head, model.heads, p.get("dim", 128)))


def _drope(p: Fields, model: Model, length: int) -> Encoding:
    multiplier = 1 + p.get("coefficient", 0.41) * math.log(p.get("factor", 1.0))
    return Encoding(temperature=lambda m: multiplier)


METHODS: dict[str, Callable[[Fields, Model, int], Encoding]] = {
    "default": lambda p, model, length: Encoding(default(model.b, model.d)),
    "none": lambda p, model, length: Encoding(),
    "drope": _drope,
    "linear": lambda p, model, length: Encoding(linear(model.b, model.d, p["factor"])),
    "ntk": lambda p, model, length: Encoding(ntk(model.b, model.d, p["factor"])),
    "dynamic": lambda p, model, length: Encoding(dynamic(model.b, model.d, p.get("factor", 1.0), model.l0, length)),
    "ntk_by_parts": _ntk_by_parts,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
    "dynamic_linear": lambda p, model, length: Encoding(dynamic_linear(model.b, model.d, model.l0, length)),
    "dynamic_yarn": _dynamic_yarn,
    "yarn_paper": _yarn_paper,
    "ntk_fixed": lambda p, model, length: Encoding(su_fixed(model.b, model.d, p["factor"])),
    "ntk_mixed": lambda p, model, length: Encoding(su_mixed(model.b, model.d, p["factor"], p.get("b", 0.625))),
    "mrrope_uni": _radix(uniform_steps),
    "mrrope_pro": _radix(progressive_steps),
    "tailspline": _radix(tail_spline),
    "proportional": _proportional,
    "custom": lambda p, model, length: Encoding(p["inv_freq"], p.get("attention_factor", 1.0)),
    "resonance": _resonance,
    "clipped_rope": _clipped_rope,
    "alibi": _alibi,
    "sandwich": _sandwich,
    "kerple_log": _kerple(kerple_log, 1.0, 0.5),
    "kerple_power": _kerple(kerple_power, 0.5, 1.0),
    "t5_bias": _t5_bias,
    "self_extend": _self_extend,
    "rerope": _rerope,
    "leaky_rerope": _leaky_rerope,
    "dual_chunk": _dual_chunk,
    "string": _string,
    "dpe": _dpe,
    "lm_infinite": _lm_infinite,
    "streaming": _streaming,
}


def encoding(fields: Fields, model: Model, length: int) -> Encoding:
    """The oracle of a request: ``fields`` by their names in the API, ``length`` the reserved length."""
    b, l0 = fields.get("rope_theta", model.b), fields.get("original_max_position_embeddings", model.l0)
    assert fields["method"] in METHODS, f"{fields['method']} has no oracle: METHODS of tests/oracles/encodings.py"
    how = METHODS[fields["method"]](fields, replace(model, b=b, l0=l0), length)
    asked = fields.get("attention_temperature")
    if asked is None:
        return how
    multiplier = temperature(asked, l0, length)
    if isinstance(asked, dict) and asked.get("rotated_only"):
        return replace(how, attention_factor=how.attention_factor * math.sqrt(multiplier(0)))
    return replace(how, temperature=multiplier)
