"""Tidied lists have fewer calls and give the same bits, whatever their calls write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from patches import Recordings
from patches.model.recorded.recording import Logits, Recorder, _Checked

MEMORY = torch.randn(3 * 8 * 16, generator=torch.Generator().manual_seed(0))
FIRST, SECOND, THIRD = (part.view(2, 4, 16) for part in MEMORY.split(2 * 4 * 16))
"""Matrices that follow one another in memory."""

ELSEWHERE = torch.randn(2, 4, 16)
GAIN = torch.randn(16)
COLUMNS, EDGES = torch.arange(64), torch.arange(0, 64, 16)
PACKED = torch.ops.mkldnn._reorder_linear_weight(torch.randn(8, 16), 1)


def factor(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(1, 16).t().expand(2, -1, -1)


def views_of_views(x: torch.Tensor) -> torch.Tensor:
    heads = (x * 2.0).view(1, 1, 2, 8).transpose(1, 2)
    return torch.cat((-heads[..., 4:], heads[..., :4]), -1) + heads


def unchanged(x: torch.Tensor) -> torch.Tensor:
    return (x.float() * GAIN.to(torch.float32)).contiguous().to("cpu") + 1.0


def unused(x: torch.Tensor) -> torch.Tensor:
    x.diff().ne(1).cumsum(-1).eq(0).all()
    return x.neg()


def products(x: torch.Tensor) -> torch.Tensor:
    y = x * GAIN
    # not in the order of their addresses; the fourth is not behind the others, and one has another factor
    second, first, third = (torch.bmm(each, factor(y)) for each in (SECOND, FIRST, THIRD))
    other, late = torch.bmm(ELSEWHERE, factor(y)), torch.bmm(FIRST, factor(second.view(1, 8).repeat(1, 2)))
    return torch.cat([second.view(1, 8), first.transpose(0, 1).reshape(1, 8), third.flatten()[None]], 1) @ torch.cat(
        [other, late, first + third], 0
    ).view(24, 1)


def written_between(x: torch.Tensor) -> torch.Tensor:
    y = x * GAIN
    first = torch.bmm(FIRST, factor(y))
    y[:, :8].mul_(2.0)
    return torch.cat([first, torch.bmm(SECOND, factor(y))])


def written_views(x: torch.Tensor) -> torch.Tensor:
    y = (x * GAIN).view(4, 4)
    y[1:3] = y[:2].neg()
    y.t().add_(y.sum())
    y[0].zero_()
    return y.view(16).view(2, 8).mT


def random(x: torch.Tensor) -> torch.Tensor:
    torch.rand(1)
    return x + torch.rand(16)


def in_one_part(x: torch.Tensor) -> torch.Tensor:
    (only,) = (x * 2.0).split(16, dim=-1)
    return only.view(4, 4).t().contiguous().view(16)


def packed(x: torch.Tensor) -> torch.Tensor:
    """Weights in the layout of oneDNN have no memory that torch shows."""
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x * GAIN, PACKED, None, "none", [], "")
    return y.view(2, 4).t().contiguous().view(1, 8)


def repeated(x: torch.Tensor) -> torch.Tensor:
    """The first two are one call. A product with 2.0 has another dtype than one with 2."""
    several = x.expand(4, 16).reshape(-1) + x.expand(4, 16).reshape(-1)
    whole = x.to(torch.int64)
    return several.sum() + (whole * 2).sum() // 3 + (whole * 2.0).sum() / 3 + (whole * 2.5).sum()


def repeated_around_a_write(x: torch.Tensor) -> torch.Tensor:
    y = x * GAIN
    first = y.exp()
    y.mul_(2.0)
    return first + y.exp()


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Two heads of 8 numbers, as Llama rotates them, in two layers. GPT-J has pairs side by side."""
    heads, angles = (x * GAIN).view(1, 2, 1, 8), (x * 3.0)[:, None, None, :8]
    cos, sin = angles.cos(), angles.sin()
    for _ in range(2):
        heads = heads * cos + torch.cat((-heads[..., 4:], heads[..., :4]), dim=-1) * sin
        heads = (heads.transpose(1, 2) * 2.0).transpose(1, 2)
    pairs = torch.stack((-heads[..., 1::2], heads[..., ::2]), -1).flatten(-2)
    return heads * cos + pairs * sin


def not_rotated(x: torch.Tensor) -> torch.Tensor:
    """Halves in their order, of different views, without a sign, and sines that every number has."""
    y, by = x * GAIN, x.exp()
    in_order = torch.cat((-y[..., :8], y[..., 8:]), -1) * by
    different = torch.cat((-in_order[..., 8:], y[..., :8]), -1) * by
    unsigned = torch.cat((y[..., 8:], y[..., :8]), -1) * by
    return in_order + different + unsigned + torch.cat((-y[..., 8:], y[..., :8]), -1) * by[..., :1]


