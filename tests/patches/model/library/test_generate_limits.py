"""Ways to generate and to run that a patched model refuses, and threads that still generate when the patch ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from transformers import PreTrainedModel

from patches import Patched, UnsupportedModel, patched
from patches.model import generation
from tests.models import tiny_model, tiny_tokens

OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "min_new_tokens": 12}


def leaving(model: PreTrainedModel) -> Callable[[], bool]:
    """A function that is true as soon as another thread leaves the patch of ``model``."""
    calls = vars(model)["generate"].args[0]
    return lambda: calls._leaving


def wait(until: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60
    while not until():
        assert time.monotonic() < limit
        time.sleep(0.005)


class Paused:
    """A streamer that waits behind its third token ``until`` it goes on, and a thread that generates for it."""

    def __init__(self, call: Callable[..., Any], until: Callable[[], bool]) -> None:
        self.tokens, self.error, self.until = 0, "", until
        self.reached = threading.Event()
        self.thread = threading.Thread(target=self._run, args=(call,))
        self.thread.start()
        assert self.reached.wait(60), self.error

    def put(self, _: torch.Tensor) -> None:
        self.tokens += 1
        if self.tokens == 4:  # the first is the prompt
            self.reached.set()
            wait(self.until)

    def end(self) -> None:
        pass

    def _run(self, call: Callable[..., Any]) -> None:
        try:
            call(tiny_tokens(1, 9), streamer=self, **OPTIONS)
        except Exception as error:
            self.error = str(error)
            self.reached.set()


@pytest.mark.parametrize("chosen", ["self_extend", None])
def test_leaving_stops_a_call_on_another_thread(chosen: str | None, llama: PreTrainedModel) -> None:
    with ExitStack() as block:
        patch = block.enter_context(patched(llama))
        encoding = patch.encoding(chosen) if chosen else {}
        paused = Paused(lambda *args, **options: llama.generate(*args, **options, **encoding), leaving(llama))
        with pytest.raises(RuntimeError, match="generate still ran on another thread, and stops there now: join its"):
            block.close()
    paused.thread.join(60)
    assert "the patch of the model was left before the call ended; join its thread inside" in paused.error
    assert paused.tokens == 4, "no token of the restored model"
    assert "generate" not in vars(llama)


@pytest.mark.parametrize("way", ["held up by its streamer", "reads no processors"])
def test_a_call_that_does_not_stop_in_time_fails(
    way: str, llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "LONGEST_WAIT", 0.1)
    goes = threading.Event()
    with ExitStack() as block:
        patch = block.enter_context(patched(llama))
        encoding = patch.encoding("yarn:4")

        def call(tokens: torch.Tensor, streamer: Paused, **options: Any) -> None:
            def custom(_: PreTrainedModel, input_ids: torch.Tensor, **__: Any) -> torch.Tensor:
                for _ in range(4):
                    streamer.put(input_ids)
                return input_ids

            more = {"streamer": streamer} if way == "held up by its streamer" else {"custom_generate": custom}
            llama.generate(tokens, **more, **options, **encoding)

        paused = Paused(call, goes.is_set)
        with pytest.raises(RuntimeError, match="generate still ran on another thread"):
            block.close()
    goes.set()
    paused.thread.join(60)
    assert "the patch of the model was left before the call ended" in paused.error


def test_an_exception_under_way_is_not_hidden(llama: PreTrainedModel) -> None:
    started: list[Paused] = []

    def fail() -> None:
        with patched(llama):
            started.append(Paused(llama.generate, leaving(llama)))
            raise KeyError("of the block")

    with pytest.raises(KeyError, match="of the block"):
        fail()
    started[0].thread.join(60)
    assert "the patch of the model was left" in started[0].error


def test_a_call_with_its_last_token_ends_as_ever(llama: PreTrainedModel) -> None:
    """A reader of a streamer sees the end before the call returns."""
    found: list[torch.Tensor] = []
    with patched(llama) as patch:
        encoding = patch.encoding("self_extend")
        expected = llama.generate(tiny_tokens(1, 9), **OPTIONS, **encoding)
        ends, until = threading.Event(), leaving(llama)

        class Ending:
            def put(self, _: torch.Tensor) -> None:
                pass

            def end(self) -> None:
                ends.set()
                wait(until)

        def call() -> None:
            found.append(llama.generate(tiny_tokens(1, 9), streamer=Ending(), **OPTIONS, **encoding))

        thread = threading.Thread(target=call)
        thread.start()
        assert ends.wait(60)
    thread.join(60)
    assert torch.equal(found[0], expected)


def test_generate_of_a_patch_that_was_left(llama: PreTrainedModel) -> None:
    with patched(llama):
        kept = llama.generate
    with pytest.raises(RuntimeError, match="the patch of the model was left"):
        kept(tiny_tokens(1, 9), **OPTIONS)
    assert llama.generate(tiny_tokens(1, 9), max_new_tokens=2).shape[1] > 9


@pytest.mark.parametrize("way", ["generate_batch", "init_continuous_batching", "generate"])
def test_continuous_batching_is_refused(way: str, llama: PreTrainedModel) -> None:
    prompts: dict[str, tuple[Any, ...]] = {"generate_batch": ([[5, 6, 7]],), "generate": (tiny_tokens(1, 9),)}
    options = {"generate": {"cache_implementation": "paged"}}.get(way, {})
    own = llama.init_continuous_batching
    with patched(llama):
        call = getattr(llama, way)
        with pytest.raises(RuntimeError, match="continuous batching of a patched model is the server's"):
            call(*prompts.get(way, ()), **options)
    assert llama.init_continuous_batching == own


@pytest.mark.parametrize("strict", [False, True])
def test_an_export_is_refused(strict: bool, patch: Patched) -> None:
    with pytest.raises(RuntimeError, match=r"torch\.export: leave the patch, write the encoding into rope_parameters"):
        torch.export.export(patch.model, (tiny_tokens(1, 9),), patch.encoding("yarn:4"), strict=strict)


def test_weights_that_hooks_bring_are_refused_with_the_reason() -> None:
    model = cpu_offload(tiny_model("llama")[1], execution_device="cpu")
    with pytest.raises(UnsupportedModel, match="offloaded wholly: keep the embedding on a device"), patched(model):
        pass
