"""SGLang: ``--json-model-override-args`` with ``rope_parameters``, and ``--context-length``."""

from __future__ import annotations

import json
import shlex
from typing import Any, ClassVar

from patches import RopeType, in_configuration, is_by_layer
from service.export.target import (
    TRAINED,
    YARN_DEFAULTS,
    Expression,
    Form,
    Target,
    Wanted,
    first,
    fixed,
    has_one_list,
    maximum,
    with_attn_factor,
    with_mscales,
    written_out,
)
from service.export.vllm import fits, fixed_at_start

# python/sglang/srt/layers/rotary_embedding/factory.py. Its "dynamic" is fixed at start-up, as a base alone is.
TYPES = {RopeType.DEFAULT, RopeType.LINEAR, RopeType.YARN, RopeType.LLAMA3, RopeType.LONGROPE}
WITHOUT_EFFECT = {**YARN_DEFAULTS, "factor": 1.0, "attn_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}
"""The pair of ``mscale`` gives 0.1 ln(factor) + 1, as no pair does."""


class SGLang(Target):
    name: ClassVar[str] = "sglang"
    version: ClassVar[str] = "0.5.23"
    documentation: ClassVar[str] = "https://docs.sglang.io/advanced_features/server_arguments.html"
    apply: ClassVar[str] = "Add the options to `python -m sglang.launch_server`."
    config_option: ClassVar[str] = "--json-model-override-args"
    reads_chunks: ClassVar[bool] = True

    def express(self, wanted: Wanted) -> Expression:
        form = first(wanted, TYPES, lambda form: fits(form, wanted))
        # Its code of DeepSeek takes every form for its own kind of YaRN, a base alone as well.
        written = written_out(form, wanted.length) if wanted.geometry.latent else with_mscales(form, wanted.length)
        parameters = _cleared(in_configuration(with_attn_factor(written), wanted.own), wanted)
        # A longer --context-length than max_position_embeddings is refused. A factor counts without a trained length.
        longest = wanted.length if TRAINED in parameters else maximum(form, wanted.length)
        overrides = {"rope_parameters": parameters, "max_position_embeddings": longest}
        arguments = [self.config_option, json.dumps(overrides), *self.unchanged(wanted.length).arguments]
        return Expression(overrides, arguments, _differences(form, wanted))

    def own(self, wanted: Wanted) -> Expression:
        return self.express(wanted) if wanted.own_attention_factor else super().own(wanted)

    def unchanged(self, length: int) -> Expression:
        return Expression({}, ["--context-length", str(length)])

    def differences_of_own(self, wanted: Wanted) -> list[str]:
        form = wanted.by_length
        return _differences(form, wanted) if form["rope_type"] == RopeType.LONGROPE else fixed_at_start(wanted)

    def usage(self, model: str, expression: Expression) -> str:
        return shlex.join(["python", "-m", "sglang.launch_server", "--model-path", model, *expression.arguments])

    def adapter(self, name: str, folder: str) -> tuple[list[str], str]:
        return ["--enable-lora", "--lora-paths", f"{name}={folder}"], f"{folder} is that of the adapter."


def _cleared(parameters: dict[str, Any], wanted: Wanted) -> dict[str, Any]:
    """``parameters`` that also end the checkpoint's scaling: SGLang adds them to its entries.

    SGLang passes each entry on, so those that it reads end as the numbers without effect. The others end as null.
    """
    if is_by_layer(wanted.own):
        return parameters
    ended = {**WITHOUT_EFFECT, "type": parameters["rope_type"], TRAINED: wanted.length}
    return {**{name: ended.get(name) for name in wanted.own if name not in parameters}, **parameters}


def _differences(form: Form, wanted: Wanted) -> list[str]:
    if wanted.varies and form["rope_type"] == RopeType.LONGROPE and not has_one_list(form):
        return ["The longest sequence of a batch chooses the list of all."]
    return fixed(wanted)
