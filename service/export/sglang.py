"""SGLang: ``--json-model-override-args`` with ``rope_parameters``, and ``--context-length``."""

from __future__ import annotations

import json
import math
import shlex
from typing import Any, ClassVar

from patches import RopeType, in_configuration, is_by_layer
from service.export.target import Expression, Form, Target, Wanted, first, fixed, maximum, with_mscales
from service.export.vllm import fits

# python/sglang/srt/layers/rotary_embedding/factory.py. Its "dynamic" is fixed at start-up, as a base alone is.
TYPES = {RopeType.DEFAULT, RopeType.LINEAR, RopeType.YARN, RopeType.LLAMA3, RopeType.LONGROPE}


class SGLang(Target):
    name: ClassVar[str] = "sglang"
    version: ClassVar[str] = "0.5.23"
    documentation: ClassVar[str] = "https://docs.sglang.io/advanced_features/server_arguments.html"
    apply: ClassVar[str] = "Add the options to `python -m sglang.launch_server`."

    def express(self, wanted: Wanted) -> Expression:
        form = first(wanted, TYPES, lambda form: fits(form, wanted))
        parameters = in_configuration(_with_attn_factor(with_mscales(form, wanted.length)), wanted.own)
        overrides = {
            "rope_parameters": _cleared(parameters, wanted.own),
            # A longer --context-length than max_position_embeddings, times a linear factor, is refused.
            "max_position_embeddings": maximum(form, wanted.length),
        }
        arguments = ["--json-model-override-args", json.dumps(overrides), *self.unchanged(wanted.length).arguments]
        follows = form["rope_type"] == RopeType.LONGROPE and form["short_factor"] != form["long_factor"]
        differences = ["The longest sequence of a batch chooses the list of all."] if follows else fixed(wanted)
        return Expression(overrides, arguments, differences)

    def unchanged(self, length: int) -> Expression:
        return Expression({}, ["--context-length", str(length)])

    def usage(self, model: str, expression: Expression) -> str:
        return shlex.join(["python", "-m", "sglang.launch_server", "--model-path", model, *expression.arguments])

    def adapter(self, name: str, folder: str) -> tuple[list[str], str]:
        return ["--enable-lora", "--lora-paths", f"{name}={folder}"], f"{folder} is that of the adapter."


def _with_attn_factor(form: Form) -> dict[str, Any]:
    """``attn_factor`` multiplies 0.1 ln(factor) + 1; SGLang does not read ``attention_factor``."""
    changed = dict(form)
    if form["rope_type"] == RopeType.YARN and "attention_factor" in form:
        changed["attn_factor"] = changed.pop("attention_factor") / (0.1 * math.log(form["factor"]) + 1.0)
    return changed


def _cleared(parameters: dict[str, Any], own: Form) -> dict[str, Any]:
    """``parameters`` that also end the checkpoint's scaling: SGLang adds them to its entries."""
    if is_by_layer(own):
        return parameters
    ended = {name: 1.0 if name in ("factor", "attn_factor") else None for name in own if name not in parameters}
    return {**ended, **parameters}
