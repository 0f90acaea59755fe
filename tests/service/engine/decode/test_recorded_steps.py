"""Decode steps from lists of calls: the tokens and log-probabilities of ordinary steps, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from patches import Patched, parse, patched
from service.engine.choice import PAGED
from service.engine.request import EngineRequest
from service.engine.verification import verify
from service.models.checkpoint.quantization import quantize
from service.models.linear.layers import UNBOUNDED, ChosenLinear, replace
from service.models.linear.packing import by_packed, by_sums, pack
from service.models.linear.products import Product, by_columns, by_groups, by_onednn, has_onednn, products_by
from service.models.memory import huge_pages
from tests.models import OTHER_FAMILIES, VOCAB_SIZE, by_tier, every_family, tiny_model
from tests.patches.model.architectures.test_other_families import FAMILY, REQUESTS
from tests.service.engine.adapter.test_paged_attention import LIMITS, requests_of

PROMPTS = [torch.randint(3, VOCAB_SIZE, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (5, 9, 13)]
METHODS: list[Any] = [{"method": "default"}, {"method": "alibi"}, {"method": "self_extend", "group_size": 2}]
READS_PADDING = "gpt2"
"""Each forward of it looks for padding in the tokens, to warn of it."""


def generated(patch: Patched, fields: list[Any], *, recorded: bool) -> tuple[list[EngineRequest], list[str], Any]:
    requests = requests_of(patch, [parse(each) for each in fields], PROMPTS[: len(fields)])
    steps: list[str] = []
    engine = (PAGED if recorded else PAGED.slower).built(patch, LIMITS, lambda use, _: steps.append(use))
    tokens = engine.run_to_end(requests)
    return requests, steps, tokens


@every_family
def test_tokens_of_every_family(family: str) -> None:
    check(tiny_model(family)[1], METHODS)


@pytest.mark.parametrize("name", by_tier(name for name in OTHER_FAMILIES if name != READS_PADDING))
def test_tokens_of_families_with_seams_of_their_own(name: str) -> None:
    check(tiny_model(name)[1], REQUESTS[FAMILY[name]][:3])


def use(model: nn.Module, product: Product) -> None:
    linears = [module for module in model.modules() if type(module) is nn.Linear and product in products_by(module)]
    if not linears:
        pytest.skip("this torch has no such product")
    replace(model, {linear: ChosenLinear(linear, ((UNBOUNDED, product),)) for linear in linears})


PRODUCTS = {product.__name__: partial(use, product=product) for product in (by_groups, by_columns, by_onednn)}


def pack_all(model: nn.Module) -> None:
    if not has_onednn(torch.float32):
        pytest.skip("this torch has no oneDNN")
    packed: dict[nn.Linear, nn.Linear] = {}
    for linear in [module for module in model.modules() if type(module) is nn.Linear]:
        weight = pack(linear.weight.detach())
        if weight is not None:  # those of keys and values have 32 outputs
            linear.weight = nn.Parameter(weight, requires_grad=False)
            packed[linear] = ChosenLinear(linear, ((1, by_sums), (UNBOUNDED, by_packed)))
    assert len(packed) == 1 + 5 * model.config.num_hidden_layers  # type: ignore[operator]
    replace(model, packed)


def in_int4(model: nn.Module) -> None:
    pytest.importorskip("torchao")
    quantize(model, "int4", torch.device("cpu"))


@pytest.mark.parametrize("change", [*PRODUCTS.values(), pack_all, in_int4], ids=[*PRODUCTS, "packed", "int4"])
@pytest.mark.parametrize("requests", [1, 3])
def test_tokens_of_other_products(change: Callable[[nn.Module], None], requests: int) -> None:
    model = tiny_model("llama", hidden_size=256, intermediate_size=256)[1]
    huge_pages.move(model)  # the weights of a layer follow one another
    change(model)
    check(model, METHODS[:requests])


def check(model: PreTrainedModel, fields: list[Any]) -> None:
    with patched(model) as patch:
        requests, steps, tokens = generated(patch, fields, recorded=True)
        ordinary, _, expected = generated(patch, fields, recorded=False)
    assert "list" in steps
    assert tokens == expected
    assert [request.logprobs for request in requests] == [request.logprobs for request in ordinary]


def test_a_model_that_reads_numbers_has_ordinary_steps_and_the_reason() -> None:
    with patched(tiny_model(READS_PADDING)[1]) as patch:
        choice = verify(patch)
    assert (choice.kind, choice.recorded) == ("paged", False)
    assert "cannot record its decode steps: its forward reads numbers of tensors" in str(choice.reason)


def test_a_number_that_python_counts_is_caught_at_start_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list would repeat the number of its first step for ever."""
    model = tiny_model("llama")[1]
    layer = model.model.layers[0].mlp
    forward = layer.forward

    def counted(x: torch.Tensor) -> torch.Tensor:
        return forward(x) * (1.0 + model.count / 4 if x.shape[1] == 1 else 1.0)

    with patched(model) as patch:
        model.count = 0
        assert verify(patch) == PAGED
        monkeypatch.setattr(layer, "forward", counted)
        model.register_forward_pre_hook(lambda *_: setattr(model, "count", (model.count + 1) % 3))
        choice = verify(patch)
    assert not choice.recorded
    assert "does not compute what its own forward computes" in str(choice.reason)
