"""Maps and masks that begin beyond the windows of a model: requests for them change nothing, and are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from patches import RopeGeometry, parse, patched
from tests.field.configurations import WINDOW, tiny_model
from tests.models import tiny_tokens
from tests.patches.forward import logits_of, relative, slot_of

LENGTH = 3 * WINDOW
GEOMETRY = RopeGeometry(16, 16, 1e4, 4096, 4096, 4)
BEYOND = (
    f"self_extend:neighbor_window={WINDOW}",
    f"rerope:window={WINDOW}",
    f"streaming:window={WINDOW}",
    f"lm_infinite:n_local={WINDOW}",
    f"string:shifted_offset={WINDOW},small_local_value=4",
)
WITHIN = (
    f"self_extend:group_size=2,neighbor_window={WINDOW - 1}",
    f"rerope:window={WINDOW - 4}",
    f"streaming:window={WINDOW - 1}",
    f"lm_infinite:n_local={WINDOW - 1}",
    f"streaming:window={WINDOW // 2},absolute_positions=true",
    "dual_chunk:chunk_size=16",
    *("self_extend", "rerope", "string:small_local_value=2", "streaming", "dpe:[8,16]"),
)


def test_maps_and_masks_beyond_every_window_are_refused() -> None:
    model = tiny_model("mistral")
    with patched(model) as patch:
        assert (patch.geometry.window, patch.geometry.widest) == (WINDOW, WINDOW)
        for request in BEYOND:
            with pytest.raises(
                ValueError, match=f"no effect on this model: they begin {WINDOW} tokens away.*attend to {WINDOW}"
            ):
                patch.resolve(request, LENGTH)


def test_those_that_begin_within_have_an_effect() -> None:
    """Defaults go by the window where it is smaller than the trained length."""
    model, tokens = tiny_model("mistral"), tiny_tokens(1, LENGTH)
    with patched(model) as patch:
        plain = logits_of(model, tokens, [0])
        for request in WITHIN:
            assert relative(logits_of(model, tokens, [slot_of(patch, parse(request), LENGTH)]), plain) > 1e-4, request


def test_masks_have_an_effect_in_layers_that_see_all() -> None:
    """Cohere 2 rotates in layers with a window only. Maps beyond it change nothing, masks change the other layers."""
    model, tokens = tiny_model("cohere2"), tiny_tokens(1, LENGTH)
    with patched(model) as patch:
        assert (patch.geometry.window, patch.geometry.widest) == (WINDOW, None)
        with pytest.raises(ValueError, match="no effect"):
            patch.resolve(f"rerope:window={WINDOW}", LENGTH)
        slot = slot_of(patch, parse(f"streaming:window={WINDOW}"), LENGTH)
        assert relative(logits_of(model, tokens, [slot]), logits_of(model, tokens, [0])) > 1e-4


def test_masks_count_the_widest_window() -> None:
    for sinks in (0, 4):
        recipe = parse(f"streaming:window=500,sink_tokens={sinks}").encoding(GEOMETRY)
        for widest, begins in ((500, 500), (None, None), (1000, None)):
            geometry = replace(GEOMETRY, window=100, widest=widest)
            if begins is None:
                recipe.resolve(geometry, LENGTH)
            else:
                with pytest.raises(ValueError, match=f"begin {begins} tokens away"):
                    recipe.resolve(geometry, LENGTH)


def test_layers_without_a_window_take_everything() -> None:
    with patched(tiny_model("gemma3_text")) as patch:
        assert patch.geometry.window is None
        for request in BEYOND:
            patch.resolve(request, LENGTH)
