"""Formats of answers, as OpenAI names them: text, any JSON object, or JSON by a schema."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from service.api.generation.structure import STRICT, Schema, Structure
from service.api.openai.body import NOT_USED, Body, type_of
from service.api.openai.unsupported import only


class TextFormat(Body):
    type: Literal["text"]

    def structure(self, param: str) -> Structure | None:
        return None


class ObjectFormat(Body):
    type: Literal["json_object"]

    def structure(self, param: str) -> Structure | None:
        return Structure.of_schema(None, param)


class NamedSchema(Body):
    """A JSON schema under a name; without one, any object."""

    name: Annotated[str, Field(max_length=64)] = Field(description=NOT_USED)
    description: str | None = Field(None, description=NOT_USED)
    json_schema: Schema | None = Field(None, alias="schema", description="Without one, answers are any JSON object.")
    strict: bool | None = Field(None, description=STRICT)


class SchemaFormat(Body):
    """The form of chats and completions."""

    type: Literal["json_schema"]
    json_schema: NamedSchema

    def structure(self, param: str) -> Structure | None:
        named = self.json_schema
        return Structure.of_schema(named.json_schema, f"{param}.json_schema.schema", strict=named.strict)


class FlatSchemaFormat(NamedSchema):
    """The form of responses."""

    type: Literal["json_schema"]

    def structure(self, param: str) -> Structure | None:
        return Structure.of_schema(self.json_schema, f"{param}.schema", strict=self.strict)


def _kind(value: Any) -> str | None:
    """The tag of a format, unlike any field's name: tags are left out of the paths of problems."""
    return {"text": "as_text", "json_object": "as_object", "json_schema": "as_schema"}.get(type_of(value))


_BY_KIND = Discriminator(
    _kind,
    custom_error_type="format_type",
    custom_error_message="needs the type text, json_object or json_schema",
)

_Unschemed = Annotated[TextFormat, Tag("as_text")] | Annotated[ObjectFormat, Tag("as_object")]

ResponseFormat = Annotated[_Unschemed | Annotated[SchemaFormat, Tag("as_schema")], _BY_KIND]


class TextOptions(Body):
    """The field ``text`` of responses."""

    format: Annotated[_Unschemed | Annotated[FlatSchemaFormat, Tag("as_schema")], _BY_KIND] | None = None
    verbosity: Annotated[Literal["medium"], only("medium")] | None = None

    def echoed(self) -> dict[str, Any]:
        """The options as an answer repeats them."""
        given = None if self.format is None else self.format.model_dump(by_alias=True, exclude_none=True)
        return {"format": given or {"type": "text"}}
