"""Positional encodings as data: recipes, slots, and the seams that carry them into a model.

Inside ``with patched(model) as p``, a transformers model takes an encoding per call or per row:

- ``model.generate(**batch, **p.encoding("yarn:4"))``: one encoding.
- ``model.generate(**batch, **p.encoding(["default", "self_extend"]))``: one for each of two rows.
- ``model.generate(**batch, **p.encoding("dynamic_yarn", length=1024))``: one that depends on the reserved length.
- ``model(**batch, labels=labels, **p.encoding("yarn:4")).loss.backward()``: training.

A thread that calls ``generate`` is to be joined inside of the block: leaving it stops the call with an error.
``docs/notebook.ipynb`` has such calls with their outputs.

This is the public surface. Importing it loads the methods, and neither torch nor a model library. Names that compute
with tensors load on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from patches.encoding.echo import set_apart
from patches.encoding.fields import LONGEST
from patches.encoding.geometry import RopeGeometry
from patches.encoding.method import Method
from patches.encoding.recipe import Recipe, ResolvedRecipe
from patches.encoding.schedule import RopeType
from patches.factors import by_factors, factors_of, starts
from patches.json_text import Trail, check_text, path_of, read_json, repeated
from patches.parsing import ENCODING_TAGS, InvalidEncoding, PositionEncoding, parse
from patches.problems import KnownFields, Problem, in_words, problem, problems_of, unknown
from patches.proposals import OWN, UNSCALED, alike, candidates
from patches.registry import METHODS, describe_method, describe_methods, examples, questions
from patches.resolution import EchoMismatch, describe, effective, is_own, resolve
from patches.rope_parameters import (
    CHUNKS,
    NoRopeParameters,
    closest,
    grouping,
    in_configuration,
    is_by_layer,
    is_trained_at_its_length,
    of_today,
    rope_parameters,
)
from patches.routes import one_per_route
from patches.rule import ranges_by_rule
from patches.shorthand import field_value, from_shorthand, from_text, label_of, to_shorthand, unknown_method

if TYPE_CHECKING:
    from patches.attention.decode.strided import ALIKE
    from patches.attention.fused import LONG_CONTEXT
    from patches.attention.mass import AttentionMass
    from patches.attention.paged.batch import PagedBackend, PagedBatch, decode_batch, paged_batch, runs_triton
    from patches.attention.paged.decode import DecodeStep, DecodeSteps
    from patches.attention.paged.step import PagedSequence
    from patches.batch.segments import Batch, packed_batch
    from patches.batch.slots import MAX_POSITION, SlotsExhausted, SlotTable, decode, encode
    from patches.batch.upload import uploaded
    from patches.encoding.distances import effective_distance
    from patches.encoding.masks import LayerMask
    from patches.model.attention.in_place import LayersInPlace
    from patches.model.hf import patched
    from patches.model.measuring.geometry import UnsupportedModel, geometry_of, ignored_entries
    from patches.model.measuring.rounding import allowed_rounding
    from patches.model.ranks import Ranks
    from patches.model.recorded.recording import Recordings
    from patches.model.seams import Patched

__all__ = [
    "ALIKE",
    "CHUNKS",
    "ENCODING_TAGS",
    "LONGEST",
    "LONG_CONTEXT",
    "MAX_POSITION",
    "METHODS",
    "OWN",
    "UNSCALED",
    "AttentionMass",
    "Batch",
    "DecodeStep",
    "DecodeSteps",
    "EchoMismatch",
    "InvalidEncoding",
    "KnownFields",
    "LayerMask",
    "LayersInPlace",
    "Method",
    "NoRopeParameters",
    "PagedBackend",
    "PagedBatch",
    "PagedSequence",
    "Patched",
    "PositionEncoding",
    "Problem",
    "Ranks",
    "Recipe",
    "Recordings",
    "ResolvedRecipe",
    "RopeGeometry",
    "RopeType",
    "SlotTable",
    "SlotsExhausted",
    "Trail",
    "UnsupportedModel",
    "alike",
    "allowed_rounding",
    "by_factors",
    "candidates",
    "check_text",
    "closest",
    "decode",
    "decode_batch",
    "describe",
    "describe_method",
    "describe_methods",
    "effective",
    "effective_distance",
    "encode",
    "examples",
    "factors_of",
    "field_value",
    "from_shorthand",
    "from_text",
    "geometry_of",
    "grouping",
    "ignored_entries",
    "in_configuration",
    "in_words",
    "is_by_layer",
    "is_own",
    "is_trained_at_its_length",
    "label_of",
    "of_today",
    "one_per_route",
    "packed_batch",
    "paged_batch",
    "parse",
    "patched",
    "path_of",
    "problem",
    "problems_of",
    "questions",
    "ranges_by_rule",
    "read_json",
    "repeated",
    "resolve",
    "rope_parameters",
    "runs_triton",
    "set_apart",
    "starts",
    "to_shorthand",
    "unknown",
    "unknown_method",
    "uploaded",
]


_NEEDS_TORCH = {
    "patches.attention.fused": {"LONG_CONTEXT"},
    "patches.model.attention.in_place": {"LayersInPlace"},
    "patches.attention.decode.strided": {"ALIKE"},
    "patches.attention.mass": {"AttentionMass"},
    "patches.attention.paged.batch": {"PagedBackend", "PagedBatch", "decode_batch", "paged_batch", "runs_triton"},
    "patches.attention.paged.decode": {"DecodeStep", "DecodeSteps"},
    "patches.attention.paged.step": {"PagedSequence"},
    "patches.encoding.distances": {"effective_distance"},
    "patches.encoding.masks": {"LayerMask"},
    "patches.batch.segments": {"Batch", "packed_batch"},
    "patches.model.measuring.geometry": {"UnsupportedModel", "geometry_of", "ignored_entries"},
    "patches.model.hf": {"patched"},
    "patches.model.ranks": {"Ranks"},
    "patches.model.recorded.recording": {"Recordings"},
    "patches.model.measuring.rounding": {"allowed_rounding"},
    "patches.model.seams": {"Patched"},
    "patches.batch.upload": {"uploaded"},
    "patches.batch.slots": {"MAX_POSITION", "SlotTable", "SlotsExhausted", "decode", "encode"},
}


def __getattr__(name: str) -> Any:
    for module, names in _NEEDS_TORCH.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
