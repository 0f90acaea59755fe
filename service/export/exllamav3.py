"""ExLlamaV3: ``rope_scaling`` in the ``config.json`` of the quantized model, and the size of the cache.

``exllamav3/util/rope.py`` computes YaRN's factor and LongRoPE's factor on cos and sin from ``max_position_embeddings``.
"""

from __future__ import annotations

import math
import shlex
from typing import Any, ClassVar

from patches import RopeType, in_configuration
from service.export.target import (
    TRAINED,
    Expression,
    Form,
    Target,
    Wanted,
    first,
    fixed,
    fixed_for,
    has_one_list,
    is_implied,
    one_set_of_frequencies,
)

TYPES = {RopeType.DEFAULT, RopeType.LINEAR, RopeType.YARN, RopeType.LLAMA3, RopeType.LONGROPE}
PAGE = 256
"""Tokens of a page; a cache is a whole number of pages."""


class ExLlamaV3(Target):
    name: ClassVar[str] = "exllamav3"
    version: ClassVar[str] = "1.6.5"
    documentation: ClassVar[str] = "https://github.com/turboderp-org/exllamav3/blob/master/exllamav3/util/rope.py"
    apply: ClassVar[str] = "Write the entries into the `config.json` of the model folder."

    def express(self, wanted: Wanted) -> Expression:
        one_set_of_frequencies(wanted)
        form = first(wanted, TYPES, lambda form: longest(form, wanted.length) is not None)
        scaling = {name: value for name, value in form.items() if name != "rope_theta"}
        if has_one_list(form):
            scaling[TRAINED] = wanted.length
        kept = {name: value for name, value in wanted.own.items() if name != "partial_rotary_factor"}
        # These two names come before rope_parameters, which the checkpoint may have as well.
        config: dict[str, Any] = {"rope_theta": form["rope_theta"], "rope_scaling": in_configuration(scaling, kept)}
        config["max_position_embeddings"] = longest(form, wanted.length)
        return Expression(config, self.unchanged(wanted.length).arguments, fixed(wanted))

    def unchanged(self, length: int) -> Expression:
        return Expression({}, ["--cache_size", str(math.ceil(length / PAGE) * PAGE)])

    def own(self, wanted: Wanted) -> Expression:
        # It ends at the start with an error for the type "dynamic".
        changed = wanted.by_length["rope_type"] == RopeType.DYNAMIC or _is_read_otherwise(wanted)
        return self.express(wanted) if changed else super().own(wanted)

    def differences_of_own(self, wanted: Wanted) -> list[str]:
        form, declared = wanted.by_length, wanted.geometry.max_position_embeddings
        if form["rope_type"] != RopeType.LONGROPE or has_one_list(form):
            return fixed(wanted)
        # max_position_embeddings chooses the list, and not the size of the cache.
        return [fixed_for(declared)] if declared > form[TRAINED] else []

    def usage(self, model: str, expression: Expression) -> str:
        return shlex.join(["python", "examples/chat.py", "--model_dir", model, *expression.arguments])


def _is_read_otherwise(wanted: Wanted) -> bool:
    """True for a checkpoint's numbers that it computes from lengths, where these imply others.

    They are YaRN's factor, and that of LongRoPE on cos and sin.
    """
    own = wanted.own
    if own.get("rope_type") == RopeType.YARN and own.get(TRAINED):
        return longest(own, wanted.length) != wanted.geometry.max_position_embeddings
    return wanted.own_lists_factor is not None


def longest(form: Form, length: int) -> int | None:
    """``max_position_embeddings`` that gives the form its numbers; None if there is none."""
    if form["rope_type"] == RopeType.YARN:
        scaled = form["factor"] * form[TRAINED]
        return int(scaled) if float(scaled).is_integer() else None
    if form["rope_type"] != RopeType.LONGROPE:
        return length
    trained = length if has_one_list(form) else form[TRAINED]
    return length if is_implied(form["attention_factor"], length, trained) else None
