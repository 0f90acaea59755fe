"""The tools of a request, and the model's choice among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from service.api.generation.structure import ANY_OBJECT, Structure
from service.api.openai.tools.reading import ForcedReader, PlainReader, Reader, TemplateReader
from service.api.openai.tools.schemas import Function, NamedFunction, NamedTool
from service.errors import bad_request
from service.models.grammar_text import LIST, Listing, among, either, of_calls
from service.models.registry import ServedModel
from service.models.response_templates import BUILT_IN, parsing_of, reads_calls, surroundings_of, thinks

Choice = str | NamedTool | NamedFunction


@dataclass(frozen=True)
class Offer:
    """``functions`` that the model may call, or has to if it ``must``; ``several`` at once if it may."""

    functions: tuple[Function, ...] = ()
    must: bool = False
    several: bool = True

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

    def for_template(self) -> list[dict[str, Any]]:
        return [{"type": "function", "function": function.for_template()} for function in self.functions]

    @property
    def structure(self) -> Structure | None:
        """The grammar of calls that must come."""
        return Structure("tools", partial(self._calls, LIST)) if self.must else None

    def _calls(self, listing: Listing) -> str:
        schemas = {function.name: function.parameters or ANY_OBJECT for function in self.functions}
        return of_calls(schemas, several=self.several, listing=listing)

    def formed(self, asked: Structure | None, served: ServedModel, prompt: str) -> Structure | None:
        """The grammar of answers to ``prompt``: that which is ``asked`` for, or that of calls that must come. The
        model's reasoning may precede it. If the model decides on calls, one may come in its place.

        Raises:
            ApiError: for a form beside calls that no grammar can express.
        """
        structure = asked or self.structure
        if structure is None:
            return None
        thought, begun, call, listing = surroundings_of(served.tokenizer, prompt)
        if self.decides and call is None and listing is None:
            raise bad_request(
                f"{structure.param}: not with tools on {served.name!r}, whose calls no grammar can express. "
                "tool_choice 'none' is possible",
                structure.param,
            )
        if not self.decides:
            call = listing = None

        def build() -> str:
            form = structure.build()
            return form if listing is None else either(form, self._calls(listing))

        def within(form: str) -> str:
            known = served.grammars.delimiter
            thoughts = None if thought is None else (known(thought[0]), known(thought[1]))
            return among(form, thoughts, None if call is None else known(call), begun=begun)

        return Structure(structure.param, build, str if thought is None and call is None else within)

    @property
    def decides(self) -> bool:
        """True if the model decides, and writes calls in its own form."""
        return bool(self.functions) and not self.must

    def reads(self, served: ServedModel) -> bool:
        """True if a response template reads answers: their calls, or their reasoning."""
        return self.decides or thinks(served.tokenizer)

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

    def reader(self, served: ServedModel, prompt: str) -> Reader:
        """A reader of one answer to ``prompt``."""
        reader: Reader = PlainReader()
        if self.reads(served):
            tools = self.for_template() if self.decides else []
            reader = TemplateReader(*parsing_of(served.tokenizer, prompt, tools))
        return ForcedReader(reader) if self.must else reader
