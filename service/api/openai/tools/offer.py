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
from service.models.grammar_text import of_calls
from service.models.registry import ServedModel
from service.models.response_templates import BUILT_IN, parsing_of

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
        if not self.must:
            return None
        schemas = {function.name: function.parameters or ANY_OBJECT for function in self.functions}
        return Structure("tools", partial(of_calls, schemas, several=self.several))

    @property
    def is_read_by_template(self) -> bool:
        """True if the model decides, and writes calls in its own form."""
        return bool(self.functions) and not self.must

    def check(self, served: ServedModel) -> None:
        """Raises:
        ApiError: for a model whose form of calls is not known.
        """
        if self.is_read_by_template and served.tokenizer.response_template is None:
            message = (
                f"tool_choice: {served.name!r} writes calls in an unknown form. Set ROPEWAY_RESPONSE_TEMPLATE at "
                f"start-up to {', '.join(BUILT_IN)} or a file. 'required' and 'none' need no form"
            )
            raise bad_request(message, "tool_choice", "no_response_template")

    def reader(self, served: ServedModel, prompt: str) -> Reader:
        """A reader of one answer to ``prompt``."""
        if self.is_read_by_template:
            return TemplateReader(*parsing_of(served.tokenizer, prompt, self.for_template()))
        return ForcedReader() if self.must else PlainReader()
