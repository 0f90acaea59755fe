"""Fused attention against the reference, over shapes, methods, windows and soft caps drawn at random."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from patches import ResolvedRecipe, RopeGeometry, parse, resolve
from patches.attention import fused, reference
from patches.attention.layer import Layer
from patches.attention.log_sum_exp import Attended, add, eager_with_lse, nothing, sdpa_with_lse
from patches.batch.segments import Batch
from patches.encoding.biases import LinearBias
from patches.encoding.masks import CAUSAL, ChunkRange, DistanceRange, LayerMask
from patches.encoding.rotary import upcast
from patches.encoding.temperature import LogLengthTemperature
from patches.methods.biases.alibi import alibi_slopes
from tests.methods import Fields, one_per_shape, rows
from tests.patches.forward import relative

TOLERANCE = {torch.float64: 2e-6, torch.float32: 1e-5, torch.float16: 1.5e-2, torch.bfloat16: 1.2e-1}
"""Fused in a dtype against the reference on the same rounded inputs, relative to the largest output. The reference is
float32, and float64 for that. Tables of cos and sin are float32, which is all that differs in float64.

Half precision: ten to fifteen times the spacing of its numbers at 1. Most of it is rounding of rotated keys; of 3000
drawn cases one reached 0.086 in bfloat16, and one 0.0105 in float16."""

TRAINED, HEAD_DIM, ROTARY_DIM, SCALING = 32, 16, 8, 0.3


def requests(heads: int) -> list[Fields]:
    """The table's requests for a model of this many heads that rotates half of each."""
    return [f for row in rows(ROTARY_DIM // 2, TRAINED, heads) if not row.whole_head for f in row.requests]


REQUESTS = requests(4)
GEOMETRY = RopeGeometry(HEAD_DIM, ROTARY_DIM, 1e4, TRAINED, 64, 4)
SHAPES = [REQUESTS.index(fields) for fields in one_per_shape(REQUESTS, GEOMETRY, 40)]
"""A request of every shape of recipe: routes and their tables distinguish these."""
DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return str(request.param)


@pytest.fixture(params=[None, 7], ids=["one_block", "blocks_of_7"])
def query_block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways through the queries: the block as it is, and one so small that every call has several."""
    if request.param is not None:
        monkeypatch.setattr("patches.attention.blocks.QUERY_BLOCK", request.param)
        for name in ("WORTH_A_CALL", "WORTH_A_CALL_BESIDE_A_VIEW"):
            monkeypatch.setattr(f"patches.attention.blocks.{name}", 5)


@dataclass(frozen=True)
class Case:
    """One segment. Of the keys that were seen, ``dropped`` have left the cache: a window had passed them."""

    new: int
    past: int
    dropped: int
    heads: int
    groups: int
    window: int | None
    softcap: float | None
    request: int
    interleaved: bool
    seed: int
    composed: bool = False
    chunked: bool = False
    sinks: bool = False
    value_width: int = HEAD_DIM

    @property
    def layer(self) -> Layer:
        """The layer's mask, limit and sinks; ``chunked`` makes chunks of the window."""
        own: LayerMask = CAUSAL
        if self.window is not None:
            own = ChunkRange(self.window, 0, 1) if self.chunked else DistanceRange(0, self.window)
        return Layer(SCALING, own, self.softcap, torch.linspace(-1, 3, self.heads) if self.sinks else None)

    @property
    def resolved(self) -> ResolvedRecipe:
        """Of the request; ``composed`` adds all that a recipe can hold at once, whatever its method has of it."""
        geometry = RopeGeometry(HEAD_DIM, ROTARY_DIM, 1e4, TRAINED, 64, self.heads, interleaved=self.interleaved)
        resolved = resolve(parse(requests(self.heads)[self.request]), geometry, self.past + self.new)
        if not self.composed:
            return resolved
        extras = {"score_bias": LinearBias(alibi_slopes(self.heads)), "attention_temperature": LogLengthTemperature(8)}
        return replace(resolved, recipe=replace(resolved.recipe, **extras), attention_factor=1.3)

    def tensors(self, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
        """Query, key, value of two rows. Standard deviation 2, so that attention is far from uniform."""
        generator = torch.Generator().manual_seed(self.seed)
        held = self.past + self.new - self.dropped
        kv_heads = self.heads // self.groups
        shapes = [(self.heads, self.new, HEAD_DIM), (kv_heads, held, HEAD_DIM), (kv_heads, held, self.value_width)]
        return [torch.randn(2, *shape, generator=generator).mul(2).to(device, dtype) for shape in shapes]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    new = draw(st.sampled_from([1, 1, 2, 8, 20, 45]))
    past = draw(st.sampled_from([0, 1, 13, 40]))
    window = draw(st.sampled_from([None, None, 1, 6, 24, 200]))
    chunked = draw(st.booleans())
    droppable = 0 if window is None or chunked else max(0, past - window + 1)
    return Case(
        new=new,
        past=past,
        dropped=draw(st.integers(0, droppable)),
        heads=draw(st.sampled_from([4, 6])),
        groups=draw(st.sampled_from([1, 2])),
        window=window,
        softcap=draw(st.sampled_from([None, None, 2.0])),
        request=draw(st.integers(0, len(REQUESTS) - 1)),
        interleaved=draw(st.booleans()),
        seed=draw(st.integers(0, 100)),
        composed=draw(st.booleans()),
        chunked=chunked,
        sinks=draw(st.integers(0, 3)) == 0,
        value_width=draw(st.sampled_from([HEAD_DIM, HEAD_DIM, 12, 24])),
    )


def check(case: Case, dtype: torch.dtype, device: str) -> None:
    query, key, value = case.tensors(dtype, device)
    layer = case.layer
    if layer.sinks is not None:
        layer = replace(layer, sinks=layer.sinks.to(device, dtype))
    expected = reference.attend(query, key, value, case.resolved, layer, q_start=case.past)
    result = fused.attend(query, key, value, case.resolved, Batch([]), layer, q_start=case.past)
    assert result.dtype == dtype
    assert result.shape == (*query.shape[:-1], case.value_width)
    assert relative(result.to(expected.dtype), expected) < TOLERANCE[dtype]


@pytest.mark.usefixtures("query_block")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_fused_equals_the_reference(dtype: torch.dtype, device: str) -> None:
    @settings(max_examples=100 if dtype == torch.float32 else 40)
    @given(cases())
    def over_cases(case: Case) -> None:
        check(case, dtype, device)

    over_cases()


@pytest.mark.usefixtures("query_block")
@pytest.mark.parametrize("softcap", [None, 2.0], ids=["", "softcap"])
@pytest.mark.parametrize("window", [None, 12], ids=["", "window"])
@pytest.mark.parametrize(("new", "past"), [(40, 0), (15, 25), (1, 39)], ids=["prefill", "chunk", "decode"])
@pytest.mark.parametrize("composed", [False, True], ids=["", "composed"])
def test_every_method_takes_every_route(
    composed: bool, new: int, past: int, window: int | None, softcap: float | None
) -> None:
    """Every request on a plain layer, and every shape of recipe on the others."""
    plain = window is None and softcap is None and not composed
    for request in range(len(REQUESTS)) if plain else SHAPES:
        check(Case(new, past, 0, 4, 2, window, softcap, request, False, 0, composed), torch.float32, "cpu")


def test_layers_share_tables_without_mixing_them_up() -> None:
    """One forward of a model whose layers differ in window and soft cap, on one batch description. Every request meets
    those of its shape in two of the layers."""
    batch = Batch([])
    for request in range(len(REQUESTS)):
        every = itertools.product((1, 15), (20, 30), (None, 8, 18), (None, 2.0))
        layers = every if request in SHAPES else [(1, 20, 8, 2.0), (15, 30, None, None)]
        for new, past, window, softcap in layers:
            case = Case(new, past, 0, 4, 2, window, softcap, request, False, 0)
            tensors = case.tensors(torch.float32, "cpu")
            expected = reference.attend(*tensors, case.resolved, case.layer, q_start=past)
            result = fused.attend(*tensors, case.resolved, batch, case.layer, q_start=past)
            assert relative(result, expected) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(("new", "past", "calls"), [(12, 0, 1), (5, 7, 1), (13, 0, 0), (5, 8, 0)])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "fields",
    [
        {"method": "self_extend", "group_size": 4, "neighbor_window": 12},
        {"method": "rerope", "window": 12},
        {"method": "dual_chunk", "chunk_size": 16, "local_window": 4},
        {"method": "lm_infinite", "n_global": 2, "n_local": 12},
    ],
    ids=str,
)
def test_a_text_within_the_first_band_is_one_call(
    fields: Fields, dtype: torch.dtype, new: int, past: int, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[torch.Size] = []
    ordinary = fused.ordinary
    monkeypatch.setattr(fused, "ordinary", lambda *given: taken.append(given[1].shape) or ordinary(*given))
    resolved, window = resolve(parse(fields), GEOMETRY, past + new), DistanceRange(0, 6)
    for layer, value_width in (Layer(SCALING), HEAD_DIM), (Layer(SCALING), 12), (Layer(SCALING, window), HEAD_DIM):
        tensors = Case(new, past, 0, 4, 2, None, None, 0, False, 0, value_width=value_width).tensors(dtype, "cpu")
        taken.clear()
        expected = reference.attend(*tensors, resolved, layer, q_start=past)
        result = fused.attend(*tensors, resolved, Batch([]), layer, q_start=past)
        assert relative(result.to(expected.dtype), expected) < TOLERANCE[dtype]
        has_kernel = dtype != torch.float64 and value_width == HEAD_DIM
        assert len(taken) == (calls if has_kernel and layer.mask == CAUSAL else 0)


@pytest.mark.parametrize("value_width", [HEAD_DIM, 24])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(("new", "past"), [(15, 25), (2, 1), (8, 40)])
def test_parts_of_a_long_text_need_no_mask(
    new: int, past: int, groups: int, value_width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    masks: list[int] = []
    make = fused._causal_mask
    monkeypatch.setattr(fused, "_causal_mask", lambda states: masks.append(past) or make(states))
    plain = REQUESTS.index({"method": "default"})
    case = Case(new, past, 0, 4, groups, None, None, plain, False, 0, value_width=value_width)
    for most, dtype in itertools.product((past, past + 1), TOLERANCE):  # in two parts, and with a mask
        monkeypatch.setattr(fused, "LONG_CONTEXT", most)
        masks.clear()
        check(case, dtype, "cpu")
        assert len(masks) == (most > past or dtype == torch.float64)


@pytest.mark.parametrize("needed", [0, 1, 2], ids=["query", "key", "value"])
@pytest.mark.parametrize(("new", "past"), [(40, 0), (15, 25)], ids=["prefill", "chunk"])
def test_what_needs_a_gradient_attends_to_the_same_keys(new: int, past: int, needed: int) -> None:
    """The kernels give no gradient of their log-sum-exp; what takes their place must know as well what comes later."""
    for request in range(len(REQUESTS)):
        case = Case(new, past, 0, 4, 2, None, None, request, False, 0)
        tensors = case.tensors(torch.float32, "cpu")
        expected = reference.attend(*tensors, case.resolved, case.layer, q_start=past)
        tensors[needed].requires_grad_()
        result = fused.attend(*tensors, case.resolved, Batch([]), case.layer, q_start=past)
        assert relative(result.detach(), expected) < TOLERANCE[torch.float32]
        result.sum().backward()
        assert tensors[needed].grad is not None


# Log-sum-exp


UNROTATED = {**TOLERANCE, torch.float64: 1e-13}


def merged(parts: list[Attended]) -> torch.Tensor:
    attended = nothing(parts[0][0], parts[0][0].shape[-1])
    for part in parts:
        add(attended, *part)
    return attended[0]


def halves(dtype: torch.dtype, device: str, *, groups: int = 2) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Query, key, value [2, heads, 19 or 37, head_dim] and a causal bias [1, 1, 19, 37]."""
    case = Case(19, 18, 0, 4, groups, None, None, 0, False, 3)
    q_idx, kv_idx = torch.arange(18, 37)[:, None], torch.arange(37)[None]
    bias = torch.zeros(19, 37, dtype=dtype).masked_fill(q_idx < kv_idx, torch.finfo(dtype).min)
    return case.tensors(dtype, device), bias[None, None].to(device)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_two_disjoint_halves_merge_into_one_softmax(dtype: torch.dtype, device: str) -> None:
    (query, key, value), bias = halves(dtype, device)
    whole, _ = eager_with_lse(upcast(query), upcast(key), upcast(value), upcast(bias), SCALING)
    # The last cut leaves some queries without a single key in the second half.
    for cut in (1, 17, 30):
        parts = [
            sdpa_with_lse(query, key[:, :, part], value[:, :, part], bias[..., part], SCALING)
            for part in (slice(0, cut), slice(cut, None))
        ]
        assert relative(merged(parts), whole) < UNROTATED[dtype]
        assert relative(merged(parts[::-1]), whole) < UNROTATED[dtype]


@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_kernel_of_the_device_equals_plain_operations(
    dtype: torch.dtype, groups: int, biased: bool, device: str
) -> None:
    (query, key, value), causal = halves(dtype, device, groups=groups)
    bias = causal if biased else None
    out, lse = sdpa_with_lse(query, key, value, bias, SCALING)
    expected, expected_lse = eager_with_lse(query, key, value, bias, SCALING)
    assert out.dtype == dtype
    assert lse.dtype == (dtype if dtype == torch.float64 else torch.float32)
    assert lse.shape == query.shape[:3]
    assert relative(out.float(), expected.float()) < TOLERANCE[dtype]
    assert relative(lse, expected_lse) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_causal_call_is_one_with_a_causal_bias(dtype: torch.dtype, device: str) -> None:
    (query, key, value), bias = halves(dtype, device)
    last = slice(-query.shape[2], None)  # as many keys as queries
    out, lse = sdpa_with_lse(query, key[:, :, last], value[:, :, last], None, SCALING, causal=True)
    states = upcast(query), upcast(key[:, :, last]), upcast(value[:, :, last])
    expected, expected_lse = eager_with_lse(*states, upcast(bias[..., last]), SCALING)
    plain, plain_lse = eager_with_lse(*states, None, SCALING, causal=True)
    for found, found_lse in ((out, lse), (plain, plain_lse)):
        assert relative(found, expected) < UNROTATED[dtype]
        assert relative(found_lse, expected_lse) < UNROTATED[dtype]


def test_the_merge_survives_scores_that_overflow_an_exponential() -> None:
    (query, key, value), _ = halves(torch.float32, "cpu")
    query = query * 100  # scores of several thousand: exp of any of them is infinite
    parts = [sdpa_with_lse(query, key[:, :, p], value[:, :, p], None, SCALING) for p in (slice(0, 9), slice(9, None))]
    whole, _ = eager_with_lse(query.double(), key.double(), value.double(), None, SCALING)
    assert parts[0][1].abs().max() > 1000
    assert relative(merged(parts), whole.float()) < 1e-4


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_first_part_is_kept_as_it_is(dtype: torch.dtype) -> None:
    out, lse = torch.randn(1, 2, 3, 4).to(dtype), torch.randn(1, 2, 3)
    assert torch.equal(merged([(out, lse)]), upcast(out))
