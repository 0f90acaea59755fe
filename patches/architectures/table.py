"""The table: model type of a configuration -> what the seams need to be told about it."""

from __future__ import annotations

from torch import nn

from patches.architectures.architecture import Architecture
from patches.architectures.bloom import BLOOM
from patches.architectures.falcon import FALCON
from patches.architectures.gpt2 import GPT2
from patches.architectures.gptj import GPTJ
from patches.architectures.llama4 import LLAMA4
from patches.architectures.mpt import MPT
from patches.architectures.opt import OPT
from patches.architectures.ropeway_demo import ROPEWAY_DEMO
from patches.architectures.xglm import XGLM

ARCHITECTURES: dict[str, Architecture] = {
    "bloom": BLOOM,
    "falcon": FALCON,
    "gpt2": GPT2,
    "gptj": GPTJ,
    "llama4_text": LLAMA4,
    "mpt": MPT,
    "opt": OPT,
    "ropeway_demo": ROPEWAY_DEMO,
    "xglm": XGLM,
}


def architecture_of(model: nn.Module) -> Architecture | None:
    """The entry of a model's type; None where the seams find everything by themselves."""
    return ARCHITECTURES.get(getattr(getattr(model, "config", None), "model_type", ""))
