"""vLLM: ``--hf-overrides`` with ``rope_parameters``, and ``--max-model-len``; ``--lora-modules`` for an adapter."""

from __future__ import annotations

import json
import shlex
from typing import ClassVar

from patches import RopeType, in_configuration
from service.export.target import (
    Expression,
    Form,
    Target,
    Wanted,
    first,
    fixed,
    maximum,
    with_mscales,
    within_reach,
)

# vllm/model_executor/layers/rotary_embedding/__init__.py. Its "dynamic" is fixed at start-up, as a base alone is.
TYPES = {RopeType.DEFAULT, RopeType.LINEAR, RopeType.YARN, RopeType.LLAMA3, RopeType.LONGROPE}


class VLLM(Target):
    name: ClassVar[str] = "vllm"
    version: ClassVar[str] = "0.33.0"
    documentation: ClassVar[str] = "https://docs.vllm.ai/en/stable/features/context_extension/"
    apply: ClassVar[str] = "Add the options to `vllm serve`."

    def express(self, wanted: Wanted) -> Expression:
        form = first(wanted, TYPES, lambda form: fits(form, wanted))
        parameters = in_configuration(with_mscales(form, wanted.length), wanted.own)
        # A longer --max-model-len than max_position_embeddings, times a linear factor, is refused.
        overrides = {"rope_parameters": parameters, "max_position_embeddings": maximum(form, wanted.length)}
        arguments = ["--hf-overrides", json.dumps(overrides), *self.unchanged(wanted.length).arguments]
        return Expression(overrides, arguments, fixed(wanted))

    def unchanged(self, length: int) -> Expression:
        return Expression({}, ["--max-model-len", str(length)])

    def usage(self, model: str, expression: Expression) -> str:
        return shlex.join(["vllm", "serve", model, *expression.arguments])

    def adapter(self, name: str, folder: str) -> tuple[list[str], str]:
        options = ["--enable-lora", "--lora-modules", f"{name}={folder}"]
        return options, f"{folder} is that of the adapter; a rank above 16 needs --max-lora-rank."


def fits(form: Form, wanted: Wanted) -> bool:
    """True for what vLLM and SGLang can read: lists of divisors for pairs (i, i + d/2) only."""
    reads = form["rope_type"] != RopeType.LONGROPE or not wanted.geometry.interleaved
    return reads and within_reach(form, wanted.length)
