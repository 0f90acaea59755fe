"""Fields that OpenAI and vLLM define and this server does not implement.

Some have a value that asks for nothing, which clients send out of habit: it is accepted. Everything else is refused.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import BeforeValidator, ValidationInfo

from patches import problem

NOT_SUPPORTED = frozenset(
    {
        # OpenAI
        *("audio", "function_call", "functions", "prediction", "prompt_cache_key", "prompt_cache_retention"),
        *("reasoning_effort", "safety_identifier", "verbosity", "web_search_options"),
        # vLLM
        *("add_special_tokens", "allowed_token_ids", "bad_words", "chat_template"),
        *("documents", "early_stopping", "guided_choice"),
        *("guided_grammar", "guided_json", "guided_regex", "include_stop_str_in_output", "length_penalty"),
        *("priority", "return_token_ids", "skip_special_tokens", "spaces_between_special_tokens"),
        *("structured_outputs", "truncate_prompt_tokens", "use_beam_search"),
    }
)
"""Fields without such a value."""

NOT_SUPPORTED_IN_MESSAGES = frozenset(
    {
        *("annotations", "audio", "function_call", "provider_specific_fields", "reasoning", "reasoning_content"),
        *("refusal", "tool_call_id", "tool_calls"),
    }
)
"""Fields of a message. Clients store an answer with all of them, and nothing in them."""


def not_supported(name: str, neutral: object = None) -> str:
    """The refusal of a field; ``neutral`` is its value without effect, if it has one."""
    instead = "" if neutral is None else f" (or send {json.dumps(neutral)})"
    return f"{name} is not supported by this server; leave it out{instead}"


def only(*neutral: Any) -> BeforeValidator:
    """Accepts the values of a field without effect; the error offers the first of them."""

    def check(value: Any, info: ValidationInfo) -> Any:
        if value not in neutral:
            raise problem("not_supported", not_supported(str(info.field_name), neutral[0]))
        return value

    return BeforeValidator(check)
