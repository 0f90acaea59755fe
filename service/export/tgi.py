"""Text Generation Inference: ``rope_scaling`` in ``config.json``, or ``--rope-scaling`` with ``--rope-factor``.

``server/text_generation_server/layers/rotary.py`` reads them. Its "linear" leaves the frequencies as they are, so lists
of divisors take its place. YaRN has fixed turns there, and lists change at the trained length within one text.
"""

from __future__ import annotations

import shlex
from typing import Any, ClassVar

from patches import RopeType
from service.export.target import (
    YARN_DEFAULTS,
    Expression,
    Form,
    Target,
    Wanted,
    first,
    fixed,
    has_one_list,
    number,
    one_set_of_frequencies,
)

TYPES = {RopeType.DEFAULT, RopeType.DYNAMIC, RopeType.YARN, RopeType.LLAMA3, RopeType.LONGROPE}
OF_YARN = {"rope_type", "rope_theta", "factor", "original_max_position_embeddings"}
"""Entries of YaRN that it reads."""

FOLLOWS = "Frequencies follow the longest text so far, and stay for every later text."
BY_POSITION = "Positions past the trained length take the long list, and those before it keep the short one."


class TextGenerationInference(Target):
    name: ClassVar[str] = "tgi"
    version: ClassVar[str] = "3.3.6"
    documentation: ClassVar[str] = "https://huggingface.co/docs/text-generation-inference/reference/launcher"
    apply: ClassVar[str] = "Write the entries into `config.json`, and add the options to `text-generation-launcher`."

    def express(self, wanted: Wanted) -> Expression:
        one_set_of_frequencies(wanted)
        form = first(wanted, TYPES, _fits)
        if form["rope_type"] == RopeType.DYNAMIC:
            return self._dynamic(form, wanted)
        config: dict[str, Any] = {"rope_theta": form["rope_theta"], "max_position_embeddings": wanted.length}
        scaling = {name: value for name, value in form.items() if name not in ("rope_theta", "attention_factor")}
        if has_one_list(form):
            del scaling["factor"]
            config["original_max_position_embeddings"] = scaling["original_max_position_embeddings"] = wanted.length
        config["rope_scaling"] = None if form["rope_type"] == RopeType.DEFAULT else scaling
        return Expression(config, self.unchanged(wanted.length).arguments, fixed(wanted))

    def _dynamic(self, form: Form, wanted: Wanted) -> Expression:
        config = {"rope_theta": form["rope_theta"], "max_position_embeddings": form["original_max_position_embeddings"]}
        options = ["--rope-scaling", str(form["rope_type"]), "--rope-factor", number(form["factor"])]
        differences = [FOLLOWS] if wanted.varies else []
        return Expression(config, [*options, *self.unchanged(wanted.length).arguments], differences)

    def own(self, wanted: Wanted) -> Expression:
        return super().own(wanted) if _is_read(wanted) else self.express(wanted)

    def unchanged(self, length: int) -> Expression:
        return Expression({}, ["--max-total-tokens", str(length), "--max-input-tokens", str(length - 1)])

    def differences_of_own(self, wanted: Wanted) -> list[str]:
        by_position = wanted.varies and wanted.by_length["rope_type"] == RopeType.LONGROPE
        return [BY_POSITION] if by_position else fixed(wanted)

    def usage(self, model: str, expression: Expression) -> str:
        return shlex.join(["text-generation-launcher", "--model-id", model, *expression.arguments])

    def adapter(self, name: str, folder: str) -> tuple[list[str], str]:
        note = f"{folder} is that of the adapter; requests choose it by the parameter adapter_id."
        return ["--lora-adapters", f"{name}={folder}"], note


def _is_read(wanted: Wanted) -> bool:
    """True for a checkpoint's own encoding that it reads as it is."""
    kind = wanted.own.get("rope_type")
    if kind == RopeType.YARN:
        fixed_there = {**YARN_DEFAULTS, "attention_factor": None}
        return all(wanted.own.get(name) in (None, value) for name, value in fixed_there.items())
    return kind != RopeType.LINEAR and wanted.own_lists_factor is None


def _fits(form: Form) -> bool:
    if form["rope_type"] == RopeType.YARN:
        return form.keys() <= OF_YARN
    if form["rope_type"] == RopeType.LONGROPE:
        return has_one_list(form) and form["attention_factor"] == 1.0
    return True
