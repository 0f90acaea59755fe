"""Fields that OpenAI and vLLM define and this server does not implement.

Some have a value that asks for nothing, which clients send out of habit: it is accepted. Everything else is refused.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import BeforeValidator, ValidationInfo

from patches import problem

NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    # OpenAI
    **dict.fromkeys(("audio", "max_completion_tokens", "prediction", "prompt_cache_retention", "reasoning_effort"), ()),
    **dict.fromkeys(("moderation", "prompt_cache_options", "web_search_options"), ()),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "verbosity": ("medium",),
    # vLLM
    **dict.fromkeys(("chat_template", "guided_choice", "guided_grammar", "guided_json"), ()),
    **dict.fromkeys(("guided_regex", "kv_transfer_params", "mm_processor_kwargs"), ()),
    **dict.fromkeys(("prompt_logprobs", "request_id", "thinking_token_budget"), ()),
    **dict.fromkeys(("vllm_xargs",), ()),
    "truncation_side": ("left",),
    "add_generation_prompt": (True,),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "early_stopping": (False,),
    "echo": (False,),
    "include_reasoning": (True,),
    "length_penalty": (1.0,),
    "logits_processors": ([],),
    "priority": (0,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,),
}
"""Fields that a route without them knows by name, each with its values that ask for nothing. Null does too."""

NOT_SUPPORTED_IN_MESSAGES: dict[str, tuple[Any, ...]] = {
    "annotations": ([], {}, ""),
    **dict.fromkeys(("audio", "function_call", "provider_specific_fields", "reasoning", "refusal"), (None, [], {}, "")),
}
"""Fields of a message. Clients store an answer with all of them, and nothing in them."""


INSTEAD = {
    "guided_choice": "structured_outputs.choice does it",
    "guided_grammar": "structured_outputs has json, json_object, regex and choice",
    "guided_json": "structured_outputs.json does it",
    "guided_regex": "structured_outputs.regex does it",
    "output_format": "output_config.format does it",
    "reasoning_effort": "Chats take it as reasoning_effort, responses as reasoning.effort, messages as "
    "output_config.effort",
    "stop": "stop_sequences does it",
}
"""The ways here to what some of these fields ask for."""


def not_supported(name: str, *neutral: object) -> str:
    """The refusal of a field; the first of ``neutral`` is its usual value without effect."""
    instead = f" (or send {json.dumps(neutral[0])})" if neutral else ""
    way = f". {INSTEAD[name]}" if name in INSTEAD else ""
    return f"{name} is not supported by this server; leave it out{instead}{way}"


def only(*neutral: Any) -> BeforeValidator:
    """Accepts the values of a field without effect; the error offers the first of them."""

    def check(value: Any, info: ValidationInfo) -> Any:
        if value not in neutral:
            raise problem("not_supported", not_supported(str(info.field_name), neutral[0]))
        return value

    return BeforeValidator(check)
