"""Lists of calls: what is written down, what is refused, and that they give the bits of the forward itself."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from patches import Recordings
from patches.model.recorded import recording
from patches.model.recorded.recording import Logits

Forward = Callable[..., Any]


class Model:
    """A forward that counts its runs, of tokens [rows, n] and weights [n, n]."""

    def __init__(self, compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        self.compute, self.weight, self.runs = compute, torch.randn(4, 4), 0

    def __call__(self, x: torch.Tensor, **_: Any) -> Logits:
        self.runs += 1
        return Logits(self.compute(x, self.weight))


def in_place(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = x @ weight
    y += 1.0
    y[:, 1:3] = y[:, :2].neg()
    y.mul_(0.5)
    y[0].zero_()
    return y


def in_parts(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    first, second = (x @ weight).chunk(2, dim=-1)
    values, indices = second.topk(1)
    return torch.cat([first * values, indices.to(x.dtype), x.mT.sum(0)[:, None], torch.arange(len(x))[:, None]], -1)


def by_shape(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if len(x) > 2:
        return nn.functional.silu(x @ weight.T).reshape(x.shape[0], 2, -1).flatten(1)
    return nn.functional.layer_norm(x, x.shape[-1:])


def by_operators(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = (x @ weight) ** 2 + 2.0**x
    y **= 0.5
    return (1.0 - y) / (3.0 / (1.5 + abs(y))) % 2.0 + (-y // 0.5)


@pytest.mark.parametrize("compute", [in_place, in_parts, by_shape, by_operators])
def test_other_numbers_give_the_bits_of_the_forward(compute: Any) -> None:
    model, failures = Model(compute), list[str]()
    recordings = Recordings(failures.append)
    for rows in (1, 3):
        for seed, use in enumerate(("none", "recorded", "list", "list")):
            x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed))
            found = recordings.run(model, {"x": x.clone(), "use_cache": False})
            assert recordings.use == use
            assert torch.equal(found.logits, compute(x, model.weight))
    assert (model.runs, failures) == (4, [])


def test_a_list_is_for_its_other_arguments_too() -> None:
    model = Model(by_shape)
    recordings, x = Recordings(print), torch.randn(1, 4)
    for _ in range(3):
        recordings.run(model, {"x": x, "use_cache": False})
        recordings.run(model, {"x": x, "use_cache": True})
        recordings.run(model, {"x": x.double(), "use_cache": True})
    assert model.runs == 6


def test_weights_that_change_in_place_are_read_anew() -> None:
    model = Model(in_place)
    recordings, x = Recordings(print), torch.randn(3, 4)
    for _ in range(2):
        recordings.run(model, {"x": x})
    model.weight.add_(1.0)
    assert torch.equal(recordings.run(model, {"x": x}).logits, in_place(x, model.weight))
    assert model.runs == 2


READING: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.flatten().tolist()[0],
    "truth": lambda x: 1.0 if x.sum() > 0 else 0.0,
    "float": lambda x: float(x.sum()),
    "index": lambda x: [1.0, 2.0][(x.sum() > 0).long()],
    "contains": lambda x: float(0.25 in x),
    "numpy": lambda x: float(x.numpy().sum()),
    "mask": lambda x: x[x > 0].sum(),
    "nonzero": lambda x: x.nonzero().sum(),
    "equal": lambda x: float(torch.equal(x, x.neg())),
}


@pytest.mark.parametrize("reads", READING.values(), ids=list(READING))
def test_python_that_reads_numbers_is_refused(reads: Callable[[torch.Tensor], Any]) -> None:
    model, failures = Model(lambda x, weight: x @ weight + reads(x)), list[str]()
    recordings = Recordings(failures.append)
    for seed in range(4):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(recordings.run(model, {"x": x}).logits, model.compute(x, model.weight))
        assert recordings.use == ("failed" if seed else "none")
    assert model.runs == 4
    assert len(failures) == 1
    assert failures[0].startswith("its forward reads numbers of tensors, by ")


def test_a_list_that_cannot_be_made_costs_no_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: object) -> None:
        raise ValueError("no storage")

    monkeypatch.setattr(recording, "tidy", fails)
    model, failures = Model(by_shape), list[str]()
    recordings, x = Recordings(failures.append), torch.randn(1, 4)
    for _ in range(3):
        assert torch.equal(recordings.run(model, {"x": x}).logits, by_shape(x, model.weight))
    assert (recordings.use, model.runs) == ("failed", 3)
    assert failures == ["its list cannot be made: ValueError: no storage"]


def test_calls_of_a_seam_run_as_python() -> None:
    """They may read numbers, and depend on more than their arguments."""
    state = {"factor": 1.0}

    def seam(x: torch.Tensor, *, scale: float) -> tuple[torch.Tensor, None]:
        return x * scale * state["factor"] * x.max().item(), None

    def forward(x: torch.Tensor) -> Logits:
        recorder = recordings.recorder
        called = seam(x, scale=2.0) if recorder is None else recorder.call(seam, x, scale=2.0)
        return Logits(called[0] + 1.0)

    recordings, x = Recordings(print), torch.randn(2, 4)
    for _ in range(2):
        recordings.run(forward, {"x": x})
    state["factor"] = 3.0
    assert torch.equal(recordings.run(forward, {"x": x + 1.0}).logits, seam(x + 1.0, scale=2.0)[0] + 1.0)
    assert recordings.use == "list"


PAST: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a tensor": lambda x: x * 2.0,
    "several": lambda x: torch.cat([2.0 * part for part in x.split(1)]),
    "in place": lambda x: x.mul_(2.0),
}


@pytest.mark.parametrize("compute", PAST.values(), ids=list(PAST))
def test_operations_past_torch_functions_are_refused(compute: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Collective operations of ranks are such, and those of extensions."""

    def past(x: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunction():
            return compute(x)

    failures = list[str]()
    recordings = Recordings(failures.append)
    for number in (1.0, 2.0, 3.0):
        x = torch.full((2, 4), number)
        logits = recordings.run(lambda x: Logits(past(x + 0.0) + 1.0), {"x": x}).logits
        assert torch.equal(logits, x * 2.0 + 1.0)
    (failure,) = failures
    assert failure.startswith("its forward computes past the functions of torch, by ")


def test_a_recording_keeps_nothing_of_a_seam() -> None:
    """Keys and values that a layer gathers may be as large as all of its cache."""
    gathered: list[weakref.ref[torch.Tensor]] = []

    def seam(x: torch.Tensor) -> torch.Tensor:
        keys = x.repeat(100, 1)
        gathered.append(weakref.ref(keys))
        return keys.sum(0, keepdim=True)

    def forward(x: torch.Tensor) -> Logits:
        for _ in range(2):
            assert [each() for each in gathered] == [None] * len(gathered)
            x = x + (seam(x) if recordings.recorder is None else recordings.recorder.call(seam, x))
        return Logits(x)

    recordings = Recordings(print)
    for _ in range(2):
        recordings.run(forward, {"x": torch.ones(2, 4)})
    assert recordings.use == "recorded"


def test_tensors_in_a_dictionary_are_refused() -> None:
    failures = list[str]()
    recordings = Recordings(failures.append)

    def forward(x: torch.Tensor) -> Logits:
        recorder = recordings.recorder
        given = {"y": x * 2.0}
        return Logits(recorder.call(lambda given: given["y"], given) if recorder else given["y"])

    for number in (1.0, 2.0, 3.0):
        x = torch.full((2,), number)
        assert torch.equal(recordings.run(forward, {"x": x}).logits, x * 2.0)
    assert failures == ["its forward hands on tensors in a dictionary"]


def test_the_least_recently_used_list_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "MOST", 2)
    model = Model(by_shape)
    recordings = Recordings(print)
    for rows in (1, 2, 3):  # what has been seen once is recorded when it comes again
        recordings.run(model, {"x": torch.randn(rows, 4)})
    for rows, use in ((1, "recorded"), (2, "recorded"), (1, "list"), (3, "recorded"), (1, "list"), (2, "recorded")):
        recordings.run(model, {"x": torch.randn(rows, 4)})
        assert recordings.use == use


def test_a_forward_that_fails_leaves_no_list() -> None:
    recordings, x = Recordings(print), torch.randn(2, 4)

    def fails(x: torch.Tensor) -> Logits:
        raise RuntimeError(f"out of memory for {len(x)} rows")

    for _ in range(3):
        with pytest.raises(RuntimeError, match="2 rows"):
            recordings.run(fails, {"x": x})
        assert recordings.recorder is None
    model = Model(by_shape)
    assert torch.equal(recordings.run(model, {"x": x}).logits, by_shape(x, model.weight))
