"""A system that an encoding is exported to, and the encoding as every system gets it."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

from patches import NoRopeParameters, ResolvedRecipe, RopeGeometry, RopeType, is_by_layer, rope_parameters

Form = Mapping[str, Any]
"""An encoding as transformers' ``rope_parameters``."""


TRAINED = "original_max_position_embeddings"
YARN_DEFAULTS: Mapping[str, Any] = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
"""Entries of YaRN that a form leaves out, since most readers fill them."""


class Inexpressible(ValueError):
    """The system has no option for a part of the encoding; the message names the part."""


@dataclass(frozen=True)
class Wanted:
    """An encoding on one model, for at most ``length`` tokens.

    ``own`` is ``rope_parameters`` of the checkpoint's configuration, ``model_type`` its kind of model. ``varies`` is
    true if shorter requests have other numbers.
    """

    geometry: RopeGeometry
    length: int
    resolved: ResolvedRecipe
    own: Form
    model_type: str
    varies: bool

    @cached_property
    def forms(self) -> Sequence[Form]:
        """Equal ways to write it, the most specific first.

        Raises:
            NoRopeParameters: naming the part that none of them has.
        """
        return rope_parameters(self.resolved, self.geometry, self.length)

    @property
    def own_attention_factor(self) -> bool:
        """True for a checkpoint's factor on cos and sin that vLLM and SGLang do not read: ``attention_factor``."""
        if self.own.get("rope_type") == RopeType.YARN:
            return self.own.get("attention_factor") is not None
        return self.own_lists_factor is not None and "short_mscale" not in self.own

    @property
    def own_lists_factor(self) -> float | None:
        """The factor on cos and sin of a checkpoint with LongRoPE's lists; None where its lengths imply it.

        Most systems compute it from the lengths.
        """
        declared, trained = self.geometry.max_position_embeddings, self.geometry.original_max_position_embeddings
        own = self.resolved.attention_factor
        has_lists = self.own.get("rope_type") == RopeType.LONGROPE
        return None if not has_lists or is_implied(own, declared, trained) else own

    @property
    def by_length(self) -> Form:
        """The most specific form of an encoding that depends on the length; a plain one where there is none."""
        plain = {"rope_type": RopeType.DEFAULT}
        try:
            return plain if self.resolved.length is None else self.forms[0]
        except NoRopeParameters:
            return plain


@dataclass(frozen=True)
class Expression:
    """Entries of the checkpoint's ``config.json``, options of the command, and differences to the encoding here."""

    config: dict[str, Any] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)


class Target(ABC):
    """One system. ``version`` is the one whose sources were read; ``documentation`` has the options."""

    name: ClassVar[str]
    version: ClassVar[str]
    documentation: ClassVar[str]
    apply: ClassVar[str]
    """The place of the result, as one sentence."""
    config_option: ClassVar[str] = ""
    """The option that takes entries of ``config.json``, where there is one."""
    reads_chunks: ClassVar[bool] = False
    """True if it reads ``dual_chunk_attention_config`` in place of ``rope_parameters``."""

    @abstractmethod
    def express(self, wanted: Wanted) -> Expression:
        """The encoding in this system's syntax.

        Raises:
            Inexpressible: naming what the system has no option for.
            NoRopeParameters: naming what no ``rope_parameters`` have.
        """

    @abstractmethod
    def unchanged(self, length: int) -> Expression:
        """The checkpoint's own encoding, for at most ``length`` tokens."""

    def own(self, wanted: Wanted) -> Expression:
        """The checkpoint's own encoding by ``unchanged``, with this system's differences in reading it."""
        return replace(self.unchanged(wanted.length), differences=self.differences_of_own(wanted))

    def lengthened(self, expression: Expression, config: dict[str, Any]) -> Expression:
        """``expression`` of a model that rotates nothing, with ``config`` for texts past the declared length."""
        option = [self.config_option, json.dumps(config)] if self.config_option else []
        return replace(expression, config=expression.config | config, arguments=[*option, *expression.arguments])

    def differences_of_own(self, wanted: Wanted) -> list[str]:
        """Differences of the checkpoint's own encoding here to this system's reading of it."""
        return fixed(wanted)

    @abstractmethod
    def usage(self, model: str, expression: Expression) -> str:
        """One line for a shell or for Python."""

    def place(self, expression: Expression) -> str:
        """``apply`` for the program of ``expression``."""
        return self.apply

    def adapter(self, name: str, folder: str) -> tuple[list[str], str]:
        """Options that serve a LoRA adapter beside its base, and a sentence on them; none where it must be merged."""
        return [], ""


