"""Model names that carry an encoding: ``<model>@yarn:4`` for clients that cannot send ``pe``."""

from __future__ import annotations

from dataclasses import dataclass

from patches import OWN, Method, examples, from_shorthand, parse, to_shorthand
from service.api.generation.prepared import Target
from service.errors import ApiError, bad_request
from service.models.registry import ModelRegistry, ServedModel
from service.policy.auto import AUTO, Auto


@dataclass(frozen=True)
class Named:
    """The model and the encoding that a request names.

    ``served`` is the model by its own name; ``target`` has the one whose weights answer: a variant of it that was
    trained for the encoding, or the model itself. ``alias`` is whether the name chose the encoding.
    """

    name: str
    served: ServedModel
    target: Target
    alias: bool


def named(models: ModelRegistry, name: str | None, pe: Method | None = None) -> Named:
    """Look ``name`` up, the default model where it is None; any alias that parses and fits the model is one.

    Raises:
        UnknownModel: when no model has the name, or the name before the last ``@``.
        ApiError: 404 with the reason for an alias that is none; 400 when ``pe`` says something else than the alias.
    """
    base, at, text = (name or "").rpartition("@")
    if not at or name in {served.name for served in models}:
        served, method = models.get(name), pe or OWN
        return Named(served.name, served, Target(models.for_method(served, method), method), alias=False)
    served = models.get(base)
    method = _method_of_alias(text, base)
    target = models.for_method(served, method)
    try:
        if not isinstance(method, Auto):  # its ranges come at admission
            target.patch.resolve(method, target.trained_length)
    except ValueError as error:
        raise _no_such_alias(base, text, str(error)) from error
    if pe is not None and not (models.for_method(served, pe) is target and _is_same(pe, method, target)):
        raise bad_request(f"pe: the model {name!r} already names an encoding, and pe is another one", "pe")
    return Named(f"{base}@{text}", served, Target(target, pe or method), alias=True)


def presets(served: ServedModel, models: ModelRegistry) -> list[Named]:
    """Aliases to list for ``served``: the documented examples that fit it and change its encoding."""
    plain = served.patch.resolve(OWN, served.trained_length)
    found = []
    for fields in examples():
        method = parse(fields)
        target = models.for_method(served, method)
        try:
            resolved = target.patch.resolve(method, target.trained_length)
        except ValueError:
            continue
        lacks_variant = target is served and method.variant in served.variants  # its own weights were not trained so
        if not lacks_variant and (target is not served or resolved != plain):
            found.append(Named(f"{served.name}@{to_shorthand(fields)}", served, Target(target, method), alias=True))
    return found


def _is_same(one: Method, other: Method, served: ServedModel) -> bool:
    """True if both give the same recipe on ``served``, whichever parameters they spell out."""
    if one == other:
        return True
    try:
        return one.recipe(served.patch.geometry) == other.recipe(served.patch.geometry)
    except ValueError:
        return False


def _method_of_alias(text: str, base: str) -> Method:
    try:
        return Auto() if text == AUTO else parse(from_shorthand(text))
    except ValueError as error:
        raise _no_such_alias(base, text, str(error)) from error


def _no_such_alias(base: str, text: str, reason: str) -> ApiError:
    message = f"no model {base[:128]!r} under the encoding {text[:128]!r}: {reason}"
    return ApiError(404, message, param="model", code="model_not_found")
