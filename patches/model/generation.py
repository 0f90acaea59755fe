"""``generate`` of a patched model, as far as its options matter to the encoding of a call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from patches.model.arguments import by_name, parameters_of
from patches.model.encodings import KEYWORD


def generate(model: Any, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``own(*args, **kwargs)``, for the ``generate`` of ``model``. A draft model has its default encoding.

    Raises:
        ValueError: for an encoding beside guidance or token healing, whose own forwards get no arguments of the call.
    """
    given = by_name(parameters_of(own, type(model), "generate"), args, kwargs)
    if given.get(KEYWORD) is None:
        return own(*args, **kwargs)
    if _guides(given, model.generation_config):
        raise ValueError(
            "guidance_scale: transformers runs the second forward of guidance under the default encoding; leave "
            "guidance_scale or the encoding out"
        )
    if _option("token_healing", given, model.generation_config):
        raise ValueError(
            "token_healing: transformers heals prompts under the default encoding; leave token_healing or the "
            "encoding out"
        )
    draft = given.get("assistant_model")
    if draft is not None and draft is not model:
        given["assistant_model"] = _without_encoding(draft)
    return own(**given)


def _without_encoding(draft: Any) -> Any:
    """``draft``, whose ``generate`` leaves out the encoding, which transformers hands on and which is of another model.

    The tokens are those of the model alone: it checks each that the draft proposes. The weights are shared.
    """
    view, own = copy.copy(draft), draft.generate

    def without(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop(KEYWORD, None)
        return own(*args, **kwargs)

    view.generate = without
    return view


def _guides(given: Mapping[str, Any], defaults: Any) -> bool:
    by_hand = any("ClassifierFreeGuidance" in type(one).__name__ for one in given.get("logits_processor") or ())
    return _option("guidance_scale", given, defaults) not in (None, 1) or by_hand


def _option(name: str, given: Mapping[str, Any], defaults: Any) -> Any:
    """An option as ``generate`` reads it: of the call, of its ``generation_config``, or else of the model."""
    if name in given:
        return given[name]
    configured = getattr(given.get("generation_config"), name, None)
    return getattr(defaults, name, None) if configured is None else configured
