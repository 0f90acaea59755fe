"""The Triton kernel over an ordinary cache, as scoring has it: on a GPU, or under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from patches import parse, patched
from patches.attention.layer import Layer
from patches.attention.paged import in_place
from service.evaluation.scoring.token_scores import token_nll
from tests.kernels import device_of_kernels
from tests.models import tiny_model
from tests.patches.attention.paged.batches import LAYERS

pytestmark = [pytest.mark.slow, pytest.mark.gpu]
DEVICE = device_of_kernels()

METHODS = [
    {"method": "self_extend", "group_size": 4, "neighbor_window": 8},
    {"method": "dual_chunk", "chunk_size": 16},
    {"method": "alibi"},
    {"method": "rerope", "window": 12},
]


def nll(fields: dict[str, object], chunk: int, *, in_place_too: bool = True) -> torch.Tensor:
    """Of 100 tokens in half precision, under one encoding."""
    torch.manual_seed(0)
    with patched(tiny_model("llama")[1].to(DEVICE, torch.bfloat16)) as patch:
        if in_place_too:
            patch.read_in_place()
        slot = patch.slots.acquire(patch.resolve(parse(fields), 100))
        steps = token_nll(patch, torch.randint(3, 90, (100,)).tolist(), slot, chunk)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return torch.from_numpy(end.value)


@pytest.mark.parametrize("fields", METHODS, ids=lambda fields: fields["method"])
def test_scores_are_those_of_other_calls(fields: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    attend = in_place.attend

    def counted(*args: object) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return attend(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(in_place, "attend", counted)
    expected = nll(fields, 48)
    assert calls == 0, "the texts are short"
    monkeypatch.setattr(in_place, "LEAST_KEYS", 1)
    assert torch.equal(nll(fields, 48, in_place_too=False), expected)
    assert calls == 0, "nobody has checked that the kernel runs"
    assert torch.allclose(nll(fields, 48), expected, atol=0.1)
    assert calls > 0


def test_a_layer_that_chooses_keys_and_a_plain_one_keep_their_calls() -> None:
    states = [torch.randn(1, heads, 600, 16, dtype=torch.bfloat16, device=DEVICE) for heads in (4, 2, 2)]
    with patched(tiny_model("llama")[1]) as patch:
        plain, banded = (patch.resolve(parse(each), 600) for each in ({"method": "default"}, METHODS[0]))
    assert in_place.is_faster(*states, banded, Layer(0.3))
    assert not in_place.is_faster(*states, plain, Layer(0.3))
    assert in_place.is_faster(*states, plain, LAYERS["window"])
    assert not in_place.is_faster(*states, banded, Layer(0.3, bias=torch.zeros(1, 1, 600, 600)))
    assert not in_place.is_faster(*(each.float() for each in states), banded, Layer(0.3))


def test_tables_of_biases_of_two_slots_do_not_cross(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is room for one table: a forward of two sequences asks for both at once."""
    monkeypatch.setattr(in_place, "LEAST_KEYS", 1)
    monkeypatch.setattr("patches.attention.paged.tables.LEAST_DISTANCES", 1 << 12)
    fields = [{"method": "sandwich"}, {"method": "sandwich", "dim": 64}]
    tokens = torch.randint(3, 90, (2, 40), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    with patched(tiny_model("llama")[1].to(DEVICE, torch.bfloat16)) as patch, torch.no_grad():
        expected = patch.model(tokens, **patch.encoding(fields)).logits
        patch.read_in_place()
        found = patch.model(tokens, **patch.encoding(fields)).logits
        crossed = patch.model(tokens, **patch.encoding(fields[::-1])).logits
    assert (found - expected).abs().mean() < (crossed - expected).abs().mean() / 4, "half precision rounds"
