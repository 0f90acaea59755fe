"""The golden vectors: float64 values that reference implementations were checked against."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from patches import RopeGeometry, parse, resolve
from patches.encoding.rotary import rotary_table, rotate
from tests import oracles
from tests.patches.distances import effective_distance

TOLERANCE = 1e-6
"""Relative. Frequencies are float32: 6e-8 for the rounding, the rest for its powers and ramps."""

# golden file -> the method that must reproduce it
FREQUENCIES: dict[str, str] = {
    "freq_default": "default",
    "freq_default_partial": "default",
    "freq_linear": "linear",
    "freq_ntk_static": "ntk",
    "freq_dynamic_ntk": "dynamic",
    "freq_ntk_by_parts_v1": "ntk_by_parts",
    "freq_yarn": "yarn",
    "freq_llama3": "llama3",
    "freq_longrope": "longrope",
    "freq_dynamic_pi": "dynamic_linear",
    "freq_dynamic_yarn": "dynamic_yarn",
    "freq_yarn_paper_ramp": "yarn_paper",
    "freq_su_ntk_fixed": "ntk_fixed",
    "freq_su_ntk_mixed": "ntk_mixed",
    "freq_mrrope_uni": "mrrope_uni",
    "freq_mrrope_pro": "mrrope_pro",
    "freq_tailspline": "tailspline",
    "freq_proportional": "proportional",
    "freq_clipped_rope": "clipped_rope",
}
UNDERNEATH = {"freq_resonance_default": "default", "freq_resonance_yarn": "yarn"}
"""golden file of resonance -> the method that it wraps."""

POSITION_MAPS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "plain": lambda p: {"method": "default"},
    "self_extend": lambda p: {
        "method": "self_extend",
        "group_size": p["group_size"],
        "neighbor_window": p["window"],
    },
    "self_extend_odd": lambda p: POSITION_MAPS["self_extend"](p),
    "rerope": lambda p: {"method": "rerope", "window": p["window"]},
    "dca_repo": lambda p: {
        "method": "dual_chunk",
        "original_max_position_embeddings": p["pretrain"],
        "chunk_size": p["chunk_size"],
        "local_window": p["local_window"],
    },
    "lm_infinite": lambda p: {"method": "lm_infinite", **p},
    # The released code evicts after the step: its query sees the recent tokens and itself.
    "streaming_llm": lambda p: {"method": "streaming", "sink_tokens": p["sinks"], "window": p["recent"] + 1},
}
"""Name in the golden file -> request fields from its parameters."""

ABOUT_THE_CASE = {"head_dim", "seq_len", "note"}
RENAMED = {"clip_low_n": "n"}
TOLERANCES = {"freq_clipped_rope": 1e-5}
"""The reference, in float32, is known less well there."""


def load(shared: Path, name: str) -> Any:
    return json.loads((shared / "golden" / f"{name}.json").read_text())


def request(name: str, params: dict[str, Any]) -> dict[str, Any]:
    """The request fields of a case."""
    fields = {RENAMED.get(key, key): value for key, value in params.items() if key not in ABOUT_THE_CASE}
    if name in UNDERNEATH:
        return {"method": "resonance", "base": {"method": UNDERNEATH[name], **fields}}
    # The base is a parameter of frequency schedules; what wraps one has it underneath.
    if name == "freq_clipped_rope":
        fields["base"] = {"method": "default", "rope_theta": fields.pop("rope_theta")}
    return {"method": FREQUENCIES[name], **fields}


def geometry(params: dict[str, Any], *, heads: int = 4, whole: bool = False) -> RopeGeometry:
    """``whole`` heads rotate, whatever ``partial_rotary_factor`` says: p-RoPE has it mean something else."""
    head_dim = params.get("head_dim", 64)
    trained_length = params.get("original_max_position_embeddings", 2048)
    return RopeGeometry(
        head_dim=head_dim,
        rotary_dim=head_dim if whole else int(head_dim * params.get("partial_rotary_factor", 1.0)),
        rope_theta=10_000.0,  # cases carry their own base as a request field
        original_max_position_embeddings=trained_length,
        max_position_embeddings=trained_length,
        num_attention_heads=heads,
    )


@pytest.mark.parametrize("name", [*FREQUENCIES, *UNDERNEATH])
def test_frequencies_and_attention_factor(shared: Path, name: str) -> None:
    cases = load(shared, name)["cases"]
    assert cases
    for case in cases:
        params = case["params"]
        model = geometry(params, whole=name == "freq_proportional")
        resolved = resolve(parse(request(name, params)), model, params.get("seq_len", 1))
        tolerance = TOLERANCES.get(name, TOLERANCE)
        assert resolved.inv_freq == pytest.approx(case["inv_freq"], rel=tolerance, abs=0), params
        assert resolved.attention_factor == pytest.approx(case["attention_factor"], rel=TOLERANCE), params


@pytest.mark.parametrize(("group", "bias_max"), [("standard", 8.0), ("mpt_bias_max_16", 16.0)])
def test_alibi_slopes(shared: Path, group: str, bias_max: float) -> None:
    for heads, slopes in load(shared, "alibi_slopes")[group].items():
        recipe = parse({"method": "alibi", "alibi_bias_max": bias_max}).recipe(geometry({}, heads=int(heads)))
        assert recipe.score_bias is not None
        bias = recipe.score_bias(torch.tensor([[5]]), torch.arange(6)[None])
        assert bias.shape == (int(heads), 1, 6)
        expected = torch.tensor([[-slope * (5 - n) for n in range(6)] for slope in slopes])
        torch.testing.assert_close(bias[:, 0], expected, rtol=TOLERANCE, atol=0)


def test_every_position_map_is_compared(shared: Path) -> None:
    assert set(load(shared, "position_maps")["maps"]) == set(POSITION_MAPS)


@pytest.mark.parametrize("name", POSITION_MAPS)
def test_position_maps(shared: Path, name: str) -> None:
    golden = load(shared, "position_maps")
    case, length = golden["maps"][name], golden["N"]
    fields = POSITION_MAPS[name](case["params"])
    distance = effective_distance(parse(fields).recipe(geometry({})), length)[..., 0]
    how = oracles.encoding(fields, oracles.Model(1e4, 64, 2048, 2048, 4), length)
    for m, row in enumerate(case["rows"]):
        assert [None if x != x else x for x in distance[m, : m + 1].tolist()] == row, f"query {m}"
        assert [how.distance(m, n) for n in range(m + 1)] == row, f"the oracle's query {m}"
        assert distance[m, m + 1 :].isnan().all(), "a key after its query is covered"


@pytest.mark.parametrize("layout", ["neox", "gptj"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rotation(shared: Path, layout: str, dtype: torch.dtype) -> None:
    golden = load(shared, "rope_apply")
    q, k = (torch.tensor([golden[name]], dtype=torch.float64) for name in "qk")
    inv_freq = torch.tensor(golden["inv_freq"], dtype=dtype)
    partial_inv_freq = 10_000.0 ** -(torch.arange(0, 8, 2).to(dtype) / 8)

    def turn(states: torch.Tensor, position: int, frequencies: torch.Tensor) -> torch.Tensor:
        table = rotary_table(torch.tensor([position]), frequencies, 1.0, interleaved=layout == "gptj")
        return rotate(states, *table, interleaved=layout == "gptj")[0]

    for case in golden["cases"]:
        # In float32 an angle near p radians is known to p x 2^-24 only.
        angle = max(case["q_pos"], case["k_pos"]) if dtype == torch.float32 else 0
        tolerance = 2e-6 + angle * 2**-22
        turned_q, turned_k = turn(q, case["q_pos"], inv_freq), turn(k, case["k_pos"], inv_freq)
        partial = turn(q, case["q_pos"], partial_inv_freq)
        assert turned_q.tolist() == pytest.approx(case[f"{layout}_q"], abs=tolerance)
        assert turned_k.tolist() == pytest.approx(case[f"{layout}_k"], abs=tolerance)
        assert partial.tolist() == pytest.approx(case[f"{layout}_partial_0.5_q"], abs=tolerance)
        assert float(turned_q @ turned_k) == pytest.approx(case[f"{layout}_score"], abs=20 * tolerance)
