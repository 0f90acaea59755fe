"""A fingerprint changes with everything that a model is, and with nothing else."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
import torch

from service.models.checkpoint.fingerprint import contents, fingerprint, numerics
from service.models.registry import ModelRegistry
from service.settings import Settings
from tests.service.conftest import tiny_checkpoint


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ModelRegistry]]:
    """The same checkpoint in two folders."""
    first = tiny_checkpoint(tmp_path_factory.mktemp("models") / "a")
    second = shutil.copytree(first, first.parent / "b")
    registries = [
        ModelRegistry(Settings(_env_file=None, model=str(folder), cache_tokens=256)) for folder in (first, second)
    ]
    yield registries
    for registry in registries:
        registry.close()


class TestFingerprint:
    def test_the_same_weights_elsewhere_are_the_same_model(self, loaded: list[ModelRegistry]) -> None:
        first, second = (registry.default.patch.model for registry in loaded)
        assert first.config._attn_implementation != second.config._attn_implementation  # each patched by itself
        assert fingerprint(first) == fingerprint(second)

    def test_any_change_is_seen(self, loaded: list[ModelRegistry]) -> None:
        model = loaded[0].default.patch.model
        before = contents(model)
        weight = model.model.layers[1].mlp.down_proj.weight.data
        kept = weight.clone()
        changes = {
            "one number": lambda: weight[-1, -1].add_(1e-6),
            "one bit": lambda: weight[3, 5].copy_(torch.nextafter(weight[3, 5], torch.tensor(9.0))),
            "sign of two": lambda: weight.view(-1)[100:102].neg_(),
            "swapped rows": lambda: weight.copy_(weight.flip(0)),
            "all zero": lambda: weight.zero_(),
        }
        for name, change in changes.items():
            change()
            assert contents(model) != before, name
            weight.copy_(kept)
        assert contents(model) == before

    def test_the_configuration_counts(self, loaded: list[ModelRegistry], monkeypatch: pytest.MonkeyPatch) -> None:
        model = loaded[1].default.patch.model
        before = contents(model)
        monkeypatch.setattr(model.config, "rms_norm_eps", 1e-3)
        assert contents(model) != before


def test_numbers_name_version_device_format_and_threads(
    loaded: list[ModelRegistry], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded[0].default.patch.model
    found = numerics(model)
    assert found.torch == torch.__version__
    assert (found.device, found.dtype, found.threads) == ("cpu", "float32", torch.get_num_threads())
    assert (found.tensor_parallel, found.products) == (1, [])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert numerics(model) == found.model_copy(update={"threads": 77})


def test_a_fingerprint_names_contents_and_numerics(
    loaded: list[ModelRegistry], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded[0].default.patch.model
    assert fingerprint(model) == fingerprint(model)
    before = fingerprint(model)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert fingerprint(model) != before


def test_a_registry_keeps_the_fingerprint(loaded: list[ModelRegistry]) -> None:
    first, second = (registry.default for registry in loaded)
    assert first.fingerprint == second.fingerprint
