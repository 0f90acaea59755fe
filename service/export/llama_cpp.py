"""llama.cpp: ``--rope-scaling`` and its neighbours, and ``--ctx-size``.

``common/arg.cpp`` has the options, ``src/llama-context.cpp`` their meaning: the file's entry counts where an option is
absent. ``--yarn-attn-factor`` has no effect under YaRN there, so a chosen factor on cos and sin is refused.
"""

from __future__ import annotations

import math
import shlex
from dataclasses import replace
from typing import Any, ClassVar

from patches import ResolvedRecipe, RopeType, grouping
from service.export.target import (
    NO_OPTION,
    TRAINED,
    YARN_DEFAULTS,
    Expression,
    Form,
    Inexpressible,
    Target,
    Wanted,
    first,
    fixed,
    number,
    one_set_of_frequencies,
    within_reach,
)

KINDS = {RopeType.DEFAULT: "none", RopeType.LINEAR: str(RopeType.LINEAR), RopeType.YARN: str(RopeType.YARN)}
"""Values of ``--rope-scaling``."""

OPTIONS = {
    "rope_theta": "--rope-freq-base",
    "factor": "--rope-scale",
    "original_max_position_embeddings": "--yarn-orig-ctx",
    "beta_fast": "--yarn-beta-fast",
    "beta_slow": "--yarn-beta-slow",
    "attn_factor": "--yarn-attn-factor",
}
"""Options by the entries of ``rope_parameters``."""

FACTORS = {"attention_factor", "attn_factor"}
"""Entries of a checkpoint that its file has as ``yarn_attn_factor``."""

