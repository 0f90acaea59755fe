"""The arguments of a call of a model, as the seams need them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

FORMER_CACHE = "past_key_values"
"""The name of ``cache`` before transformers 5.24, which models still take."""


def parameters_of(method: Callable[..., Any], model: type, name: str) -> Mapping[str, inspect.Parameter]:
    """The parameters of ``method``. If it names none of its arguments, those of ``model.name`` or a base class."""
    own: Mapping[str, inspect.Parameter] = inspect.signature(method).parameters
    for kind in model.__mro__:
        if not _names_none(own):
            break
        if name in vars(kind):
            _, *given = inspect.signature(vars(kind)[name]).parameters.items()  # without self
            own = dict(given)
    return own


def _names_none(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters.values())


def by_name(
    parameters: Mapping[str, inspect.Parameter], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of a call by name, as the seams read them. ``cache`` may have its former name.

    Raises:
        TypeError: for an argument that is given twice, or more than there are ``parameters``.
    """
    given = dict(kwargs)
    if args:
        given |= _in_their_places(parameters, args, kwargs)
    if FORMER_CACHE in given:
        cache = given.pop(FORMER_CACHE)
        if "cache" in given:
            raise TypeError(
                f"got cache and {FORMER_CACHE}, its former name, which transformers would ignore; "
                "generate of PEFT's prefix tuning gives both"
            )
        given["cache"] = cache
    return given


def _in_their_places(
    parameters: Mapping[str, inspect.Parameter], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    names = [name for name, parameter in parameters.items() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    if len(args) > len(names):
        raise TypeError(f"{len(args)} arguments without a name, but only {len(names)} have a place")
    if twice := sorted(set(names[: len(args)]) & kwargs.keys()):
        raise TypeError(f"got multiple values for argument {twice[0]!r}")
    return dict(zip(names, args, strict=False))


def tokens_of(kwargs: Mapping[str, Any]) -> torch.Tensor:
    """Token ids [rows, tokens] or embeddings [rows, tokens, width] of a call of a model.

    Raises:
        ValueError: for a call without either.
    """
    for name in ("input_ids", "inputs_embeds"):
        tokens: torch.Tensor | None = kwargs.get(name)
        if tokens is not None:
            return tokens
    raise ValueError("input_ids: give token ids, or inputs_embeds")


def inputs_of(kwargs: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(``position_ids``, padding mask) of a call of a model. Positions that are not given count unpadded tokens.

    A mask without padding is None.

    Raises:
        ValueError: for images, video or sound, and without tokens.
    """
    _refuse_other_input(kwargs)
    tokens, positions = tokens_of(kwargs), kwargs.get("position_ids")
    padding = _padding_mask(kwargs, tokens.shape[1])
    if padding is not None and bool(padding.all()):  # read once: all others ask for None
        padding = None
    if positions is not None:
        return _of_text(positions, padding), padding
    if padding is not None:
        return (padding.long().cumsum(1) - 1).clamp_min(0)[:, -tokens.shape[1] :], padding
    past = kwargs.get("cache")
    seen = 0 if past is None else past.get_seq_length()
    return torch.arange(seen, seen + tokens.shape[1], device=tokens.device)[None], padding


def has_several_texts(position_ids: torch.Tensor, padding_mask: torch.Tensor | None) -> bool:
    """True if positions [rows or 1, new tokens] begin anew inside of a row without padding."""
    return padding_mask is None and position_ids.shape[1] > 1 and bool((position_ids.diff() != 1).any())


def _padding_mask(kwargs: Mapping[str, Any], new: int) -> torch.Tensor | None:
    """Padding mask [rows, seen] of a call with ``new`` tokens.

    For a static cache, ``generate`` gives one mask per type of layer. Some are whole ones, as wide as the cache.

    Raises:
        ValueError: for masks of a static cache that have fewer columns than tokens were seen.
    """
    given, past = kwargs.get("attention_mask"), kwargs.get("cache")
    is_static = bool(getattr(past, "is_compileable", False))
    every = list(given.values()) if isinstance(given, Mapping) else [given]
    masks = [_by_key(mask) for mask in every if isinstance(mask, torch.Tensor) and mask.ndim in (2, *[4] * is_static)]
    widest = max(masks, key=lambda mask: mask.shape[1], default=None)
    if widest is None or past is None or not is_static:
        return widest
    seen = int(past.get_seq_length()) + new
    if widest.shape[1] < seen:
        raise ValueError(
            f"attention_mask: {widest.shape[1]} columns do not show the padding of {seen} tokens; give a mask "
            "[rows, tokens seen], or leave cache_implementation out"
        )
    return widest[:, :seen]


def _by_key(mask: torch.Tensor) -> torch.Tensor:
    """A padding mask [rows, keys], or what the last query sees by a whole one [rows, heads or 1, queries, keys]."""
    if mask.ndim == 2:
        return mask
    last = mask[:, 0, -1]
    return last if last.dtype == torch.bool else last == 0


def logits_by_index(kwargs: Mapping[str, Any], positions: torch.Tensor) -> dict[str, torch.Tensor]:
    """``logits_to_keep`` as indices into ``positions`` [rows, tokens].

    Layers that share keys (Gemma 4) take a number as leave to compute the last queries only, with their masks cut.
    """
    kept = kwargs.get("logits_to_keep", 0)
    if isinstance(kept, torch.Tensor):
        return {}
    tokens = positions.shape[-1]
    return {"logits_to_keep": torch.arange(max(0, tokens - kept) if kept else 0, tokens, device=positions.device)}


OTHER_INPUT = ("pixel_values", "image_", "video_", "audio_", "input_features")
"""Names, or beginnings of names, of arguments with images, video or sound."""


def _refuse_other_input(kwargs: Mapping[str, Any]) -> None:
    for name, value in kwargs.items():
        if value is not None and name.startswith(OTHER_INPUT):
            raise ValueError(f"{name}: a patched model takes text only; images, video and sound have other positions")


def _of_text(position_ids: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
    """Positions [rows, tokens] of multimodal ones [planes, rows, tokens], which are alike for text.

    Qwen2-VL, arXiv:2409.12191, section 2.1.
    """
    if position_ids.ndim != 3:
        return position_ids
    text = position_ids[0]
    unlike = (position_ids != text).any(0)
    if padding is not None:
        unlike = unlike & padding[:, -text.shape[1] :].bool()
    if bool(unlike.any()):
        raise ValueError("position_ids: a patched model takes text only, whose positions are alike in every plane")
    return text