NO_OPTION = "it has no option for these frequencies or their factor on cos and sin"


def first(
    wanted: Wanted,
    types: set[RopeType],
    fits: Callable[[Form], bool] = lambda form: True,
    *,
    reads_mscale: bool = False,
    reason: str = NO_OPTION,
) -> Form:
    """The first form of a type that a system reads and that ``fits``. ``reads_mscale``: also DeepSeek's pair.

    Raises:
        Inexpressible: with ``reason``, when there is none.
    """
    for form in wanted.forms:
        if "mscale_all_dim" in form and not reads_mscale:
            raise Inexpressible("its temperature multiplies whole scores, and this model rotates a part of each head")
        if form["rope_type"] in types and fits(form):
            return form
    raise Inexpressible(reason)


def one_set_of_frequencies(wanted: Wanted) -> None:
    """Raises:
    Inexpressible: for a model whose layers differ.
    """
    if is_by_layer(wanted.own):
        raise Inexpressible("this model's frequencies differ by layer, and its options reach all layers")


def fixed(wanted: Wanted) -> list[str]:
    """The difference of a system that chooses frequencies once, for encodings that follow the length."""
    return [fixed_for(wanted.length)] if wanted.varies else []


def fixed_for(length: int) -> str:
    """The difference of frequencies that every request gets as they are for ``length`` tokens."""
    return f"Frequencies are fixed for {length} tokens; shorter requests get the same ones."


def written_out(form: Form, length: int) -> dict[str, Any]:
    """YaRN with all its entries. A base alone is YaRN of factor 1, with a table of angles for ``length``."""
    plain = {"rope_type": RopeType.YARN, "factor": 1.0, TRAINED: length}
    return {**form, **(plain if form["rope_type"] == RopeType.DEFAULT else {})} | {
        name: form.get(name, value) for name, value in YARN_DEFAULTS.items()
    }


def has_one_list(form: Form) -> bool:
    """True for divisors that do not depend on the length."""
    return form["rope_type"] == RopeType.LONGROPE and bool(form["short_factor"] == form["long_factor"])


def is_implied(factor: float, longest: int, trained: int) -> bool:
    """True for LongRoPE's factor on cos and sin, sqrt(1 + ln(s) / ln(trained)) for s = longest / trained above 1."""
    ratio = max(1.0, longest / trained)
    return math.isclose(factor, math.sqrt(1 + math.log(ratio) / math.log(trained)), rel_tol=1e-6)


def within_reach(form: Form, length: int) -> bool:
    """True if a system's table of angles covers ``length``: factor times the trained length under YaRN."""
    return form["rope_type"] != RopeType.YARN or bool(length <= form["factor"] * form[TRAINED])


def maximum(form: Form, length: int) -> int:
    """``max_position_embeddings`` for systems that multiply it by a linear factor."""
    return math.ceil(length / form["factor"]) if form["rope_type"] == RopeType.LINEAR else length


def with_mscales(form: Form, length: int) -> dict[str, Any]:
    """LongRoPE's lists with vLLM's names for the factor; equal lists apply to all ``length`` tokens."""
    if form["rope_type"] != RopeType.LONGROPE:
        return dict(form)
    kept = {name: value for name, value in form.items() if name not in ("attention_factor", "factor")}
    if has_one_list(form):
        kept["original_max_position_embeddings"] = length
    return kept | dict.fromkeys(("short_mscale", "long_mscale"), form["attention_factor"])


def with_attn_factor(form: Form) -> dict[str, Any]:
    """YaRN with the factor on cos and sin that vLLM and SGLang read: ``attn_factor`` multiplies 0.1 ln(factor) + 1."""
    changed = dict(form)
    if form["rope_type"] == RopeType.YARN and "attention_factor" in form:
        changed["attn_factor"] = changed.pop("attention_factor") / (0.1 * math.log(form["factor"]) + 1.0)
    return changed


def number(value: float) -> str:
    """A number as a command line has it, with all its digits."""
    return str(int(value)) if float(value).is_integer() else repr(float(value))
