"""A body of the OpenAI-compatible routes: null is absent, and unsupported fields are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, model_validator
from typing_extensions import override

from patches import KnownFields
from service.api.openai.unsupported import NOT_SUPPORTED, not_supported

NOT_USED = "Accepted and not used."
"""The description of a hint."""


def type_of(value: Any) -> str:
    """The ``type`` of an object before or after validation; "None" without one."""
    return str(value.get("type") if isinstance(value, dict) else getattr(value, "type", None))


def text_in(content: str | list[Any]) -> str:
    """The text of ``content``, or of its parts one after another."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


class Body(KnownFields):
    """A field that is null, or asks for nothing that this server has, is a field that is absent."""

    model_config = ConfigDict(allow_inf_nan=False)

    NOT_SUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = NOT_SUPPORTED

    @model_validator(mode="before")
    @classmethod
    def _nothing_is_absent(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        return {key: value for key, value in fields.items() if cls._asks(key, value)}

    @classmethod
    def _asks(cls, name: Any, value: Any) -> bool:
        if name in cls.field_names():
            return value is not None
        if name not in cls.NOT_SUPPORTED:
            return True
        given = {key: part for key, part in value.items() if part is not None} if isinstance(value, dict) else value
        return given is not None and given not in cls.NOT_SUPPORTED[name]

    @classmethod
    def unknown_field(cls, name: str) -> str:
        if name not in cls.NOT_SUPPORTED:
            return super().unknown_field(name)
        return not_supported(name, *cls.NOT_SUPPORTED[name][:1])


class StoredBody(Body):
    """A body also as a client stores it: with null in fields that only its library knows."""

    @classmethod
    @override
    def _asks(cls, name: Any, value: Any) -> bool:
        return value is not None and super()._asks(name, value)


class CacheControl(StoredBody):
    """Anthropic's hint, which gateways pass on: this server caches the prefixes of all prompts."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None
