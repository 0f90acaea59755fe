"""Linear layers with the fastest products: which product has which rows, and the served model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from structlog.testing import CapturingLogger
from torch import nn

from service.cli.server import local_server
from service.models import start
from service.models.checkpoint import loading
from service.models.checkpoint.fingerprint import contents, fingerprint
from service.models.checkpoint.loading import DEMO
from service.models.linear import known, layers
from service.models.linear.layers import EDGES, UNBOUNDED, ChosenLinear, products_of, replace, undo, use_fastest
from service.models.linear.packing import PackedWeight, by_packed, by_sums
from service.models.linear.products import Product, by_columns, by_groups, by_onednn, has_onednn, plain, products_by
from service.models.linear.samples import Sample
from service.settings import Settings
from tests.models import tiny_model, tiny_tokens
from tests.service.conftest import tiny_checkpoint

pytestmark = pytest.mark.skipif(
    len(products_by(nn.Linear(512, 192))) < 4, reason="this torch lacks MKL or oneDNN, so it has fewer products"
)

ALL = ((1, by_groups), (4, by_columns), (UNBOUNDED, by_onednn))


def layer(bias: bool = False) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(512, 192, bias=bias).requires_grad_(False)


def use(model: nn.Module, choice: known.Choice) -> None:
    """``use_fastest``, as if these products were the fastest."""
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    replace(model, {each: ChosenLinear(each, choice) for each in linears if len(products_by(each)) > 1})


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(0, 512), (2, 0, 512), (1, 512), (2, 2, 512), (9, 512)], ids=str)
def test_a_layer_gives_the_products_of_its_weight(shape: tuple[int, ...], bias: bool) -> None:
    linear, x = layer(bias), torch.randn(shape)
    with torch.no_grad():
        torch.testing.assert_close(ChosenLinear(linear, ALL)(x), linear(x), rtol=0, atol=3e-6)


def test_each_number_of_rows_has_its_product() -> None:
    seen: list[tuple[str, int]] = []

    def counted(name: str) -> Any:
        return lambda linear, x: (seen.append((name, len(x))), plain(linear, x))[1]

    linear = ChosenLinear(layer(), ((1, counted("one")), (4, counted("few")), (UNBOUNDED, counted("more"))))
    with torch.no_grad():
        for rows in (0, 1, 2, 4, 5, 1000):
            linear(torch.randn(rows, 512))
    assert seen == [("one", 1), ("few", 2), ("few", 4), ("more", 5), ("more", 1000)]


def test_where_gradients_are_on_the_layer_is_plain() -> None:
    linear, x = layer().requires_grad_(True), torch.randn(3, 512)
    expected = torch.autograd.grad(linear(x).square().sum(), linear.weight)[0]
    found = torch.autograd.grad(ChosenLinear(linear, ALL)(x).square().sum(), linear.weight)[0]
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("product", [by_columns, by_groups, by_onednn])
def test_under_autocast_the_layer_is_plain(product: Product, dtype: torch.dtype) -> None:
    linear, x = layer(bias=True), torch.randn(3, 512, dtype=dtype)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found, expected = ChosenLinear(linear, ((UNBOUNDED, product),))(x), linear(x)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected)


def decide(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[Product, int], float]) -> list[tuple[int, int]]:
    """Products have these ``seconds`` from here on. Returns (layers, rows) of each timing."""
    asked: list[tuple[int, int]] = []

    class Timed(Sample):
        def times(self, rows: int, of_plain: Sequence[Product], of_packed: Sequence[Product]) -> list[float]:
            asked.append((len(self.plain), rows))
            return [seconds(product, rows) for product in (*of_plain, *of_packed)]

    monkeypatch.setattr(layers, "Sample", Timed)
    monkeypatch.setattr(known, "_settled", {})
    return asked


def plain_is_better(product: Product, rows: int) -> float:
    return 3.0 if product in (by_packed, by_sums) else 2.0


def test_the_processor_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once in a process: for layers of a shape that exceed a core's cache, and for the others together."""
    fast = {1: by_groups, 2: by_columns, 4: by_columns}
    asked = decide(monkeypatch, lambda product, rows: 1.0 if product is fast.get(rows, plain) else 2.0)
    monkeypatch.setattr(layers, "BYTES", 2 * layer().weight.nbytes)
    model = nn.Sequential(layer(), layer(), nn.Linear(512, 128), nn.Linear(512, 64), nn.Linear(64, 64))
    use_fastest(model)
    assert [type(each) for each in model] == [ChosenLinear] * 3 + [nn.Linear] * 2
    assert products_of(model) == [
        "128x512: by_groups up to 1, by_columns up to 4, plain",
        "192x512: by_groups up to 1, by_columns up to 4, plain",
    ]
    rows = [rows for rows, _ in EDGES.values()]
    assert asked == [*((2, each) for each in rows[:4]), (1, rows[4]), *((1, each) for each in rows)]
    use_fastest(nn.Sequential(layer(), layer()))
    assert len(asked) == 2 * len(rows)


