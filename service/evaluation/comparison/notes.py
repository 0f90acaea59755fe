"""Cautions of a comparison: those of its results, and what differs between them beside methods and models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from service.evaluation.comparison.checks import Named, have_one_tokenizer
from service.evaluation.formatting import listed
from service.evaluation.setup import ModelSetup

FACTS = ("dtype", "quantization", "device", "torch", "transformers")
"""Fields of a model's setup that change numbers a little, and that a reader may not know to differ."""


def notes_on(results: Sequence[Named]) -> list[str]:
    """One sentence per difference, then the cautions of the results."""
    return [*_partial(results), *_lengths(results), *_setups(results), *_tokenizers(results), *_cautions(results)]


def _partial(results: Sequence[Named]) -> Iterator[str]:
    """The comparison's ``partial`` has the missing units, of which there may be many."""
    for name, result in results:
        if result.partial is not None:
            yield f"{name} is partial: {result.partial.units_done} of {result.partial.units_total} units are finished."


def _lengths(results: Sequence[Named]) -> Iterator[str]:
    if len({result.trained_length for _, result in results}) > 1:
        each = [f"{result.trained_length:,} tokens of {name}" for name, result in results]
        yield f"The trained lengths are {listed(each)}."


def _setups(results: Sequence[Named]) -> Iterator[str]:
    models = {name: result.setup.models for name, result in results if result.setup is not None}
    codes = {name: result.setup.code[:12] for name, result in results if result.setup is not None}
    yield from _difference("code", codes)
    for fact in FACTS:
        yield from _difference(fact, {name: _values(fact, found) for name, found in models.items()})
    for model in dict.fromkeys(model for found in models.values() for model in found):
        weights = {name: found[model].fingerprint[:12] for name, found in models.items() if model in found}
        yield from _difference(f"fingerprint of {model}", weights)


def _values(fact: str, models: Mapping[str, ModelSetup]) -> str:
    """The values of all models of a result."""
    return listed(sorted({str(getattr(model, fact) or "none") for model in models.values()}))


def _difference(fact: str, values: Mapping[str, str]) -> Iterator[str]:
    if len(set(values.values())) > 1:
        yield f"The {fact} differs: {listed([f'{value} in {name}' for name, value in values.items()])}."


def _tokenizers(results: Sequence[Named]) -> Iterator[str]:
    first = results[0]
    others = [name for name, result in results[1:] if not have_one_tokenizer(first.result, result)]
    if others:
        yield f"The tokenizer of {listed(others)} is not that of {first.name}: prompts of one length have other texts."


def _cautions(results: Sequence[Named]) -> Iterator[str]:
    """Each once, with the names of the results that have it unless all do."""
    holders: dict[str, list[str]] = {}
    for name, result in results:
        for caution in result.cautions():
            holders.setdefault(caution, []).append(name)
    for caution, names in holders.items():
        yield caution if len(names) == len(results) else f"{listed(names)}: {caution}"
