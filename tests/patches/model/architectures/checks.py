"""Checks of one patched model: its default against transformers, other encodings against the specification."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import patches.model.attention.segment_attention
from patches import patched
from patches.attention import reference
from tests.methods import Fields, request_id
from tests.models import tiny_tokens
from tests.patches.forward import left_padded, logits_of, relative, slot_of

LENGTH = 32
TOLERANCE = 2e-5

SHORT_FORMS: dict[str, Fields] = {
    "self_extend": {"method": "self_extend", "group_size": 4, "neighbor_window": 8},
    "yarn": {"method": "yarn", "factor": 4.0},
    "none": {"method": "none", "attention_temperature": "log_n"},
    "streaming": {"method": "streaming", "sink_tokens": 2, "window": 9},
    "alibi": {"method": "alibi"},
}
MOVING = ("self_extend", "streaming")
"""Requests whose bands move the positions of keys."""


def by_kind(*fast: str) -> Callable[..., pytest.MarkDecorator]:
    """The parametrization of a test by ``kind``; all kinds but the ``fast`` ones are marked slow."""

    def kinds(*names: str) -> pytest.MarkDecorator:
        marked = [pytest.param(name, marks=() if name in fast else pytest.mark.slow) for name in names]
        return pytest.mark.parametrize("kind", marked)

    return kinds


def equals_transformers(model: PreTrainedModel) -> None:
    """The default in one pass, from transformers' own cache, and in a padded batch."""
    whole = tiny_tokens(2, LENGTH)
    ids, mask, _ = left_padded([whole[0], whole[1, :23]])
    calls: list[dict[str, Any]] = [{"inputs": whole}, {"inputs": ids, "attention_mask": mask}]
    expected = [_plain(model, whole), *(_greedy(model, **call) for call in calls)]
    with patched(model):
        results = [_plain(model, whole), *(_greedy(model, **call) for call in calls)]
    for name, result, plain in zip(("one pass", "cache", "padding"), results, expected, strict=True):
        assert relative(result, plain) < TOLERANCE, name


def equals_reference(model: PreTrainedModel, names: Iterable[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request differs from the default, and equals the specification."""
    tokens = tiny_tokens(2, LENGTH)
    with patched(model) as patch:
        slots = {name: slot_of(patch, SHORT_FORMS[name], LENGTH) for name in names}
        plain, fused = logits_of(model, tokens, [0, 0]), {n: logits_of(model, tokens, [s, s]) for n, s in slots.items()}
        monkeypatch.setattr(
            patches.model.attention.segment_attention.fused,
            "attend",
            lambda q, k, v, how, _, layer, q_start, num_sinks: reference.attend(q, k, v, how, layer, q_start=q_start),
        )
        for name, slot in slots.items():
            assert relative(logits_of(model, tokens, [slot, slot]), fused[name]) < TOLERANCE, request_id(
                SHORT_FORMS[name]
            )
            assert relative(fused[name], plain) > 1e-3, f"{name} must matter"


def refuses(model: PreTrainedModel, names: Iterable[str], reason: str) -> None:
    with patched(model) as patch:
        for name in names:
            with pytest.raises(ValueError, match=reason):
                slot_of(patch, SHORT_FORMS[name], LENGTH)


@torch.no_grad()
def _plain(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(tokens, use_cache=False).logits
    return logits


def _greedy(model: Any, **call: Any) -> torch.Tensor:
    """Logits [steps, rows, vocabulary] of transformers' own loop."""
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "output_logits": True}
    return torch.stack(model.generate(**call, **options, return_dict_in_generate=True).logits)
