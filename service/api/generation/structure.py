"""Structured outputs: answers that follow a JSON schema, a regular expression or choices."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from patches import KnownFields, problem
from service.models.text.grammar_parts import Known
from service.models.text.grammar_text import of_choices, of_regex, of_schema

MOST = 1 << 16
"""Characters of a schema or an expression."""

MOST_CHOICES = 1024

ANY_OBJECT = {"type": "object"}

Given = TypeVar("Given")


@dataclass(frozen=True)
class Structure:
    """A grammar of answers: the field ``param`` that asks for it, and ``build`` for its text, by the delimiters of a
    model. A trial goes behind the text ``lead`` too, where the form begins. Calls have rules by the numbers of their
    ``functions``. ``schemas`` are those of JSON inside it."""

    param: str
    build: Callable[[Known], str]
    lead: str = ""
    functions: tuple[str, ...] = ()
    schemas: tuple[Mapping[str, Any], ...] = ()

    @classmethod
    def of(cls, param: str, form: Callable[[Given], str], given: Given) -> Structure:
        """The grammar that ``form`` makes of a part of the request."""
        return cls(param, lambda known: form(given))

    @classmethod
    def of_schema(cls, schema: dict[str, Any] | None, param: str) -> Structure:
        """JSON by ``schema``, or any object."""
        given = ANY_OBJECT if schema is None else schema
        return cls(param, lambda known: of_schema(given), schemas=(given,))

    @property
    def optional_keys(self) -> int:
        """The most keys that one object of the schemas leaves to the answer."""
        most, left = 0, list[Any](self.schemas)
        while left:
            part = left.pop()
            if isinstance(part, Mapping):
                keys, required = part.get("properties"), part.get("required")
                if isinstance(keys, Mapping):
                    most = max(most, len(keys.keys() - set(map(str, required if isinstance(required, list) else ()))))
                left.extend(part.values())
            elif isinstance(part, list):
                left.extend(part)
        return most


def _as_object(value: Any) -> Any:
    """vLLM takes a schema as text too."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (RecursionError, ValueError) as error:
        raise problem("not_json", f"is no JSON: {error}") from error


def _bounded(schema: dict[str, Any]) -> dict[str, Any]:
    if len(json.dumps(schema)) > MOST:
        raise problem("too_large", f"may have at most {MOST} characters of JSON")
    return schema


Schema = Annotated[dict[str, Any], BeforeValidator(_as_object), AfterValidator(_bounded)]
Text = Annotated[str, Field(min_length=1, max_length=MOST)]


class StructuredOutputs(KnownFields):
    """Exactly one of its fields says how an answer is formed. The names are those of vLLM."""

    schema_of_json: Schema | None = Field(None, alias="json", description="A JSON schema.")
    json_object: bool = Field(False, description="Any JSON object.")
    regex: Text | None = Field(None, description="A regular expression, in the syntax of Rust's crate `regex`.")
    choice: Annotated[list[Text], Field(min_length=1, max_length=MOST_CHOICES)] | None = Field(
        None, description="One of these texts."
    )

    @model_validator(mode="after")
    def _one(self) -> StructuredOutputs:
        given = [name for name, value in self.model_dump(by_alias=True).items() if value not in (None, False)]
        if len(given) != 1:
            has = " and ".join(given) or "none"
            raise problem("one_of", f"needs exactly one of {', '.join(self.field_names())}, and has {has}")
        return self

    @property
    def structure(self) -> Structure:
        if self.regex is not None:
            return Structure.of("structured_outputs.regex", of_regex, self.regex)
        if self.choice is not None:
            return Structure.of("structured_outputs.choice", of_choices, self.choice)
        return Structure.of_schema(
            self.schema_of_json, f"structured_outputs.{'json_object' if self.json_object else 'json'}"
        )
