"""The default size of the paged cache, in tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from structlog.testing import CapturingLogger

from patches import Patched, patched
from service.engine.engine import Engine
from service.engine.padded.caches import sizes
from service.models import registry
from service.models.checkpoint.loading import ModelLoadError
from service.models.memory.cache_size import cache_bytes, cache_bytes_per_token, cache_tokens, kept_bytes
from service.models.memory.score_size import MOST_TOKENS, SHARE, score_bytes, score_bytes_per_token, score_tokens
from service.models.registry import ModelRegistry
from service.settings import Settings
from tests.field import configurations
from tests.models import WINDOW, tiny_model

AMPLE = 1 << 40


@pytest.fixture(scope="module")
def patch() -> Iterator[Patched]:
    with patched(tiny_model("llama")[1]) as patch:
        yield patch


def asked(**fields: int) -> Settings:
    return Settings(_env_file=None, **fields)


def test_it_fits_the_model(patch: Patched) -> None:
    trained = patch.geometry.original_max_position_embeddings
    assert cache_tokens(patch, asked(), AMPLE) == 32 * trained
    assert cache_tokens(patch, asked(max_length=100 * trained), AMPLE) == 100 * trained
    assert cache_tokens(patch, asked(max_length=100 * trained + 1), AMPLE) == 100 * trained + 32, "a page more"
    assert cache_tokens(patch, asked(max_length=trained), AMPLE) == 32 * trained
    assert cache_tokens(patch, asked(cache_tokens=77), AMPLE) == 77


def test_a_long_model_gets_no_more_than_before() -> None:
    with patched(tiny_model("llama", max_position_embeddings=1 << 17)[1]) as long:
        assert cache_tokens(long, asked(), AMPLE) == 32768


def test_it_takes_a_quarter_of_the_free_memory_at_most(patch: Patched) -> None:
    """Beside the cache, an eighth of its keys again is for keys that turn."""
    per_token = cache_bytes_per_token(patch)
    free = 4 * 1024 * per_token
    assert cache_tokens(patch, asked(max_length=1 << 20), free) == 1024 - 64
    assert cache_tokens(patch, asked(cache_tokens=4096 - 256), free) == 4096 - 256
    assert cache_bytes(4096 - 256, patch) == 4080 * per_token
    needed = (5000 + 625 // 2 + 1) * per_token >> 20
    with pytest.raises(ModelLoadError, match=rf"CACHE_TOKENS: 5000 needs {needed} MiB .* at most 3840 tokens fit"):
        cache_tokens(patch, asked(cache_tokens=5000), free)


def test_states_of_padded_rows_have_half_of_a_card(patch: Patched) -> None:
    model: Any = SimpleNamespace(device=torch.device("cuda"), dtype=patch.model.dtype)
    card: Any = SimpleNamespace(model=model, cached=patch.cached, caching_layers=patch.caching_layers)
    free = 32_000 * cache_bytes_per_token(patch)
    assert cache_tokens(card, asked(), free) == 22_400
    assert cache_tokens(card, asked(), free, padded=True) == 11_200


@pytest.mark.parametrize(
    "kind",
    ["llama", "gemma3_text", "bamba", "falcon_h1", "granitemoehybrid", "jamba", "lfm2", "qwen3_next", "zamba2"],
)
def test_only_layers_that_attend_have_keys(kind: str) -> None:
    """As many bytes as the cache of transformers has, before the first window ends."""
    model, tokens = configurations.tiny_model(kind), 20
    with torch.no_grad():
        cache = model(torch.arange(3, 3 + tokens)[None], use_cache=True).cache
    with patched(model) as patch:
        assert tokens * cache_bytes_per_token(patch) == sizes(cache)[0]


def test_half_precision_has_no_spare_places() -> None:
    with patched(tiny_model("llama")[1].bfloat16()) as half:
        per_token = cache_bytes_per_token(half)
        assert cache_tokens(half, asked(cache_tokens=4096), 4096 * per_token) == 4096
        assert cache_bytes(4096, half) == 4096 * per_token


def test_the_log_tells_it(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = CapturingLogger()
    monkeypatch.setattr(registry, "log", log)
    ModelRegistry(Settings(_env_file=None, model=str(checkpoints / "tiny"))).close()
    bounded = next(call.kwargs for call in log.calls if call.args == ("scores_bounded",))
    assert (bounded["model"], bounded["tokens"], bounded["by"]) == ("tiny", MOST_TOKENS, "default")
    told = [call.kwargs for call in log.calls if call.args == ("cache_reserved",)]
    assert [(line["model"], line["tokens"], line["by"]) for line in told] == [("tiny", 32 * 64, "default")]


def test_passes_take_a_share_of_what_caches_leave(patch: Patched) -> None:
    per_token = score_bytes_per_token(patch)
    assert per_token == 3.5 * cache_bytes_per_token(patch), "one of two layers five times again"
    room = score_bytes(int(900 / SHARE) * per_token)
    assert score_tokens(patch, room, asked()) == score_tokens(patch, room, asked(score_tokens=900)) == 900
    assert score_tokens(patch, 1 << 60, asked()) == MOST_TOKENS
    assert [score_tokens(patch, room, asked(score_tokens=tokens)) for tokens in (901, 899)] == [900, 899]


def test_the_models_of_a_device_share_the_memory_of_passes(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches that are not allocated yet are reserved all the same."""
    settings = Settings(_env_file=None, model=str(checkpoints), cache_tokens=256)
    left = 10_000_000
    monkeypatch.setattr(registry, "free_bytes", lambda device: left)
    monkeypatch.setattr(Engine, "has_pages", lambda self: False)
    models = ModelRegistry(settings)
    try:
        caches = sum(served.memory.cache for served in models)
        for served in models:
            most = score_bytes(left - caches) // score_bytes_per_token(served.patch)
            assert served.engine.scores.capacity == most
        first, second, *_ = models
        (held,) = first.engine.scores.enter([first.engine.scores.most])
        (waits,) = second.engine.scores.enter([100])
        assert held.granted.is_set()
        assert not waits.granted.is_set()
        held.leave()
        assert waits.granted.is_set()
    finally:
        models.close()


def test_pages_are_allocated_while_the_thread_runs(checkpoints: Path) -> None:
    models = ModelRegistry(Settings(_env_file=None, model=str(checkpoints / "tiny"), cache_tokens=256))
    try:
        assert models.default.engine.has_pages()
        assert models.default.engine.thread.manager.tokens_in_cache()[1] > 0
    finally:
        models.close()
    assert not models.default.engine.has_pages(), "its thread has ended"


@pytest.mark.parametrize(("family", "layers"), [("llama", (2, 0)), ("cohere2", (1, 3)), ("gemma3n", (1, 1))])
def test_windows_keep_no_more_than_they_reach(family: str, layers: tuple[int, int]) -> None:
    """Of four layers of Gemma 3n, two share the keys of the others."""
    with patched(tiny_model(family)[1]) as model:
        per_layer = cache_bytes_per_token(model) // sum(layers)
        whole, local = layers
        for tokens in (5, WINDOW, 1000):
            assert kept_bytes(model, tokens) == per_layer * (whole * tokens + local * min(tokens, WINDOW))
