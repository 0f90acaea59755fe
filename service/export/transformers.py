"""transformers: ``rope_parameters`` of the configuration."""

from __future__ import annotations

from typing import ClassVar

from patches import RopeType, in_configuration, is_by_layer
from service.export.target import TRAINED, Expression, Form, Target, Wanted, first, fixed, has_one_list

TYPES = {
    RopeType.DEFAULT,
    RopeType.LINEAR,
    RopeType.DYNAMIC,
    RopeType.YARN,
    RopeType.LLAMA3,
    RopeType.LONGROPE,
}


class Transformers(Target):
    name: ClassVar[str] = "transformers"
    version: ClassVar[str] = "5.24.0"
    documentation: ClassVar[str] = "https://huggingface.co/docs/transformers/internal/rope_utils"
    apply: ClassVar[str] = "Pass the entries to `from_pretrained`, or write them into `config.json`."

    def express(self, wanted: Wanted) -> Expression:
        # 5.24 looks for "truncate" beside the types of layers, so an entry within a type has no effect.
        by_layer = is_by_layer(wanted.own)
        form = first(wanted, TYPES, lambda form: not (by_layer and "truncate" in form), reads_mscale=True)
        longest = wanted.length
        if form["rope_type"] == RopeType.DYNAMIC:
            # It scales from max_position_embeddings, whatever original_max_position_embeddings says.
            longest = form[TRAINED]
            form = {name: value for name, value in form.items() if name != TRAINED}
        config = {"rope_parameters": in_configuration(form, wanted.own), "max_position_embeddings": longest}
        return Expression(config, [], _differences(form, wanted))

    def unchanged(self, length: int) -> Expression:
        return Expression()

    def differences_of_own(self, wanted: Wanted) -> list[str]:
        return _differences(wanted.by_length, wanted)

    def usage(self, model: str, expression: Expression) -> str:
        arguments = "".join(f", {name}={value!r}" for name, value in expression.config.items())
        return f"AutoModelForCausalLM.from_pretrained({model!r}{arguments})"


def _differences(form: Form, wanted: Wanted) -> list[str]:
    if not wanted.varies:
        return []
    if form["rope_type"] == RopeType.DYNAMIC:
        return ["Frequencies follow the tokens so far; cached keys keep the frequencies of their time."]
    if form["rope_type"] == RopeType.LONGROPE and not has_one_list(form):
        return ["The list follows the tokens so far; cached keys keep the frequencies of their time."]
    return fixed(wanted)