def numbers(x: torch.Tensor) -> torch.Tensor:
    """Numbers for float32, for other dtypes, and for a dtype that the number decides."""
    whole = (x * 4.0).to(torch.int64)
    return x * 0.1 + 1e-6 + (x.bfloat16() * 0.1).float() + whole * 2.5 + (x.double() + 0.1).float()


def multiplied_halves(x: torch.Tensor) -> torch.Tensor:
    """By numbers that no sines are."""
    y = x * GAIN
    halves = torch.cat((-y[..., 8:], y[..., :8]), dim=-1)
    return halves * 0.5 + halves * y.sum() + torch.cat(dim=-1, tensors=(-y[..., 8:], y[..., :8])) * y


def normed_twice(x: torch.Tensor) -> torch.Tensor:
    """Two layers read one input, each with its own weights."""
    y = x * GAIN
    one, two = (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6) for _ in range(2))
    return one * GAIN + two + 0.0 * (x + -0.0)


def strided_input(x: torch.Tensor) -> torch.Tensor:
    """An input may begin in the middle of its memory, and its view where the memory begins."""
    return of_columns(FIRST, torch.as_strided(x, (4, 16), (0, 1), 0).reshape(-1))


def sums(x: torch.Tensor) -> torch.Tensor:
    """Sums of columns, each times a number: of one row, of two at once, and of one behind them."""
    one, two = (each.expand(4, 16).reshape(-1) for each in (x * 2.0, x * GAIN))
    both = of_columns(FIRST, one) + of_columns(SECOND, two) + of_columns(THIRD, one)
    later = (both.view(1, 16) * GAIN).reshape(1, 16)
    return of_columns(FIRST, later.expand(4, 16).reshape(-1)) + later.expand(2, 16).reshape(-1)[8:24].view(4, 4)


def of_columns(weight: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    rows = weight.flatten()[:64].view(16, 4).repeat(4, 1)
    return torch.embedding_bag(rows, COLUMNS, EDGES, False, 0, False, factors)[0]


COMPUTE: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int]] = {
    "views of views": (views_of_views, 7),
    "unchanged": (unchanged, 2),
    "unused": (unused, 1),
    "products": (products, 20),
    "written between": (written_between, 8),
    "written views": (written_views, 12),
    "random": (random, 3),
    "in one part": (in_one_part, 6),
    "packed": (packed, 5),
    "repeated": (repeated, 16),
    "repeated around a write": (repeated_around_a_write, 5),
    "rotated": (rotated, 29),
    "not rotated": (not_rotated, 20),
    "numbers": (numbers, 14),
    "sums": (sums, 24),
    "multiplied halves": (multiplied_halves, 12),
    "normed twice": (normed_twice, 11),
}


