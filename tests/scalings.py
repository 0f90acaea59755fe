"""docs/scalings.md: the meaning of ``default`` on checkpoints that ship a context extension.

Each case has the entries of a published ``config.json`` on a tiny random model with heads of the published width.
``python -m tests.scalings`` writes the page; ``tests/patches/model/test_scalings.py`` compares with transformers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from patches import Patched, parse, patched, resolve
from tests.models import randomise

FILE = Path(__file__).resolve().parent.parent / "docs" / "scalings.md"
Fields = dict[str, Any]

_SIZES: Fields = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LATENT: Fields = {
    **_SIZES,
    "num_key_value_heads": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "first_k_dense_replace": 1,  # no expert layers
}
_TWO_TYPES: Fields = {**_SIZES, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}

_PHI_SHORT = [
    *(1.1, 1.1, 1.1, 1.3, 1.35, 1.35, 1.4, 1.55, *[2.0] * 17, *[2.05] * 6, 2.1, 2.1, 2.15, *[2.25] * 5),
    *(2.4, 2.45, 2.5, 2.7, 2.7, 2.75, 2.8, 2.9, 3.05),
]
_PHI_LONG = [
    *(1.07, 1.12, 1.15, 1.42, 1.57, 1.8, 2.13, 2.13, 3.01, 5.91, 6.95, 9.07, 9.93, 10.71, 11.13, 14.61, 15.41, 19.81),
    *(37.28, 38.28, 38.6, 40.12, 46.2, 50.94, 53.66, 54.94, 56.9, 57.29, 59.99, 60.87, 60.89, 61.72, 62.92, 62.96),
    *(63.42, 63.82, 63.84, 63.9, 63.94, 64.07, 64.11, 64.12, 64.15, 64.19, 64.24, 64.57, 64.69, 64.76),
]
"""Of Phi-3-mini-128k, rounded to two digits."""


@dataclass(frozen=True)
class Case:
    """Published entries of a checkpoint, its configuration class in transformers, and tiny sizes."""

    config_class: str
    published: Fields
    sizes: Fields = field(default_factory=lambda: _SIZES)
    attention: str = "sdpa"
    whole: bool = False
    """True where transformers computes the frequencies of a forward from its own last position."""


def _llama(factor: float, head_dim: int) -> Case:
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 8192
    published = {"rope_theta": 5e5, "max_position_embeddings": 131072, "head_dim": head_dim, "rope_scaling": scaling}
    return Case("LlamaConfig", published)


def _qwen(config_class: str, longest: int) -> Case:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    published = {"rope_theta": 1e6, "max_position_embeddings": longest, "rope_scaling": scaling}
    return Case(config_class, published, {**_SIZES, "hidden_size": 256, "head_dim": 128})


def _deepseek(config_class: str, mscale: float) -> Case:
    scaling = {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096}
    scaling |= {"mscale": mscale, "mscale_all_dim": mscale}
    published = {"rope_theta": 1e4, "max_position_embeddings": 163840, "rope_scaling": scaling}
    return Case(config_class, published, _LATENT)


def _kimi() -> Case:
    scaling = {"type": "yarn", "factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    scaling["original_max_position_embeddings"] = 4096
    published = {"rope_theta": 5e4, "max_position_embeddings": 131072, "rope_scaling": scaling}
    return Case("DeepseekV3Config", published, _LATENT)


def _vicuna() -> Case:
    published = {"rope_theta": 1e4, "max_position_embeddings": 4096, "max_sequence_length": 16384, "head_dim": 128}
    return Case("LlamaConfig", {**published, "rope_scaling": {"type": "linear", "factor": 4.0}})


CASES: dict[str, Case] = {
    "Llama 3.1 8B": _llama(8.0, 128),
    "Llama 3.2 1B": _llama(32.0, 64),
    "Vicuna 7B v1.5 16k": _vicuna(),
    "Qwen2.5 7B, its card's YaRN": _qwen("Qwen2Config", 32768),
    "Qwen3 8B, its card's YaRN": _qwen("Qwen3Config", 40960),
    "Phi-3-mini-128k": Case(
        "Phi3Config",
        {
            "rope_theta": 1e4,
            "max_position_embeddings": 131072,
            "original_max_position_embeddings": 4096,
            "rope_scaling": {"type": "longrope", "short_factor": _PHI_SHORT, "long_factor": _PHI_LONG},
        },
        {**_SIZES, "hidden_size": 192},
        whole=True,
    ),
    "gpt-oss-20b": Case(
        "GptOssConfig",
        {
            "rope_theta": 150000,
            "max_position_embeddings": 131072,
            "sliding_window": 128,
            "head_dim": 64,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        {**_TWO_TYPES, "num_local_experts": 2, "num_experts_per_tok": 1},
        attention="eager",
    ),
    "DeepSeek-V2": _deepseek("DeepseekV2Config", 0.707),
    "DeepSeek-V3": _deepseek("DeepseekV3Config", 1.0),
    "Kimi K2": _kimi(),
    "Gemma 3 4B": Case(
        "Gemma3TextConfig",
        {
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "max_position_embeddings": 131072,
            "sliding_window": 1024,
            "head_dim": 256,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        _TWO_TYPES,
    ),
    "OLMo 3 7B": Case(
        "Olmo3Config",
        {
            "rope_theta": 5e5,
            "max_position_embeddings": 65536,
            "sliding_window": 4096,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 8.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "attention_factor": 1.2079441541679836,
                "original_max_position_embeddings": 8192,
            },
        },
        {**_TWO_TYPES, "hidden_size": 256},
    ),
    "Ministral 3 8B": Case(
        "Ministral3Config",
        {
            "max_position_embeddings": 262144,
            "head_dim": 128,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 16384,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
}


IN_CHUNKS = {
    "Qwen2.5-7B-Instruct-1M": Case(
        "Qwen2Config",
        {
            "rope_theta": 1e7,
            "max_position_embeddings": 1010000,
            "dual_chunk_attention_config": {
                "chunk_size": 262144,
                "local_size": 8192,
                "original_max_position_embeddings": 262144,
            },
        },
        {**_SIZES, "hidden_size": 256, "head_dim": 128},
    ),
}
"""Checkpoints whose extension transformers passes over."""

OTHER_COLUMNS = ("rope_theta", "original_max_position_embeddings", "partial_rotary_factor")


def model_of(case: Case, **changed: Any) -> PreTrainedModel:
    """A tiny random model of a case in float32; ``changed`` entries replace published ones, None removes one."""
    fields = copy.deepcopy({**case.sizes, **case.published, **changed})
    fields = {name: value for name, value in fields.items() if value is not None}
    config = getattr(transformers, case.config_class)(**fields)
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        config, attn_implementation=case.attention, dtype=torch.float32
    )
    randomise(model, 0)
    return model.train(False)


def unscaled(case: Case, trained: int) -> PreTrainedModel:
    """The same model before its extension: plain RoPE with the same bases, and the trained length as its longest."""
    own = model_of(case).config.rope_parameters
    by_layer = "full_attention" in own
    plain = {kind: _plain(own[kind], trained) for kind in own} if by_layer else _plain(own, trained)
    gone = dict.fromkeys(("rope_scaling", "rope_theta", "rope_local_base_freq"))
    return model_of(case, rope_parameters=plain, max_position_embeddings=trained, **gone)


def _plain(parameters: Fields, trained: int) -> Fields:
    kept = {name: parameters[name] for name in ("rope_theta", "llama_4_scaling_beta") if name in parameters}
    length = {"original_max_position_embeddings": trained} if "llama_4_scaling_beta" in kept else {}
    return {"rope_type": "default", **kept, **length}


@contextmanager
def carried(case: Case) -> Iterator[Patched]:
    with patched(model_of(case)) as patch:
        yield patch


HEAD = """# Extensions that ship with a checkpoint

