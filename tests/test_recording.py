"""The recorder behaves as CUDA graphs do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.recording import NotCapturable, Recorder


def test_a_replay_reads_and_writes_the_same_tensors() -> None:
    given, result = torch.arange(4.0), torch.zeros(2)

    def run() -> None:
        halves = (given * 2).view(2, 2)
        halves[1] += given[:2]
        result.copy_(halves.sum(1))

    graph = Recorder()(run)
    assert result.tolist() == [2.0, 11.0]
    given.copy_(torch.tensor([1.0, 1.0, 5.0, 0.0]))
    graph.replay()
    assert result.tolist() == [4.0, 12.0]


def test_a_number_of_python_stays_in_the_graph() -> None:
    """So a step that bakes one in has the tokens of another step."""
    given, result, numbers = torch.ones(2), torch.zeros(2), [3.0]
    graph = Recorder()(lambda: result.copy_(given * numbers[0]))  # type: ignore[arg-type,return-value]
    numbers[0] = 5.0
    graph.replay()
    assert result.tolist() == [3.0, 3.0]


@pytest.mark.parametrize(
    "run",
    [
        lambda x: x.sum().item(),
        lambda x: bool((x > 0).all()),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x + torch.tensor([1.0, 2.0]),
        lambda x: x.unique(),
    ],
)
def test_what_waits_for_the_device_is_refused(run: Callable[[torch.Tensor], object]) -> None:
    with pytest.raises(NotCapturable):
        Recorder()(lambda: run(torch.ones(2)))  # type: ignore[arg-type,return-value]


def test_a_single_number_of_the_host_is_a_constant() -> None:
    result = torch.zeros(2)
    Recorder()(lambda: result.copy_(torch.ones(2) * torch.tensor(2.0))).replay()  # type: ignore[arg-type,return-value]
    assert result.tolist() == [2.0, 2.0]
