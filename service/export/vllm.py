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
    fixed_for,
    maximum,
    with_attn_factor,
    with_mscales,
    within_reach,
    written_out,
)

OF_YARN = {RopeType.DEFAULT, RopeType.YARN}
"""Types of models whose code has a kind of YaRN only: gpt_oss.py and deepseek_v2.py in vllm/model_executor/models."""

GPT_OSS = "gpt_oss"
MSCALES = {"mscale", "mscale_all_dim"}

# vllm/model_executor/layers/rotary_embedding/__init__.py. Its "dynamic" is fixed at start-up, as a base alone is.
TYPES = {RopeType.DEFAULT, RopeType.LINEAR, RopeType.YARN, RopeType.LLAMA3, RopeType.LONGROPE}

PLAIN_LORA = "It refuses adapters with DoRA or modules_to_save."


class VLLM(Target):
    name: ClassVar[str] = "vllm"
    version: ClassVar[str] = "0.33.0"
    documentation: ClassVar[str] = "https://docs.vllm.ai/en/stable/features/context_extension/"
    apply: ClassVar[str] = "Add the options to `vllm serve`."
    config_option: ClassVar[str] = "--hf-overrides"
    reads_chunks: ClassVar[bool] = True

    def express(self, wanted: Wanted) -> Expression:
        form = _form(wanted)
        parameters = in_configuration(with_attn_factor(with_mscales(form, wanted.length)), wanted.own)
        # A longer --max-model-len than max_position_embeddings, times a linear factor, is refused.
        overrides = {"rope_parameters": parameters, "max_position_embeddings": maximum(form, wanted.length)}
        arguments = [self.config_option, json.dumps(overrides), *self.unchanged(wanted.length).arguments]
        return Expression(overrides, arguments, fixed(wanted))

    def own(self, wanted: Wanted) -> Expression:
        # Its YaRN reads DeepSeek's pair for latent attention only.
        is_yarn = wanted.own.get("rope_type") == RopeType.YARN
        pair = is_yarn and not wanted.geometry.latent and wanted.own.keys() & MSCALES
        return self.express(wanted) if pair or wanted.own_attention_factor else super().own(wanted)

    def unchanged(self, length: int) -> Expression:
        return Expression({}, ["--max-model-len", str(length)])

    def differences_of_own(self, wanted: Wanted) -> list[str]:
        return fixed_at_start(wanted)

    def usage(self, model: str, expression: Expression) -> str:
        return shlex.join(["vllm", "serve", model, *expression.arguments])

    def adapter(self, name: str, folder: str) -> tuple[list[str], str]:
        options = ["--enable-lora", "--lora-modules", f"{name}={folder}"]
        return options, f"{folder} is that of the adapter; a rank above 16 needs --max-lora-rank. {PLAIN_LORA}"


def fits(form: Form, wanted: Wanted) -> bool:
    """True for what vLLM and SGLang can read: lists of divisors for pairs (i, i + d/2) only.

    Their code of DeepSeek takes any scaling for its own kind of YaRN. Bounds of that ramp are always rounded.
    """
    if wanted.geometry.latent and (form["rope_type"] not in OF_YARN or "truncate" in form):
        return False
    reads = form["rope_type"] != RopeType.LONGROPE or not wanted.geometry.interleaved
    return reads and within_reach(form, wanted.length)


def fixed_at_start(wanted: Wanted) -> list[str]:
    """The difference of own encodings that vLLM and SGLang fix at start-up: "dynamic" for its factor times the maximum,
    whatever the length."""
    form = wanted.by_length
    if form["rope_type"] == RopeType.DYNAMIC:
        return [fixed_for(round(form["factor"] * wanted.geometry.max_position_embeddings))]
    return fixed(wanted)


def _form(wanted: Wanted) -> Form:
    if wanted.model_type == GPT_OSS:
        reason = "its code of gpt-oss reads YaRN alone, without another factor on cos and sin, up to its reach"
        form = first(wanted, OF_YARN, lambda form: _without_factor(form) and fits(form, wanted), reason=reason)
        return written_out(form, wanted.length)
    # Its code of DeepSeek reads "attn_factor" in place of "attention_factor".
    return first(
        wanted, TYPES, lambda form: fits(form, wanted) and (not wanted.geometry.latent or _without_factor(form))
    )


def _without_factor(form: Form) -> bool:
    return "attention_factor" not in form