Generated from the tests (`python -m tests.scalings`). Checkpoints declare a context extension in `config.json`.
`default` is that encoding, and a request without `pe` has it. Each row is a tiny random model with the published
entries and with heads of the published width.

| checkpoint | trained length | declared length | `default` | base | slowest pair | cos and sin | scores | layers |
|---|---:|---:|---|---|---|---:|---|---|
"""

NOTES = """
*Trained length*: the length before any extension. *`default`*: the method in effect, with the declared parameters. The
lists of Phi's LongRoPE are left out. *Base*: `rope_theta`. *Slowest pair*: the divisor of the lowest frequency up to
the trained length. The divisor at four times this length follows if it differs. *Cos and sin*, *scores*: the factors on
them there. *Layers*: those with the encoding of the request. The others keep their own rotation. A checkpoint with
`linear` declares no trained length: it is the declared length divided by the factor. Some declare the product with the
factor as `max_sequence_length` (Vicuna): their trained length is `max_position_embeddings`.

The tests compare all rows but the last with transformers at 1, 2 and 4 times the trained length. The logits of the
last tokens agree within 2e-5, behind a cache of all earlier keys. No extension applies twice:

- A `factor` in a request is relative to the trained length. `linear:4` on Llama 3.1 divides the frequencies of plain
  RoPE by 4, and the declared scaling has no part in it.
