"""Norms of learned relative vectors, against the weights; their figure on a served model."""

from __future__ import annotations

from pathlib import Path

import httpx
import numpy as np
import pytest

from patches import METHODS, patched
from service.figures.encodings.vectors import FAR, POINTS, drawn_distances, vector_norms
from service.models import architecture
from tests.models import demo_model
from tests.service.api.test_echo import family_checkpoint
from tests.service.serving import serving

RELATIVE = [name for name, method in METHODS.items() if method.family == "relative"]
LENGTH = 40


@pytest.mark.parametrize("name", RELATIVE)
def test_norms_are_those_of_the_weights(name: str) -> None:
    model = demo_model(name)
    with patched(model) as patch:
        norms = vector_norms(model, patch.resolve({"method": name}, LENGTH).recipe, LENGTH)
    assert np.shape(norms) == (model.config.num_hidden_layers, LENGTH)
    heads, width = model.config.num_attention_heads, model.config.hidden_size
    for layer, drawn in zip(model.model.layers, norms, strict=True):
        own = {key: weight.detach().double().numpy() for key, weight in layer.self_attn.relative.named_parameters()}
        if "relative_keys.weight" in own:
            table = own["relative_keys.weight"]
            expected = [np.linalg.norm(table[min(distance, len(table) - 1)]) for distance in range(LENGTH)]
        else:
            speeds = 10_000 ** (-np.arange(0, width, 2) / width)
            waves = [np.concatenate((np.sin(turn), np.cos(turn))) for turn in np.outer(np.arange(LENGTH), speeds)]
            by_head = own["r_net.weight"].reshape(heads, -1, width)
            expected = [np.linalg.norm(by_head @ wave, axis=-1).mean() for wave in waves]
        assert drawn == pytest.approx(expected, rel=1e-4)


def test_distances_end_with_the_text() -> None:
    assert drawn_distances(5).tolist() == [0, 1, 2, 3, 4]
    assert len(drawn_distances(1 << 20)) == POINTS
    assert drawn_distances(1 << 20)[-1] == FAR - 1


@pytest.mark.slow
def test_a_served_model_shows_its_vectors(tmp_path: Path) -> None:
    architecture.register()
    for name in RELATIVE:
        family_checkpoint(tmp_path / name, name)
    with serving(tmp_path) as (url, _):
        for name in RELATIVE:
            answer = httpx.post(f"{url}/figures", json={"pe": [name], "model": name, "length": 300}, timeout=60)
            assert answer.status_code == 200, answer.text
            (figure,) = (one for one in answer.json()["figures"] if one["name"] == "relative")
            lines = [line for line in figure["data"] if str(line.get("name", "")).startswith("layer")]
            assert {line["name"] for line in lines} == {"layer 0", "layer 1"}
            assert figure["title"].endswith(name)
