"""An address changes with every field of every unit: one that it lacks would reuse outcomes of other settings."""

from __future__ import annotations

import dataclasses
import inspect
import pkgutil
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import numpy as np
import pytest

import service.evaluation
from patches import Method, parse
from service.evaluation.catalogue import EVALUATIONS, plan_of
from service.evaluation.unit import Unit
from service.jobs.address import Addresses
from service.models.registry import ModelRegistry
from service.settings import Settings
from tests.service.conftest import TEXT
from tests.service.evaluation.test_max_tokens import REQUESTS

WITHOUT_EFFECT = {
    "name": "a label, for people",
    "subject.patch": "that of the model, whose fingerprint is in the address",
    "subject.most": "a limit of memory: a pass either has room or is refused",
    "subject.room": "the same limit in bytes",
    "document.name": "a label",
    "document.tokenizer": "units read token ids",
    "document.byte_ends": "results divide by bytes, and outcomes are of tokens",
    "document.spaces": "the same for words",
    "document.cut_from": "a note in results; the token ids are cut",
    "document.overlap": "a note in results",
    "repeated.document.name": "a label",
    "repeated.document.tokenizer": "units read token ids",
    "repeated.document.byte_ends": "outcomes are of tokens",
    "repeated.document.spaces": "outcomes are of tokens",
    "repeated.document.cut_from": "a note in results",
    "repeated.document.overlap": "a note in results",
    "sample.draft.name": "a label",
    "sample.draft.text": "the pass reads the token ids of the prompt",
    "sample.draft.answer": "the pass scores the token ids of the answer",
    "sample.draft.expected": "results look for it in the continuation, which is the outcome",
    "sample.pieces": "counts what the token ids of the prompt have",
}
"""Fields that no outcome depends on, with the reason."""

Examples = dict[type[Unit], list[Unit]]

LENGTH_MATTERS = parse({"method": "dynamic", "factor": 2.0})
"""An encoding that depends on the reserved length: this is in the address through it."""

BODIES = {name: {"input": TEXT * 4, "methods": ["default"], **body} for name, body in REQUESTS.items()}
del BODIES["search"]["methods"]  # they are its own
BODIES["probe"] |= {"distances": [64]}  # the repeated segment has text behind it


def kinds() -> set[type[Unit]]:
    """Every class of units that an evaluation makes, from the sources."""
    found = set()
    for module in pkgutil.walk_packages(service.evaluation.__path__, "service.evaluation."):
        members = vars(import_module(module.name)).values()
        found |= {each for each in members if isinstance(each, type) and issubclass(each, Unit)}
    return {kind for kind in found if not inspect.isabstract(kind)}


@pytest.fixture(scope="module")
def examples(models: ModelRegistry, job_settings: Settings) -> Examples:
    """Units of each class, one of each plan, with and without BOS where the evaluation chooses."""
    found: Examples = {}
    for name, body in BODIES.items():
        request = EVALUATIONS[name].request
        for bos in [{"bos": bos} for bos in ("always", "never")] if "bos" in request.model_fields else [{}]:
            plan = plan_of(request.model_validate(body | bos), models, job_settings)
            for kind in {type(unit) for unit in plan.units}:
                unit = next(unit for unit in plan.units if type(unit) is kind)
                subject = unit.subject._replace(method=LENGTH_MATTERS)
                found.setdefault(kind, []).append(dataclasses.replace(unit, subject=subject))
    return found


def parts_of(value: Any) -> dict[str, Any]:
    """The fields of a record; none for a plain value."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {name: getattr(value, name) for name in value._fields}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return {}


def with_part(value: Any, name: str, part: Any) -> Any:
    return value._replace(**{name: part}) if isinstance(value, tuple) else dataclasses.replace(value, **{name: part})


def paths_of(value: Any, above: str = "") -> Iterator[str]:
    """Every field inside of ``value``; none inside of one without effect."""
    for name, part in parts_of(value).items():
        path = f"{above}{name}"
        inside = path not in WITHOUT_EFFECT and parts_of(part)
        if inside:
            yield from paths_of(part, f"{path}.")
        else:
            yield path


def changed(value: Any, path: str, others: dict[str, Any]) -> Any:
    """``value`` with another value in the field ``path``: that of ``others``, or one near it."""
    name, _, inside = path.partition(".")
    part = parts_of(value)[name]
    if inside:
        return with_part(value, name, changed(part, inside, others))
    return with_part(value, name, others[name] if name in others else near(part))


def near(value: Any) -> Any:
    """Another value of the same type; 7 for none."""
    if value is None:
        return 7
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, list | tuple):
        return type(value)(near(each) for each in value) or type(value)([7])
    if isinstance(value, np.ndarray):
        return value + 1
    assert isinstance(value, Method), f"{type(value).__name__}: say here how such a value changes"
    return parse("alibi")


def test_every_class_of_units_has_an_example(examples: Examples) -> None:
    assert set(examples) == kinds()


@pytest.mark.parametrize("kind", sorted(kinds(), key=lambda kind: kind.__name__), ids=lambda kind: kind.__name__)
def test_every_field_is_in_the_address(kind: type[Unit], examples: Examples, models: ModelRegistry) -> None:
    addresses = Addresses(models)
    for unit in examples[kind]:
        before = addresses.key(unit, "anna")
        others = {"model": next(model.name for model in models if model.name != unit.subject.model)}
        kept = [
            path
            for path in paths_of(unit)
            if path not in WITHOUT_EFFECT and addresses.key(changed(unit, path, others), "anna") == before
        ]
        assert kept == [], "put these into inputs(), or into WITHOUT_EFFECT with a reason"


def test_every_exception_is_a_field(examples: Examples) -> None:
    units = [unit for each in examples.values() for unit in each]
    assert {path for unit in units for path in paths_of(unit)} >= set(WITHOUT_EFFECT)
