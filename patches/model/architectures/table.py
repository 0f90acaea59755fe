"""The table: model type of a configuration -> its entry for the seams."""

from __future__ import annotations

from typing import Any

from torch import nn

from patches.model.architectures.architecture import Architecture
from patches.model.architectures.bloom import BLOOM
from patches.model.architectures.falcon import FALCON
from patches.model.architectures.gpt2 import GPT2
from patches.model.architectures.gpt_neo import GPT_NEO
from patches.model.architectures.gptj import GPTJ
from patches.model.architectures.inkling import INKLING
from patches.model.architectures.llama4 import LLAMA4
from patches.model.architectures.mpt import MPT
from patches.model.architectures.opt import OPT
from patches.model.architectures.phimoe import PHIMOE
from patches.model.architectures.recurrent_gemma import RECURRENT_GEMMA
from patches.model.architectures.ropeway_demo import ROPEWAY_DEMO
from patches.model.architectures.without_rotation import EXAONE, SLIDING, SMOLLM3
from patches.model.architectures.xglm import XGLM

ARCHITECTURES: dict[str, Architecture] = {
    "afmoe": SLIDING,
    "biogpt": OPT,
    "bloom": BLOOM,
    "codegen": GPTJ,
    "cohere2": SLIDING,
    "exaone4": EXAONE,
    "falcon": FALCON,
    "gpt2": GPT2,
    "gpt_bigcode": GPT2,
    "gpt_neo": GPT_NEO,
    "gptj": GPTJ,
    "inkling_text": INKLING,
    "llama4_text": LLAMA4,
    "mpt": MPT,
    "opt": OPT,
    "phimoe": PHIMOE,
    "recurrent_gemma": RECURRENT_GEMMA,
    "ropeway_demo": ROPEWAY_DEMO,
    "smollm3": SMOLLM3,
    "xglm": XGLM,
}


def architecture_of(model: nn.Module) -> Architecture | None:
    """The entry of the type of a language model; None where the seams find everything by themselves."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return ARCHITECTURES.get(getattr(text, "model_type", ""))