def recorded(compute: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> tuple[Recorder, Callable[..., Any]]:
    recorder = Recorder((x,))
    with recorder, _Checked(recorder):
        output = compute(x)
    function, constants = recorder.finished(output)
    assert recorder.refused is None
    return recorder, lambda given: function(given, *constants)


def targets(recorder: Recorder) -> list[str]:
    return [node.target.__name__ for node in recorder.calls.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(("compute", "most"), COMPUTE.values(), ids=COMPUTE)
def test_fewer_calls_give_the_same_bits(compute: Any, most: int, inference: bool) -> None:
    with torch.inference_mode(inference), torch.no_grad():
        recorder, function = recorded(compute, torch.randn(1, 16))
        for seed in range(3):
            x = torch.randn(1, 16, generator=torch.Generator().manual_seed(seed))
            torch.manual_seed(seed)
            expected = compute(x.clone())
            torch.manual_seed(seed)
            found = function(x.clone())
            assert torch.equal(found, expected)
            assert found.stride() == expected.stride()
    assert len(targets(recorder)) <= most


def test_quantized_weights_are_constants_without_memory_of_their_own() -> None:
    """torchao's tensors wrap those with the numbers, and have no address that torch shows."""
    quantization = pytest.importorskip("torchao.quantization")
    layer = nn.Sequential(nn.Linear(16, 8, bias=False))
    quantization.quantize_(layer, quantization.Int8WeightOnlyConfig(set_inductor_config=False))

    def compute(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = layer((x * GAIN).view(1, 16))
        return y.view(2, 4).t().contiguous().view(1, 8)

    with torch.inference_mode():
        _, function = recorded(compute, torch.randn(1, 16))
        x = torch.randn(1, 16)
        assert torch.equal(function(x), compute(x))


def test_products_of_matrices_in_a_row_are_one() -> None:
    recorder, _ = recorded(products, torch.randn(1, 16))
    assert targets(recorder).count("bmm") == 3  # the joined one, that of a matrix elsewhere, that of another factor


def test_calls_with_equal_arguments_are_one() -> None:
    recorder, _ = recorded(repeated, torch.randn(1, 16))
    names = targets(recorder)
    assert (names.count("reshape"), names.count("mul")) == (1, 3)


def test_nothing_is_joined_past_a_write() -> None:
    recorder, _ = recorded(written_between, torch.randn(1, 16))
    assert targets(recorder).count("bmm") == 2


def test_weights_that_change_in_place_are_read_anew() -> None:
    layer = nn.Linear(16, 8)
    layer.weight.requires_grad_(False)

    def compute(x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(layer.weight.view(2, 4, 16), factor(x * 1.0)).view(1, 8)

    x = torch.randn(1, 16)
    _, function = recorded(compute, x)
    layer.weight.mul_(2.0)
    assert torch.equal(function(x), compute(x))


def test_inputs_and_outputs_of_seams_may_have_other_strides() -> None:
    transposed = False

    def seam(x: torch.Tensor) -> torch.Tensor:
        y = x.view(4, 4) * 2.0
        return y.t().contiguous().t() if transposed else y

    def forward(x: torch.Tensor) -> Logits:
        recorder = recordings.recorder
        y = (seam(x) if recorder is None else recorder.call(seam, x)) + 1.0
        return Logits((y * 3.0).view(2, 2, 4).transpose(0, 1))

    recordings = Recordings(print)
    for transposed in (False, False, True, True):  # noqa: B007 - the seam reads it
        x = torch.randn(16)
        assert torch.equal(
            recordings.run(forward, {"x": x}).logits, ((x.view(4, 4) * 2 + 1) * 3).view(2, 2, 4).mT.mT.transpose(0, 1)
        )
    spread = torch.randn(32)[::2]
    found = recordings.run(forward, {"x": spread})
    assert recordings.use == "none"
    assert found.logits.shape == (2, 2, 4)


def test_halves_rotate_in_one_call() -> None:
    recorder, _ = recorded(rotated, torch.randn(1, 16))
    names = targets(recorder)
    assert (names.count("roll"), names.count("_with_signs"), names.count("cat")) == (2, 1, 0)
    recorder, _ = recorded(not_rotated, torch.randn(1, 16))
    assert targets(recorder).count("cat") == 4


def test_numbers_of_float32_become_tensors() -> None:
    recorder, _ = recorded(numbers, torch.randn(1, 16))
    given = [node.args[1] for node in recorder.calls.graph.nodes if node.target in (torch.Tensor.add, torch.Tensor.mul)]
    assert [arg for arg in given if isinstance(arg, float)] == [0.1, 0.1], "those of bfloat16 and float64"


def test_repeated_rows_take_turns_in_memory_of_the_list() -> None:
    """Two are read at once, and the third one behind them. Rows that are not for sums have new memory."""
    recorder, _ = recorded(sums, torch.randn(1, 16))
    copies = [node for node in recorder.calls.graph.nodes if getattr(node.target, "__name__", "") == "_copied"]
    assert len(copies) == 3
    assert len({node.args[0] for node in copies}) == 2
    recorder, _ = recorded(repeated, torch.randn(1, 16))
    assert "_copied" not in targets(recorder)


def test_an_input_begins_anywhere_in_its_memory() -> None:
    memory = torch.randn(48)
    recorder, function = recorded(strided_input, memory[16:32].view(1, 16))
    for start in (0, 16, 32):
        x = memory[start : start + 16].view(1, 16)
        assert torch.equal(function(x), strided_input(x))
    assert "_copied" not in targets(recorder)


@pytest.mark.parametrize("start", [0, 16])
def test_views_of_a_seams_output_are_one(start: int) -> None:
    """The output may be a part of larger memory, and begin elsewhere in each run."""
    memory, begins = torch.randn(64), [start]

    def compute(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = recorder.call(lambda given: memory[begins[0] :][:16].view(given.shape), x)
        heads = out.view(1, 1, 2, 8).transpose(1, 2)
        return heads.reshape(1, 16).expand(4, 16).reshape(-1) + heads[:, 1:].reshape(8).repeat(8)

    x = torch.randn(1, 16)
    recorder = Recorder((x,))
    with recorder, _Checked(recorder):
        output = compute(x)
    function, constants = recorder.finished(output)
    for begins[0] in (start, 0, 32):
        own = memory[begins[0] :][:16]
        assert torch.equal(function(x, *constants), own.repeat(4) + own[8:].repeat(8))
    assert targets(recorder).count("as_strided") >= 1
