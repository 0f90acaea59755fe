"""llama.cpp: ``--rope-scaling`` and its neighbours, and ``--ctx-size``.

``common/arg.cpp`` has the options, ``src/llama-context.cpp`` their meaning. ``--yarn-attn-factor`` has no effect under
YaRN there, so a chosen factor on cos and sin is refused.
"""

from __future__ import annotations

import math
import shlex
from dataclasses import replace
from typing import ClassVar

from patches import ResolvedRecipe, RopeType, grouping, rope_parameters
from service.export.target import (
    Expression,
    Form,
    Inexpressible,
    Target,
    Wanted,
    first,
    fixed,
    number,
    one_set_of_frequencies,
)

KINDS = {RopeType.DEFAULT: "none", RopeType.LINEAR: str(RopeType.LINEAR), RopeType.YARN: str(RopeType.YARN)}
"""Values of ``--rope-scaling``."""

OPTIONS = {
    "rope_theta": "--rope-freq-base",
    "factor": "--rope-scale",
    "original_max_position_embeddings": "--yarn-orig-ctx",
    "beta_fast": "--yarn-beta-fast",
    "beta_slow": "--yarn-beta-slow",
}
"""Options by the entries of ``rope_parameters``."""

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
        form = first(wanted, set(KINDS), lambda form: form.keys() <= {"rope_type", *OPTIONS})
        return Expression({}, [*_scaling(form), *self.unchanged(wanted.length).arguments], fixed(wanted))

    def _grouped(self, wanted: Wanted, size: int, window: int, rest: ResolvedRecipe) -> Expression:
        forms = rope_parameters(rest, wanted.geometry, wanted.length)
        scaled = self.express(replace(wanted, resolved=rest, forms=tuple(forms), obstacle=""))
        width = math.ceil(window / size) * size  # tools/completion/completion.cpp asks for a multiple
        grouped = [GROUP_SIZE, str(size), "--grp-attn-w", str(width)]
        difference = (
            f"llama.cpp groups cached keys in blocks of {width} tokens as the text grows; Self-Extend groups by "
            "distance for every query."
        )
        return Expression({}, [*scaled.arguments, *grouped], [*scaled.differences, difference])

    def unchanged(self, length: int) -> Expression:
        return Expression({}, ["--ctx-size", str(length)])

    def usage(self, model: str, expression: Expression) -> str:
        program = "llama-completion" if GROUP_SIZE in expression.arguments else "llama-server"
        return shlex.join([program, "--model", f"{model}.gguf", *expression.arguments])


def _scaling(form: Form) -> list[str]:
    arguments = ["--rope-scaling", KINDS[form["rope_type"]]]
    for entry, option in OPTIONS.items():
        if entry in form:
            arguments += [option, number(form[entry])]
    return arguments
