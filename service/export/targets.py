"""The systems that an encoding can be exported to, and the export."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from patches import (
    CHUNKS,
    LONGEST,
    Method,
    NoRopeParameters,
    Patched,
    RopeGeometry,
    closest,
    effective,
    is_own,
    label_of,
    resolve,
    to_shorthand,
    unknown,
)
from service.export.exllamav3 import ExLlamaV3
from service.export.llama_cpp import LlamaCpp
from service.export.sglang import SGLang
from service.export.target import Expression, Inexpressible, Target, Wanted
from service.export.tgi import TextGenerationInference
from service.export.transformers import Transformers
from service.export.vllm import VLLM

TARGETS: dict[str, Target] = {
    "transformers": Transformers(),
    "vllm": VLLM(),
    "sglang": SGLang(),
    "llama.cpp": LlamaCpp(),
    "exllamav3": ExLlamaV3(),
    "tgi": TextGenerationInference(),
}

OTHER_LENGTHS = ("max_seq_len", "seq_length")
"""Entries that MPT and BLOOM have in place of ``max_position_embeddings``."""

SHORTEST = 2
"""Tokens of the shortest request."""


def _known(target: str) -> str:
    if target not in TARGETS:
        raise ValueError(unknown("target", target, TARGETS))
    return target


TargetName = Annotated[str, AfterValidator(_known), Field(json_schema_extra={"enum": list(TARGETS)})]
"""The field of a request that names a system."""


class LengthRequired(ValueError):
    """No length was given for an encoding that has no default."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"length: required, from {SHORTEST} to {LONGEST - 1} tokens, since {reason}")


class NotExpressible(ValueError):
    """A system cannot carry an encoding, for a ``reason``. ``closest`` is one that it can, in short form, or None."""

    def __init__(self, method: Method, target: Target, reason: str, closest: str | None) -> None:
        name = f"{target.name} {target.version}"
        instead = "" if closest is None else f". The closest encoding that it can: {closest}"
        super().__init__(f"pe: {name} cannot express {label_of(method)}: {reason}{instead}")
        self.closest, self.reason = closest, reason

    def without_length(self, trained: int) -> NotExpressible:
        """The same for a request without a length: its closest encoding ends at the ``trained`` one."""
        if self.closest is not None:
            self.args = (f"{self}, for {trained} tokens. A length gives the closest one for that length",)
        return self


@dataclass(frozen=True)
class Source:
    """A model to export for: its geometry, and ``rope_parameters`` and ``model_type`` of its configuration.

    ``own`` is empty for a model whose configuration has no ``rope_parameters`` (GPT-J). ``base`` is the geometry of an
    adapter's base: other systems read the base's configuration, and not what the adapter's folder declares.
    ``read_here_alone`` is true for a configuration with ``position_encoding``: other systems pass over it.
    ``in_chunks`` is true for one with ``dual_chunk_attention_config``, which some systems read and others pass over.
    ``longest`` is the entry of its configuration with the longest text in tokens.
    """

    geometry: RopeGeometry
    own: Mapping[str, Any]
    model_type: str
    base: RopeGeometry | None = None
    read_here_alone: bool = False
    in_chunks: bool = False
    longest: str = "max_position_embeddings"


def source_of(patch: Patched, base: Patched | None = None) -> Source | None:
    """A served model, or an adapter of ``base``, as a source; None for a part of a larger one, whose configuration the
    entries would miss."""
    config = (base or patch).model.config
    if config.get_text_config() is not config:
        return None
    own = getattr(config, "rope_parameters", None) or {}
    alone = getattr(config, "position_encoding", None) is not None
    in_chunks = bool(getattr(config, CHUNKS, None))
    longest = next((name for name in OTHER_LENGTHS if getattr(config, name, None)), "max_position_embeddings")
    of_base = None if base is None else base.geometry
    return Source(patch.geometry, own, config.model_type, of_base, alone, in_chunks, longest)


def carriers(method: Method, patch: Patched, length: int) -> list[str] | None:
    """The systems that can express ``method`` for ``length`` tokens, those without differences first; None for a model
    that no export covers."""
    found = differences(method, patch, length)
    return None if found is None else sorted(found, key=lambda name: bool(found[name]))


