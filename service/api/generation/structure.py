"""Structured outputs: answers that follow a JSON schema, a regular expression or choices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from patches import KnownFields, problem, read_json
from service.inputs import as_json
from service.models.text.closed_schemas import closed
from service.models.text.grammar_parts import Known
from service.models.text.grammar_text import FLEXIBLE, ONE_LINE, of_choices, of_regex, of_schema

MOST = 1 << 16
"""Characters of a schema or an expression."""

MOST_CHOICES = 1024

ANY_OBJECT = {"type": "object"}

TOOLS = "tools"
"""The field of functions, whose arguments are in a form too."""

STRICT = (
    "True: objects have no further keys, unless the schema says `additionalProperties`. False: they may. "
    "Null: those that list `properties` have none."
)

Given = TypeVar("Given")


@dataclass(frozen=True)
class Structure:
    """A grammar of answers: the field ``param`` that asks for it, and ``build`` for its text, by the delimiters of a
    model. A trial goes behind the text ``lead`` too, where the form begins. The form has the ``schema``, and calls in
    it those of their ``functions``, in this order."""

    param: str
    build: Callable[[Known], str]
    lead: str = ""
    schema: Mapping[str, Any] | None = None
    functions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, param: str, form: Callable[[Given], str], given: Given) -> Structure:
        """The grammar that ``form`` makes of a part of the request."""
        return cls(param, lambda known: form(given))

    @classmethod
    def of_schema(
        cls, schema: dict[str, Any] | None, param: str, *, strict: bool | None = None, one_line: bool = False
    ) -> Structure:
        """JSON by ``schema``, or any object. ``strict`` is that of ``strictly``."""
        options = ONE_LINE if one_line else FLEXIBLE

        def build(known: Known) -> str:
            return of_schema(ANY_OBJECT if schema is None else strictly(schema, strict=strict), options)

        return cls(param, build, schema=schema or ANY_OBJECT)


def strictly(schema: dict[str, Any], *, strict: bool | None) -> dict[str, Any]:
    """``schema``, with its objects closed: all of them if it is ``strict``, none if that is false. Else those with
    ``properties`` are."""
    return schema if strict is False else closed(schema, bare=bool(strict))


def _as_object(value: Any) -> Any:
    """vLLM takes a schema as text too."""
    return read_json(value) if isinstance(value, str) else value


def _bounded(schema: dict[str, Any]) -> dict[str, Any]:
    if len(as_json(schema)) > MOST:
        raise problem("too_large", f"may have at most {MOST} characters of JSON")
    return schema


Schema = Annotated[dict[str, Any], BeforeValidator(_as_object), AfterValidator(_bounded)]
Text = Annotated[str, Field(min_length=1, max_length=MOST)]


FORMS = ("json", "json_object", "regex", "choice")
"""Fields of a form. The others say more about it."""


class StructuredOutputs(KnownFields):
    """Exactly one form of an answer. The names are those of vLLM."""

    schema_of_json: Schema | None = Field(None, alias="json", description="A JSON schema.")
    json_object: bool = Field(False, description="Any JSON object.")
    regex: Text | None = Field(None, description="A regular expression, in the syntax of Rust's crate `regex`.")
    choice: Annotated[list[Text], Field(min_length=1, max_length=MOST_CHOICES)] | None = Field(
        None, description="One of these texts."
    )
    disable_additional_properties: bool | None = Field(None, description=f"With `json` only. {STRICT}")
    disable_any_whitespace: bool = Field(False, description="JSON in one line, with a blank behind each `,` and `:`.")

    @model_validator(mode="after")
    def _one(self) -> StructuredOutputs:
        values = self.model_dump(by_alias=True)
        given = [name for name in FORMS if values[name] not in (None, False)]
        if len(given) != 1:
            has = " and ".join(given) or "none"
            raise problem("one_of", f"needs exactly one of {', '.join(FORMS)}, and has {has}")
        if self.disable_additional_properties and self.schema_of_json is None:
            raise problem("only_json", "only with json", "disable_additional_properties")
        if self.disable_any_whitespace and not (self.json_object or self.schema_of_json is not None):
            raise problem("only_json", "only with json or json_object", "disable_any_whitespace")
        return self

    @property
    def structure(self) -> Structure:
        if self.regex is not None:
            return Structure.of("structured_outputs.regex", of_regex, self.regex)
        if self.choice is not None:
            return Structure.of("structured_outputs.choice", of_choices, self.choice)
        return Structure.of_schema(
            self.schema_of_json,
            f"structured_outputs.{'json_object' if self.json_object else 'json'}",
            strict=self.disable_additional_properties,
            one_line=self.disable_any_whitespace,
        )