@pytest.mark.parametrize(
    ("slow_rows", "times_as_long", "packed"),
    [((), 1.0, True), ((1, 16), 1.4, False), ((1, 16), 1.2, True), ((256,), 100.0, True), ((2,), 1.6, True)],
)
def test_weights_are_packed_unless_that_is_slower(
    slow_rows: tuple[int, ...], times_as_long: float, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mean over the numbers of rows decides. A single one decides nothing."""
    of_packed = (by_packed, by_sums)
    decide(
        monkeypatch,
        lambda product, rows: times_as_long if rows in slow_rows and product in of_packed else 1.0,
    )
    model = nn.Sequential(layer())
    use_fastest(model)
    assert isinstance(model[0].weight, PackedWeight) == packed


@pytest.mark.parametrize(
    ("of_sums", "products"),
    [(1.05, "by_sums up to 1, by_packed"), (1.2, "by_packed"), (0.5, "by_sums up to 1, by_packed")],
)
def test_packed_weights_have_the_faster_of_their_products(
    of_sums: float, products: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decide(monkeypatch, lambda product, rows: of_sums if product is by_sums else 1.0)
    model = nn.Sequential(layer())
    use_fastest(model)
    assert products_of(model) == [f"192x512: {products}"]


def test_half_precision_has_no_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_onednn(torch.bfloat16):
        pytest.skip("this processor has no products of bfloat16")
    decide(monkeypatch, lambda product, rows: 1.0)
    model = nn.Sequential(layer().to(torch.bfloat16))
    use_fastest(model)
    assert products_of(model) == ["192x512: by_packed"]


def test_layers_that_an_adapter_changes_have_the_products_of_its_base(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are some of the base's layers. Timed alone, they could have others."""
    asked = decide(monkeypatch, lambda product, rows: 1.0)
    use_fastest(nn.Sequential(layer(), nn.Linear(512, 128), nn.Linear(512, 64)))
    before = list(asked)
    use_fastest(nn.Sequential(layer()))
    assert asked == before


def test_numbers_of_each_format_are_timed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums serve float32 only. Some models keep a few layers in it beside bfloat16."""
    if not has_onednn(torch.bfloat16):
        pytest.skip("this processor has no products of bfloat16")
    decide(monkeypatch, lambda product, rows: 0.5 if product is by_sums else 1.0)
    model = nn.Sequential(layer(), layer().to(torch.bfloat16))
    use_fastest(model)
    assert [each.choice[0][1] for each in model] == [by_sums, by_packed]


def test_a_layer_that_cannot_be_packed_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    decide(monkeypatch, lambda product, rows: 1.0)
    model = nn.Sequential(nn.Linear(768, 96).requires_grad_(False), nn.Linear(512, 1000).requires_grad_(False))
    use_fastest(model)
    assert [isinstance(each.weight, PackedWeight) for each in model] == [False, True]


def test_shared_weights_stay_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """An embedding reads rows. A layer with two names is one layer."""
    decide(monkeypatch, lambda product, rows: 1.0 if product in (by_packed, by_onednn) else 2.0)
    one, tied = layer(), layer()
    embedding = nn.Embedding(192, 512)
    embedding.weight = tied.weight
    model = nn.ModuleDict({"one": one, "two": one, "tied": tied, "embedding": embedding})
    use_fastest(model)
    assert model["one"] is model["two"]
    assert isinstance(model["one"].weight, PackedWeight)
    assert model["tied"].weight is embedding.weight
    assert model["tied"].choice[-1][1] is by_onednn


@pytest.mark.parametrize(
    ("rooms", "packed"), [((2, 2), [True, True]), ((2, 1.9), [True, False]), ((1.9, 9), [False] * 2)]
)
def test_without_memory_weights_stay_plain(
    rooms: tuple[float, float], packed: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A packed weight lies beside the plain one and a copy for a moment. A file's pages may be all that there is."""
    decide(monkeypatch, lambda product, rows: 1.0)
    left = iter(rooms)
    monkeypatch.setattr(layers, "available_bytes", lambda: next(left) * layer().weight.nbytes)
    log = CapturingLogger()
    monkeypatch.setattr(layers, "log", log)
    model = nn.Sequential(layer(), layer())
    use_fastest(model)
    assert [isinstance(each.weight, PackedWeight) for each in model] == packed
    warned = [] if all(packed) else [("warning", ("weights_not_packed",), {"bytes": 192 * 512 * 4})]
    assert [tuple(call) for call in log.calls] == warned


class Reading(nn.Module):
    """As transformers' Mamba multiplies by the weight of ``dt_proj``."""

    def __init__(self) -> None:
        super().__init__()
        self.dt_proj, self.out_proj = layer(), layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dt_proj.weight @ x.to(self.out_proj.weight.dtype)


def test_weights_that_another_module_reads_stay_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    decide(monkeypatch, lambda product, rows: 1.0)
    model = Reading()
    use_fastest(model)
    assert not isinstance(model.dt_proj.weight, PackedWeight)
    assert isinstance(model.out_proj.weight, PackedWeight)
    made_of_nothing = type("Sourceless", (nn.Module,), {})()
    made_of_nothing.one = layer()
    use_fastest(made_of_nothing)
    assert isinstance(made_of_nothing.one.weight, PackedWeight)


def test_layers_are_as_before_when_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    decide(monkeypatch, lambda product, rows: 1.0)
    model = nn.Sequential(layer(bias=True), layer(), layer())
    weights = [each.weight.clone() for each in model]
    use_fastest(model)
    undo(model, lambda name: name != "1")
    assert [type(each) for each in model] == [nn.Linear, ChosenLinear, nn.Linear]
    assert [isinstance(each.weight, PackedWeight) for each in model] == [False, True, False]
    assert all(torch.equal(each.weight.clone(), weight) for each, weight in zip(model, weights, strict=True))
    assert (model[0].bias is None, model[2].bias is None) == (False, True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bfloat16_has_few_kernels(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """``F.linear`` is oneDNN's too then, and keeps a kernel for each number of rows."""
    if not has_onednn(dtype):
        pytest.skip(f"this processor has no products of {dtype}")
    decide(monkeypatch, plain_is_better)
    choice = layers._choices([layer().to(dtype)]).plain
    many = plain if dtype == torch.float32 else by_onednn
    assert [product for _, product in choice] == [plain, plain, plain, many, many]


@pytest.mark.parametrize("change", ["hook", "pre_hook", "forward"])
def test_a_changed_layer_stays(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decide(monkeypatch, lambda product, rows: 1.0)
    model = nn.Sequential(layer(), layer())
    if change == "forward":
        model[0].forward = model[0].forward
    else:
        register = model[0].register_forward_hook if change == "hook" else model[0].register_forward_pre_hook
        register(lambda *_: None)
    use_fastest(model)
    assert [type(each) for each in model] == [nn.Linear, ChosenLinear]


def test_a_model_whose_products_are_the_fastest_keeps_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    decide(monkeypatch, plain_is_better)
    model = nn.Sequential(layer())
    use_fastest(model)
    assert type(model[0]) is nn.Linear
    assert products_of(model) == []


def test_a_model_keeps_its_parameters() -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 640}
    _, model = tiny_model("llama", tie_word_embeddings=True, **sizes)
    before, ids = dict(model.named_parameters()), tiny_tokens(2, 40)
    with torch.no_grad():
        logits, one = model(ids).logits, model(ids[:1, :1]).logits
        use(model, ALL)
        torch.testing.assert_close(model(ids).logits, logits, rtol=0, atol=1e-5)
        torch.testing.assert_close(model(ids[:1, :1]).logits, one, rtol=0, atol=3e-6)
    after = dict(model.named_parameters())
    assert {name: id(each) for name, each in after.items()} == {name: id(each) for name, each in before.items()}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert isinstance(model.lm_head, ChosenLinear)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_products_are_in_the_fingerprint(dtype: torch.dtype) -> None:
    model = tiny_model("llama", hidden_size=256, intermediate_size=512, vocab_size=640)[1].to(dtype)
    before = fingerprint(model), contents(model)
    use(model, ALL)
    assert products_of(model)
    assert contents(model) == before[1]
    assert fingerprint(model) != before[0], "outcomes of plain products are not its own"


def test_choices_of_an_earlier_start_hold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Other times would choose others. Timed anew, they replace the kept ones for later starts too."""
    folder = tiny_checkpoint(tmp_path / "model", hidden_size=256, intermediate_size=512)
    database_url = f"sqlite:///{tmp_path / 'jobs.db'}"

    def start_with(fastest: Product, **fields: Any) -> list[str]:
        decide(monkeypatch, lambda product, rows: 1.0 if product is fastest else 2.0)
        given = Settings(_env_file=None, model=str(folder), cache_tokens=256, database_url=database_url, **fields)
        with local_server(given) as url:
            products: list[str] = httpx.get(f"{url}/models").json()["models"][0]["products"]
        return products

    first = start_with(by_columns)
    assert "512x256: plain up to 1, by_columns up to 4, plain" in first
    assert start_with(plain) == first
    assert start_with(plain, time_products=True) == []
    assert start_with(by_columns) == []


def test_the_demo_model_is_served_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """One stream decodes one row per step; its tokens are those of four streams, whose products are others."""
    monkeypatch.setattr(loading, "use_fastest", lambda model: use(model, ALL))
    monkeypatch.setattr(start, "use_fastest", lambda model: None)
    settings = Settings(_env_file=None, device="cpu", cache_tokens=2048, model=str(DEMO / "ropeway-demo"))
    prompt = list(range(5, 60))
    with local_server(settings) as url:
        found = httpx.get(f"{url}/models").json()["models"][0]["products"]
        assert "192x448: by_groups up to 1, by_columns up to 4, by_onednn" in found
        alone, among = (
            httpx.post(f"{url}/generate", json={"prompt": prompts, "max_new_tokens": 24}, timeout=60).json()
            for prompts in (prompt, [prompt, *(list(range(n, n + 30)) for n in (7, 90, 200))])
        )
    assert alone["results"][0]["token_ids"] == among["results"][0]["token_ids"]