def differences(method: Method, patch: Patched, length: int) -> dict[str, list[str]] | None:
    """The differences of each system that can express ``method`` for ``length`` tokens; None for a model that no export
    covers."""
    source = source_of(patch)
    if source is None:
        return None
    found = {}
    for name, target in TARGETS.items():
        with suppress(ValueError):
            found[name] = _expressed(method, source, target, length).differences
    return found


def refusal(method: Method, patch: Patched, system: str, length: int) -> str:
    """The reason of ``system`` against ``method`` for ``length`` tokens; empty where it can express it."""
    source = source_of(patch)
    if source is None:
        return "the model is the language part of a larger one, which no export covers"
    try:
        export(method, source, TARGETS[system], length)
    except NotExpressible as error:
        return error.reason
    except ValueError as error:
        return str(error)
    return ""


def shorthand(method: Method) -> str:
    """The request fields in the short form."""
    given = method.model_dump(exclude_unset=True, exclude_none=True) | {"method": method.method}
    whole = {key: int(value) for key, value in given.items() if isinstance(value, float) and value.is_integer()}
    return to_shorthand(given | whole)


def export(method: Method, source: Source, target: Target, length: int) -> Expression:
    """``method`` for texts of at most ``length`` tokens, in the syntax of ``target``.

    Raises:
        NotExpressible: naming the reason, and the closest encoding that the target can express.
        ValueError: when the encoding does not fit the model; the message names the field.
    """
    try:
        return _expressed(method, source, target, length)
    except (Inexpressible, NoRopeParameters) as error:
        others = (other for other in closest(method, source.geometry, length))
        found = next((shorthand(other) for other in others if _is_expressible(other, source, target, length)), None)
        raise NotExpressible(method, target, str(error), found) from None


def default_length(method: Method, geometry: RopeGeometry) -> int:
    """The length that the parameters reach; for the checkpoint's own encoding the longest that it declares.

    Raises:
        LengthRequired: for an encoding that depends on the length, or whose parameters name none.
        ValueError: when the encoding does not fit the model; the message names the field.
    """
    declared = geometry.max_position_embeddings
    if is_own(resolve(method, geometry, declared), geometry, declared):
        # Cards of checkpoints add a scaling, and leave the maximum at the trained length.
        own = geometry.native
        return max(declared, (own.reached(geometry) if isinstance(own, Method) else None) or 0)
    if method.recipe(geometry).depends_on_length:
        raise LengthRequired("this encoding depends on it")
    reached = effective(method, geometry).reached(geometry)
    if reached is None:
        raise LengthRequired("the parameters of this encoding name none")
    return min(reached, LONGEST - 1)


def _expressed(method: Method, source: Source, target: Target, length: int) -> Expression:
    geometry = source.geometry
    resolved = resolve(method, geometry, length)
    if source.read_here_alone:
        raise Inexpressible(
            "the configuration names the model's positions in `position_encoding`, which only Ropeway reads; "
            "others would rotate its queries and keys"
        )
    declared = source.base or geometry
    is_native = is_own(resolved, declared, length)
    if source.in_chunks and is_native:
        raise Inexpressible(f"it has no option for this encoding, which is `{CHUNKS}` of the configuration")
    if source.in_chunks and target.reads_chunks:
        raise Inexpressible(f"it reads `{CHUNKS}` instead: serve the checkpoint without that entry")
    varies = resolve(method.without_follows(), geometry, SHORTEST) != resolved
    wanted = Wanted(geometry, length, resolved, source.own, source.model_type, varies)
    is_longer = length > declared.max_position_embeddings
    if is_native and not (is_longer and resolved.rotates):
        expression = target.own(replace(wanted, geometry=declared))
        if is_longer:
            expression = target.lengthened(expression, {source.longest: length})
    elif resolved.rotates and not source.own:
        raise Inexpressible(
            f"the configuration of {source.model_type} models has no rope_parameters that any would read"
        )
    else:
        expression = target.express(wanted)
    return replace(expression, config=json.loads(json.dumps(expression.config)))  # plain strings for enums


def _is_expressible(method: Method, source: Source, target: Target, length: int) -> bool:
    try:
        _expressed(method, source, target, length)
    except ValueError:
        return False
    return True
