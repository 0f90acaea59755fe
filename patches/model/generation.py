"""``generate`` of a patched model, as far as its options matter to the encoding of a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from patches.model.encodings import KEYWORD


def generate(own: Callable[..., Any], defaults: Any, *args: Any, **kwargs: Any) -> Any:
    """``own(*args, **kwargs)``, for the model's ``generate`` and its generation configuration ``defaults``.

    Raises:
        ValueError: for an encoding beside guidance, whose second forward gets no arguments of the call.
    """
    if kwargs.get(KEYWORD) is not None and _guides(kwargs, defaults):
        raise ValueError(
            "guidance_scale: transformers runs the second forward of guidance under the default encoding; leave "
            "guidance_scale or the encoding out"
        )
    return own(*args, **kwargs)


def _guides(kwargs: dict[str, Any], defaults: Any) -> bool:
    given = kwargs.get("generation_config")
    scale = kwargs.get("guidance_scale", getattr(defaults if given is None else given, "guidance_scale", None))
    by_hand = any("ClassifierFreeGuidance" in type(one).__name__ for one in kwargs.get("logits_processor") or ())
    return scale not in (None, 1) or by_hand
