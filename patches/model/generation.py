"""``generate`` of a patched model, as far as its options matter to the encoding of a call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from patches.model.arguments import by_name
from patches.model.encodings import KEYWORD


def generate(model: Any, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``own(*args, **kwargs)``, for the ``generate`` of ``model``.

    Raises:
        ValueError: for an encoding beside guidance, whose second forward gets no arguments of the call. Also beside a
            draft model, which gets all of them.
    """
    given = by_name(inspect.signature(own).parameters, args, kwargs)
    if given.get(KEYWORD) is not None:
        if _guides(given, model.generation_config):
            raise ValueError(
                "guidance_scale: transformers runs the second forward of guidance under the default encoding; leave "
                "guidance_scale or the encoding out"
            )
        if given.get("assistant_model") not in (None, model):
            raise ValueError(
                "assistant_model: transformers hands the encoding on to the draft model; leave either out, or draft by "
                "prompt_lookup_num_tokens"
            )
    return own(**given)


def _guides(given: Mapping[str, Any], defaults: Any) -> bool:
    configured = given.get("generation_config") or defaults
    scale = given.get("guidance_scale", getattr(configured, "guidance_scale", None))
    by_hand = any("ClassifierFreeGuidance" in type(one).__name__ for one in given.get("logits_processor") or ())
    return scale not in (None, 1) or by_hand
