"""From a method to its numbers for one model and one reserved length, and their echo in an answer."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from patches.encoding.echo import renamed
from patches.encoding.fields import LONGEST
from patches.encoding.geometry import RopeGeometry
from patches.encoding.method import Method
from patches.encoding.recipe import ResolvedRecipe
from patches.methods.frequencies.default import Default


class EchoMismatch(ValueError):
    """A request repeats a number of an answer that does not follow here; the message names it and both values."""

    def __init__(self, name: str, sent: object, here: object, why: str = "") -> None:
        super().__init__(
            f"{name}: {sent!r} was sent and {here!r} is true here{why}; leave {name} out to take the encoding as it is"
        )
        self.name = name


def effective(method: Method, geometry: RopeGeometry) -> Method:
    """``method`` itself, or the checkpoint's own encoding for "default" without parameters and for what it declares."""
    native, asks = geometry.native, method == Default() or method.is_declared(geometry)
    return native if isinstance(native, Method) and asks else method


def is_own(resolved: ResolvedRecipe, geometry: RopeGeometry, length: int) -> bool:
    """True if ``resolved`` is the checkpoint's own encoding at ``length`` reserved tokens."""
    try:
        return resolve(Default(), geometry, length) == resolved
    except ValueError:  # the checkpoint's own table ends before
        return False


@lru_cache(maxsize=1024)  # a request asks twice: at the door and for its echo
def resolve(method: Method, geometry: RopeGeometry, length: int) -> ResolvedRecipe:
    """Numbers of ``method`` for one model and one reserved length (prompt + new tokens).

    Raises:
        ValueError: when the method or a parameter does not fit the model; the message names it.
        EchoMismatch: when a number that the request expects to follow differs.
    """
    return confirmed(method, geometry, length).at(length).recipe(geometry).resolve(geometry, length)


def describe(
    method: Method, geometry: RopeGeometry, length: int, layers: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """The echo of a response: the method in effect, every parameter, and every number that follows.

    Sent back as an encoding, it gives the same one for the same model and reserved length. ``layers`` counts the layers
    by role.

    Raises:
        ValueError: as ``resolve``.
    """
    method = confirmed(method, geometry, length, layers)
    in_effect = effective(method, geometry)
    resolved = resolve(method, geometry, length)
    return {
        "method": in_effect.method,
        **renamed(in_effect.parameters(geometry)),
        "requested": method.method,
        **_numbers(resolved),
        **({} if layers is None else {"layers": dict(layers)}),
    }


def _numbers(resolved: ResolvedRecipe) -> dict[str, Any]:
    return {
        "attention_factor": resolved.attention_factor,
        "effective_rope_theta": resolved.rope_theta or None,
        "rotates_at": resolved.rotates_at,
        "bands": len(resolved.recipe.bands),
        "reserved_length": resolved.length,
        "frequency_hash": resolved.frequency_hash,
    }


def confirmed(method: Method, geometry: RopeGeometry, length: int, layers: Mapping[str, int] | None = None) -> Method:
    """``method`` without the numbers that its request expects to follow, once they equal those computed here.

    Parameters that an answer added go too, so that the encoding has the name of the first request.

    Raises:
        EchoMismatch: naming the first number that differs.
        ValueError: as ``resolve``.
    """
    if not method.follows:
        return method
    plain = method.without_follows()
    resolved = resolve(plain, geometry, length)
    here = {**_numbers(resolved), "layers": None if layers is None else dict(layers)}
    sent = dict(method.follows)
    _confirm_requested(sent.pop("requested", plain.method), plain, geometry, resolved)
    if "reserved_length" in sent:
        _confirm_length(sent.pop("reserved_length"), plain, geometry, length)
    for name, value in sent.items():
        if isinstance(value, bool) or value != here[name]:
            raise EchoMismatch(name, value, here[name])
    return _in_short(plain, geometry)


def _in_short(method: Method, geometry: RopeGeometry) -> Method:
    """``method`` without the parameters whose defaults on this model are equal."""
    shown = method.parameters(geometry)
    given = {name: getattr(method, name) for name in method.model_fields_set}
    given = {n: _in_short(value, geometry) if isinstance(value, Method) else value for n, value in given.items()}
    for name in sorted(given.keys() - {"method"}):
        fewer = {other: value for other, value in given.items() if other != name}
        try:
            if type(method).model_validate(fewer).parameters(geometry) == shown:
                given = fewer
        except ValueError:  # required
            continue
    return type(method).model_validate(given)


def _confirm_requested(name: object, method: Method, geometry: RopeGeometry, resolved: ResolvedRecipe) -> None:
    """The first request chose the encoding by its own name, or as the checkpoint's own."""
    if name == method.method:
        return
    default = Default()
    own = geometry.native
    if name != default.method or own is None or resolve(default, geometry, resolved.length or 1) != resolved:
        raise EchoMismatch("requested", name, method.method)


def _confirm_length(sent: object, method: Method, geometry: RopeGeometry, length: int) -> None:
    """Another reserved length is accepted if the encoding is equal at both."""
    here = resolve(method, geometry, length)
    if sent == here.length and not isinstance(sent, bool):
        return
    is_length = here.length is not None and isinstance(sent, int) and 0 < sent < LONGEST
    if is_length and resolve(method, geometry, sent) == here:
        return
    raise EchoMismatch("reserved_length", sent, here.length, ", which gives another encoding")
