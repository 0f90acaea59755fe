"""The tools of a request, and the model's choice among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from service.api.generation.structure import ANY_OBJECT, TOOLS, Structure, strictly
from service.api.openai.tools.reading import ForcedReader, FormedReader, PlainReader, Reader, TemplateReader
from service.api.openai.tools.schemas import (
    Allowed,
    AllowedTools,
    FlatAllowedTools,
    Function,
    NamedFunction,
    NamedTool,
)
from service.errors import bad_request
from service.models.registry import ServedModel
from service.models.text.grammar_parts import LIST, Known, Listing, behind_reasoning, either, of_calls
from service.models.text.grammar_text import GrammarRefused
from service.models.text.response_templates import (
    BUILT_IN,
    Thought,
    listing_of,
    parsing_of,
    reads_calls,
    thinks,
    thought_of,
)

Choice = str | NamedTool | NamedFunction | AllowedTools | FlatAllowedTools


@dataclass(frozen=True)
class Offer:
    """``functions`` that the model may call, or has to if it ``must``; ``several`` at once if it may.

    If some are ``allowed``, by their names, it sees the others too and calls none of them.
    """

    functions: tuple[Function, ...] = ()
    must: bool = False
    several: bool = True
    allowed: frozenset[str] | None = None

    @classmethod
    def of(cls, functions: Sequence[Function], choice: Choice | None, *, several: bool | None) -> Offer:
        """The offer of the fields ``tools`` and ``tool_choice``.

        Raises:
            ApiError: for functions of one name, and a choice that they do not have.
        """
        names, several = [function.name for function in functions], several is not False
        if len(set(names)) < len(names):
            raise bad_request("tools: two functions have one name", "tools")
        if choice in (None, "auto", "none"):
            return cls() if choice == "none" else cls(tuple(functions), several=several)
        if isinstance(choice, AllowedTools | FlatAllowedTools):
            allowed = choice.allowed_tools if isinstance(choice, AllowedTools) else choice
            return cls._among(functions, allowed, several=several)
        if choice == "required":
            chosen = list(functions)
        else:
            named = choice.function if isinstance(choice, NamedTool) else choice
            name = getattr(named, "name", None)
            chosen = [function for function in functions if function.name == name]
            several = False
        if not chosen:
            raise bad_request(
                f"tool_choice: must be one of the tools: {', '.join(names) or 'none is given'}", "tool_choice"
            )
        return cls(tuple(chosen), must=True, several=several)

    @classmethod
    def _among(cls, functions: Sequence[Function], allowed: Allowed | FlatAllowedTools, *, several: bool) -> Offer:
        """Raises:
        ApiError: for names that no function has.
        """
        names = [function.name for function in functions]
        for name in allowed.names:
            if name not in names:
                given = ", ".join(names) or "none is given"
                raise bad_request(f"tool_choice: {name!r} is none of the tools: {given}", "tool_choice")
        return cls(tuple(functions), allowed.mode == "required", several, frozenset(allowed.names))

    @property
    def callees(self) -> list[Function]:
        """The functions that may be called."""
        return [each for each in self.functions if self.allowed is None or each.name in self.allowed]

    def for_template(self) -> list[dict[str, Any]]:
        return [{"type": "function", "function": function.for_template()} for function in self.functions]

    @property
    def structure(self) -> Structure | None:
        """The grammar of calls that must come."""
        if not self.must:
            return None
        return Structure(TOOLS, partial(self._calls, LIST), functions=self._arguments)

    @cached_property
    def _arguments(self) -> dict[str, dict[str, Any]]:
        """Schemas of the arguments, by function. If the model decides, only those of strict ones: one that no grammar
        can express would refuse them all."""
        return {each.name: strictly(self._followed(each), strict=each.strict) for each in self.callees}

    def _followed(self, function: Function) -> dict[str, Any]:
        is_followed = self.must or function.strict
        return function.parameters if is_followed and function.parameters else ANY_OBJECT

    def _calls(self, listing: Listing, known: Known) -> str:
        """Raises:
        ApiError: for parameters that no grammar can express, also where another field asks for a form.
        """
        try:
            return of_calls(self._arguments, several=self.several, listing=listing, known=known)
        except GrammarRefused as error:
            raise bad_request(f"{TOOLS}: {error}", TOOLS) from error

    def thought(self, asked: Structure | None, served: ServedModel, prompt: str) -> Thought | None:
        """The reasoning that may precede an answer by a grammar: ``asked`` for, or of calls that must come.

        Raises:
            ApiError: when no grammar can express its end.
        """
        structure = asked or self.structure
        if structure is None:
            return None
        try:
            return thought_of(served.tokenizer, prompt)
        except ValueError as error:
            param = structure.param
            raise bad_request(f"{param}: not on {served.name!r}, since {error}", param) from error

    def formed(self, asked: Structure | None, served: ServedModel, thought: Thought | None) -> Structure | None:
        """The grammar of answers: that which is ``asked`` for, or that of calls that must come. The ``thought`` may
        precede it. If the model decides on calls, they may come in its place.

        Raises:
            ApiError: when no grammar can express the model's calls.
        """
        structure = asked or self.structure
        if structure is None:
            return None
        param, listing = structure.param, listing_of(served.tokenizer) if self.decides else None
        if self.decides and listing is None:
            why = f"not with tools on {served.name!r}: no grammar makes its calls. tool_choice 'none' is possible"
            raise bad_request(f"{param}: {why}", param)
        if thought is None and listing is None:
            return structure

        def build(known: Known) -> str:
            form = structure.build(known)
            if listing is not None:
                form = either(form, self._calls(listing, known))
            if thought is None:
                return form
            return behind_reasoning(form, known(thought.opens), known(thought.closes), begun=thought.begun)

        lead = "" if thought is None else f"{'' if thought.begun else thought.opens}.{thought.closes}"
        functions = structure.functions if listing is None else self._arguments
        return replace(structure, build=build, lead=lead, functions=functions)

    @property
    def decides(self) -> bool:
        """True if the model decides, and writes calls in its own form."""
        return bool(self.functions) and not self.must

    def check(self, served: ServedModel) -> None:
        """Raises:
        ApiError: for a model whose form of calls is not known.
        """
        if self.decides and not reads_calls(served.tokenizer):
            message = (
                f"tool_choice: {served.name!r} writes calls in an unknown form. Set ROPEWAY_RESPONSE_TEMPLATE at "
                f"start-up to {', '.join(BUILT_IN)} or a file. 'required' and 'none' need no form"
            )
            raise bad_request(message, "tool_choice", "no_response_template")

    def reader(self, served: ServedModel, prompt: str, thought: Thought | None, *, is_formed: bool) -> Reader:
        """A reader of one answer to ``prompt``. It ``is_formed`` by a form of answers, behind the ``thought``."""
        tokenizer, tools = served.tokenizer, self.for_template()
        if self.decides and not is_formed:
            return TemplateReader(*parsing_of(tokenizer, prompt, tools), names=self.allowed)
        if not (is_formed or self.must):
            return TemplateReader(*parsing_of(tokenizer, prompt, [])) if thinks(tokenizer) else PlainReader()
        thoughts: Reader = PlainReader()
        if thought is not None:
            thoughts = TemplateReader(*parsing_of(tokenizer, prompt, []))
        if self.must:
            return ForcedReader(FormedReader(thoughts))
        listing = listing_of(tokenizer)
        if not self.decides or listing is None:
            return FormedReader(thoughts)
        calls = TemplateReader(*parsing_of(tokenizer, "", tools))
        names = [function.name for function in self.callees]
        return FormedReader(thoughts, calls, listing.before or listing.opens, names)