ARCHITECTURES = {
    **dict.fromkeys(("llama", "mistral", "mixtral"), "llama"),
    **{name: name for name in ("qwen2", "qwen3", "phi3", "gemma", "gemma2", "stablelm", "starcoder2", "smollm3")},
    **{name: name for name in ("olmo", "olmo2", "glm4", "granite", "nemotron", "falcon", "cohere2")},
    **{"qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "phi": "phi2", "gpt_neox": "gptneox", "cohere": "command-r"},
    **{"deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2", "gpt_oss": "gpt-oss"},
}
"""Names in GGUF files by ``model_type`` (``gguf.constants``, 0.19)."""

SERVER, COMPLETION = "llama-server", "llama-completion"

GROUP_SIZE = "--grp-attn-n"
"""An option of ``llama-completion`` only; the server lost it in 2024 (pull request 9860)."""


class LlamaCpp(Target):
    name: ClassVar[str] = "llama.cpp"
    version: ClassVar[str] = "b11549"
    documentation: ClassVar[str] = "https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md"
    apply: ClassVar[str] = "Add the options to `llama-server`; group attention is an option of `llama-completion` only."

    def express(self, wanted: Wanted) -> Expression:
        one_set_of_frequencies(wanted)
        if wanted.own.get("rope_type") in (RopeType.LLAMA3, RopeType.LONGROPE):
            raise Inexpressible("its GGUF files contain this checkpoint's own divisors, which no option removes")
        grouped = grouping(wanted.resolved)
        if grouped is not None:
            return self._grouped(wanted, *grouped)
        form = first(wanted, set(KINDS), lambda form: _fits(form, wanted.length), reason=_reason(wanted))
        _refuse_mscale_of_the_file(form, wanted)
        limit, capped = _limit(form, wanted)
        arguments = [*_scaling(_ended(form, wanted.own)), *limit, *self.unchanged(wanted.length).arguments]
        return Expression({}, arguments, [*fixed(wanted), *capped])

    def _grouped(self, wanted: Wanted, size: int, window: int, rest: ResolvedRecipe) -> Expression:
        scaled = self.express(replace(wanted, resolved=rest))
        width = math.ceil(window / size) * size  # tools/completion/completion.cpp asks for a multiple
        grouped = [GROUP_SIZE, str(size), "--grp-attn-w", str(width)]
        difference = (
            f"llama.cpp groups cached keys in blocks of {width} tokens as the text grows; Self-Extend groups by "
            "distance for every query."
        )
        rounded = f"neighbor_window {window} becomes {width}, since llama.cpp asks for a multiple of group_size {size}."
        missing = f"`{SERVER}` has no group attention: it is an option of `{COMPLETION}`."
        differences = [*scaled.differences, difference, missing, *([] if width == window else [rounded])]
        return Expression({}, [*scaled.arguments, *grouped], differences)

    def unchanged(self, length: int) -> Expression:
        return Expression({}, ["--ctx-size", str(length)])

    def lengthened(self, expression: Expression, config: dict[str, Any]) -> Expression:
        return expression  # a GGUF file needs no entry

    def differences_of_own(self, wanted: Wanted) -> list[str]:
        if wanted.own.get("rope_type") == RopeType.YARN and wanted.own.get("truncate") is False:
            return ["llama.cpp rounds the bounds of YaRN's ramp, and this checkpoint has truncate false."]
        factor = wanted.own_lists_factor
        computed = "convert_hf_to_gguf.py computes LongRoPE's factor on cos and sin from the lengths"
        other = [] if factor is None else [f"{computed}, and this checkpoint has {factor:.6g}."]
        return [*fixed(wanted), *other]

    def usage(self, model: str, expression: Expression) -> str:
        return shlex.join([_program(expression), "--model", f"{model}.gguf", *expression.arguments])

    def place(self, expression: Expression) -> str:
        program = _program(expression)
        why = "" if program == SERVER else f": `{SERVER}` has no group attention"
        return f"Add the options to `{program}`{why}."

    def adapter(self, name: str, folder: str) -> tuple[list[str], str]:
        return ["--lora", f"{folder}.gguf"], f"convert_lora_to_gguf.py writes {folder}.gguf from the adapter's folder."


def _program(expression: Expression) -> str:
    return COMPLETION if GROUP_SIZE in expression.arguments else SERVER


def _refuse_mscale_of_the_file(form: Form, wanted: Wanted) -> None:
    """``src/models/deepseek2.cpp`` and ``src/llama-context.cpp`` read ``yarn_log_multiplier``.

    Raises:
        Inexpressible: where they multiply scores, or cos and sin, by more than the form asks for.
    """
    if form["rope_type"] == RopeType.DEFAULT:
        return
    if wanted.geometry.latent:
        raise Inexpressible("it multiplies whole scores of latent attention by YaRN's factor under any scaling")
    if form["rope_type"] == RopeType.YARN and wanted.own.get("mscale_all_dim"):
        raise Inexpressible("its GGUF files have this checkpoint's mscale_all_dim, which no option removes")


def _ended(form: Form, own: Form) -> Form:
    """``form`` with the entries that take the place of those in the file."""
    if form["rope_type"] == RopeType.YARN:
        return {**{name: value for name, value in YARN_DEFAULTS.items() if name in own}, **form}
    return {**form, "attn_factor": 1.0} if FACTORS & own.keys() else form


def _fits(form: Form, length: int) -> bool:
    return _has_options(form) and within_reach(form, length)


def _has_options(form: Form) -> bool:
    return form["rope_type"] in KINDS and form.keys() <= {"rope_type", *OPTIONS}


def _reason(wanted: Wanted) -> str:
    """The reason if nothing fits: there is no option, or contexts end before the length."""
    form = next(filter(_has_options, wanted.forms), None)
    if form is None or within_reach(form, wanted.length):
        return NO_OPTION
    return f"its contexts under YaRN end at {form['factor'] * form[TRAINED]:,.0f} tokens, by the factor"


def _limit(form: Form, wanted: Wanted) -> tuple[list[str], list[str]]:
    """Options and differences: without YaRN, ``llama-server`` cuts contexts to ``context_length`` of the file."""
    if form["rope_type"] == RopeType.YARN or wanted.length <= wanted.geometry.max_position_embeddings:
        return [], []
    name = ARCHITECTURES.get(wanted.model_type)
    if name is None:
        return [], ["llama-server cuts contexts to context_length of the file; --override-kv can raise it."]
    return ["--override-kv", f"{name}.context_length=int:{wanted.length}"], []


def _scaling(form: Form) -> list[str]:
    arguments = ["--rope-scaling", KINDS[form["rope_type"]]]
    for entry, option in OPTIONS.items():
        if entry in form:
            arguments += [option, number(form[entry])]
    return arguments
