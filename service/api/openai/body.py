"""A body of the OpenAI-compatible routes: null is absent, and unsupported fields are refused by name."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import ConfigDict, model_validator

from patches import KnownFields
from service.api.openai.unsupported import NOT_SUPPORTED, not_supported


class Body(KnownFields):
    """A field that is null is a field that is absent."""

    model_config = ConfigDict(allow_inf_nan=False)

    NOT_SUPPORTED: ClassVar[frozenset[str]] = NOT_SUPPORTED

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        known = {*cls.model_fields, *cls.NOT_SUPPORTED}
        return {key: value for key, value in fields.items() if value is not None or key not in known}

    @classmethod
    def unknown_field(cls, name: str) -> str:
        return not_supported(name) if name in cls.NOT_SUPPORTED else super().unknown_field(name)