- The `rope_parameters` of a checkpoint, sent as `pe`, give its `default`. Some have an object per type of layer
  (Gemma 3, OLMo 3): send that of `full_attention`. The library also takes the whole.
- A position map without `base` uses the declared scaling once.

Checkpoints for a million tokens (Qwen2.5-1M, Qwen3-2507) declare dual chunk attention in
`dual_chunk_attention_config`. The code of transformers 5.24 passes over it. So its logits differ beyond the first chunk
of `chunk_size` - `local_size` tokens, and beyond the trained length. Here `default` has the rotation and the
temperature of vLLM's code, and no sparse attention. The temperature is that of the reserved length. In vLLM it follows
the growing length of a text, and cached keys keep the factor of their time. Plain RoPE, as in transformers, is
`default` with the checkpoint's `rope_theta`: `{"method": "default", "rope_theta": 10000000.0}`. A position map without
`base` takes the place of the declared one. Beside another scaling, the entry is refused at start-up.
"""


def declared(native: Any) -> str:
    """The checkpoint's own encoding with every number that it declares, but those of other columns."""
    fields = native.model_dump(exclude_unset=True)
    numbers = {n: value for n, value in fields.items() if isinstance(value, int | float) and n not in OTHER_COLUMNS}
    shown = [f"{n}={value}" if isinstance(value, int) else f"{n}={value:.5g}" for n, value in numbers.items()]
    return f"{native.method}({', '.join(shown)})" if shown else str(native.method)


def bases(patch: Patched) -> str:
    """``rope_theta``, and that of layers with another rotary type."""
    others = patch.model.config.rope_parameters.get("sliding_attention")
    sliding = "" if others is None else f", sliding layers {others['rope_theta']:,.0f}"
    return f"{patch.geometry.rope_theta:,.0f}{sliding}"


def line(name: str) -> str:
    case = (CASES | IN_CHUNKS)[name]
    with carried(case) as patch:
        geometry = patch.geometry
        trained = geometry.original_max_position_embeddings
        at = {times: resolve(parse({"method": "default"}), geometry, times * trained) for times in (1, 4)}
        plain = geometry.rope_theta ** (2 / geometry.rotary_dim - 1)  # lowest frequency
        divisors = [f"{plain / at[times].inv_freq[-1]:.4g}" for times in (1, 4)]
        temperature = getattr(at[4].recipe.attention_temperature, "multiplier", 1.0)
        by_position = ", and by position" if "llama_4_scaling_beta" in str(case.published) else ""
        cells = [
            name,
            f"{trained:,}",
            f"{geometry.max_position_embeddings:,}",
            f"`{declared(geometry.native)}`",
            bases(patch),
            divisors[0] if divisors[0] == divisors[1] else " and ".join(divisors),
            f"{at[4].attention_factor:.4g}",
            f"{temperature:.4g}{by_position}",
            "every layer" if set(patch.layers) <= {"slots", "tempered"} else "full attention",
        ]
        return f"| {' | '.join(cells)} |"


def document() -> str:
    return HEAD + "\n".join(map(line, CASES | IN_CHUNKS)) + "\n" + NOTES


if __name__ == "__main__":
    FILE.write_text(document(), encoding="utf-8")
