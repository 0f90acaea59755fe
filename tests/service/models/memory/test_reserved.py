"""Memory that several models of a device reserve: each byte once, whether its cache is allocated or grows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from patches import MAX_POSITION, Patched, patched
from service.engine.choice import EngineChoice, EngineKind
from service.models import registry
from service.models.checkpoint.loading import Checkpoint, ModelLoadError
from service.models.memory.cache_size import cache_bytes, cache_bytes_per_token
from service.models.registry import ModelRegistry, ServedModel
from service.models.start import Started
from service.settings import Settings
from tests.models import tiny_model

Groups = list[list[EngineKind]]
"""Engines of the models, by their base."""

CARD = torch.device("cuda")


@pytest.fixture(scope="module")
def patch() -> Iterator[Patched]:
    with patched(tiny_model("llama")[1]) as patch:
        yield patch


class Machine:
    """Serves models of ``patch`` from ``free`` bytes of a device. Generation threads allocate pages ``at_once``, or
    later than the next model."""

    def __init__(
        self, patch: Patched, device: torch.device, monkeypatch: pytest.MonkeyPatch, *, at_once: bool = True
    ) -> None:
        self.free = 100_000 * cache_bytes_per_token(patch)
        self._model, self._at_once, self._monkeypatch = patch.model, at_once, monkeypatch
        model = SimpleNamespace(device=device, dtype=patch.model.dtype)
        same = ("cached", "caching_layers", "geometry", "num_logits", "ranks", "smallest_window")
        self._patch: Any = SimpleNamespace(model=model, **{name: getattr(patch, name) for name in same})
        monkeypatch.setattr(registry, "free_bytes", lambda device: self.free)
        monkeypatch.setattr(registry, "Engine", self._engine)

    def _engine(self, patch: Patched, limits: Any, eos: object, metrics: object, choice: EngineChoice) -> Any:
        has_pages = choice.kind == "paged" and self._at_once
        if has_pages:
            self.free -= cache_bytes(limits.cache_tokens, patch)
        thread, scores = SimpleNamespace(stop=lambda grace_s: None), SimpleNamespace(join=lambda *_: None)
        own = {"limits": limits, "choice": choice, "has_pages": lambda: has_pages, "longest": limits.cache_tokens}
        return SimpleNamespace(thread=thread, scores=scores, **own)

    def serve(self, groups: Groups, **settings: Any) -> list[ServedModel]:
        def started(_: Settings) -> Iterator[list[Any]]:
            for number, group in enumerate(groups):
                checkpoints = [Checkpoint(f"{number}.{index}", self._model, None) for index in range(len(group))]
                yield [
                    nullcontext(Started(checkpoint, "", "", self._patch, EngineChoice(kind)))
                    for checkpoint, kind in zip(checkpoints, group, strict=True)
                ]

        self._monkeypatch.setattr(registry, "started", started)
        models = ModelRegistry(Settings(_env_file=None, **settings))
        models.close()
        return list(models)


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(
    ("groups", "share"),
    [
        ([["paged"]], 0.7),
        ([["padded"]], 0.7),
        ([["padded"], ["paged"]], 0.91),
        ([["paged"], ["padded"]], 0.91),
        ([["paged"] * 3], 0.85),
        ([["padded"] * 3], 0.85),
        ([["none"], ["paged"]], 0.7),
        ([["none", "none"], ["padded"]], 0.7),
    ],
)
def test_caches_and_states_of_a_card_are_reserved_once(
    groups: Groups, share: float, patch: Patched, monkeypatch: pytest.MonkeyPatch, *, at_once: bool
) -> None:
    """States of padded rows may take as much as their cache; a model that is only scored has neither."""
    machine = Machine(patch, CARD, monkeypatch, at_once=at_once)
    free = machine.free
    models = machine.serve(groups)
    factors = {"paged": 1, "padded": 2, "none": 0}
    reserved = [factors[served.engine.choice.kind] * served.memory.cache for served in models]
    assert sum(reserved) / free == pytest.approx(share, abs=0.01)
    assert {served.score_room for served in models} == {free - sum(reserved)}


def test_a_model_that_is_only_scored_has_no_cache(patch: Patched, monkeypatch: pytest.MonkeyPatch) -> None:
    """So no cache bounds its texts: a default goes as far as encodings do."""
    trained = patch.geometry.original_max_position_embeddings
    for device in (CARD, torch.device("cpu")):
        machine = Machine(patch, device, monkeypatch)
        for asked, longest in ({}, 32 * trained), ({"max_length": 1 << 30}, MAX_POSITION + 1):
            (served,) = machine.serve([["none"]], **asked)
            assert served.memory.cache == served.engine.limits.cache_tokens == 0
            assert served.max_length == longest
            assert served.score_room == machine.free


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("kind", ["paged", "padded"])
@pytest.mark.parametrize("at_once", [True, False])
def test_configured_caches_fit_together(
    device: str, kind: EngineKind, patch: Patched, monkeypatch: pytest.MonkeyPatch, *, at_once: bool
) -> None:
    least, most = (30_000, 60_000) if kind == "padded" else (45_000, 60_000)
    for tokens, fits in ((least, True), (most, False)):
        machine = Machine(patch, torch.device(device), monkeypatch, at_once=at_once)
        if fits:
            machine.serve([[kind], ["paged"]], cache_tokens=tokens)
            continue
        with pytest.raises(ModelLoadError, match=f"CACHE_TOKENS: {tokens} needs"):
            machine.serve([[kind], ["paged"]], cache_tokens=tokens)
