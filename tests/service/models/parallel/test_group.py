"""Two processes that compute each model together, against one process with the same checkpoints.

``python -m tests.field.parallel`` compares every type that transformers can divide, under every method.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any, NamedTuple

import httpx
import psutil
import pytest
from fastapi import FastAPI

from patches import Patched
from service.models.checkpoint.loading import ModelLoadError
from service.models.parallel.leader import Leader
from service.models.registry import ModelRegistry
from service.settings import Settings
from tests.methods import rows
from tests.models import tiny_model
from tests.service.conftest import TEXT, tiny_checkpoint, tiny_tokenizer
from tests.service.serving import SMALL, process, serving, wait_for

MODELS = ("gemma2", "llama", "mixtral")
PROMPTS = [TEXT[:90], TEXT[200:330]]
GREEDY: dict[str, Any] = {"max_new_tokens": 24, "temperature": 0, "ignore_eos": True}


class Both(NamedTuple):
    """Base URLs of the group and of one process, that process's application, and the group's leader and log."""

    group: str
    alone: str
    app: FastAPI
    leader: psutil.Process
    log: Path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("divided")
    tiny_checkpoint(folder / "llama")
    for family in MODELS:
        if family != "llama":
            tiny_model(family, vocab_size=384)[1].save_pretrained(folder / family)
            tiny_tokenizer().save_pretrained(folder / family)
    return folder


@pytest.fixture(scope="module")
def both(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    log = tmp_path_factory.mktemp("log") / "log"
    small = [f"{name}={value}" for name, value in SMALL.items()]
    with (
        process(folder, "tensor_parallel=2", *small, log=log) as (running, group),
        serving(folder) as (alone, app),
    ):
        yield Both(group, alone, app, psutil.Process(running.pid), log)


def of_both(both: Both, path: str, body: dict[str, Any]) -> list[Any]:
    """The answers of both to one request."""
    answers = [httpx.post(f"{url}{path}", json=body, timeout=120) for url in (both.group, both.alone)]
    for answer in answers:
        assert answer.status_code == 200, answer.text
    return [answer.json() for answer in answers]


def resolves(patch: Patched, fields: dict[str, Any]) -> bool:
    try:
        patch.resolve(fields, 128)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("model", MODELS)
def test_every_method_scores_as_in_one_process(both: Both, model: str) -> None:
    patch = both.app.state.models.get(model).patch
    every = [fields for row in rows(8, 64, 4) if resolves(patch, fields := {"method": row.name, **row.hard})]
    assert len(every) > 20
    taken = every if model == "llama" else every[::4]  # ranks divide heads alike under every method
    for start in range(0, len(taken), 12):
        body = {"model": model, "input": TEXT[:500], "methods": taken[start : start + 12], "lengths": [64, 128]}
        found, expected = of_both(both, "/perplexity", body)
        for one, other in zip(found["methods"], expected["methods"], strict=True):
            for at, also in zip(one["lengths"], other["lengths"], strict=True):
                assert at["nll_mean"] == pytest.approx(also["nll_mean"], rel=1e-5), one["label"]


@pytest.mark.parametrize("model", MODELS)
def test_requests_share_batches_and_have_the_tokens_of_one_process(both: Both, model: str) -> None:
    encodings = ["default", "yarn:2", "alibi", "self_extend", "streaming", "dual_chunk", "none", "sandwich"]
    bodies = [{**GREEDY, "model": model, "prompt": PROMPTS[n % 2], "pe": pe} for n, pe in enumerate(encodings)]
    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = list(pool.map(lambda body: of_both(both, "/generate", body), bodies))
    for pe, (found, expected) in zip(encodings, answers, strict=True):
        assert found["results"][0]["token_ids"] == expected["results"][0]["token_ids"], pe
        assert found["results"][0]["pe"] == expected["results"][0]["pe"]


def test_ranks_import_their_libraries_without_warnings(both: Both) -> None:
    assert "torchao" not in both.log.read_text()


def test_answers_are_forgotten_on_every_rank(both: Both) -> None:
    body = {"methods": ["default", "streaming"], "lengths": [240], "depths": [0, 1], "samples": 1, "model": "llama"}
    found, expected = of_both(both, "/passkey", body)
    for one, other in zip(found["methods"], expected["methods"], strict=True):
        for cell, also in zip(one["cells"], other["cells"], strict=True):
            assert cell["score"] == also["score"]
            read_on, expected_on = ([sample["output"] for sample in each["outputs"]] for each in (cell, also))
            assert read_on == expected_on, "the tokens after the answer was forgotten"
            assert cell["answer_nll"] == pytest.approx(also["answer_nll"], rel=1e-5)


def test_attention_is_gathered_over_all_heads(both: Both) -> None:
    body = {"input": TEXT[:800], "methods": ["default", "alibi"], "lengths": [96], "segment": 6, "samples": 2}
    found, expected = of_both(both, "/probe", body | {"model": "llama", "distances": [12]})
    compared = 0
    for one, other in zip(found["methods"], expected["methods"], strict=True):
        for head, also in zip(one["attention"], other["attention"], strict=True):
            assert (head["layer"], head["head"]) == (also["layer"], also["head"])
            masses = [[bucket["mass"] for bucket in each["buckets"]] for each in (head, also)]
            assert masses[0] == pytest.approx(masses[1], abs=1e-5)
            compared += 1
    assert compared == 2 * 2 * 4, "methods, layers, heads"


def test_models_show_the_ranks_and_the_hash_of_the_whole(both: Both) -> None:
    found, expected = (httpx.get(f"{url}/models").json()["models"] for url in both[:2])
    for one, other in zip(found, expected, strict=True):
        assert (one["tensor_parallel"], other["tensor_parallel"]) == (2, 1)
        same = "id", "fingerprint", "parameters", "vocab_size", "trained_length", "engine"
        assert [one[name] for name in same] == [other[name] for name in same]
    assert 'tensor_parallel="2"' in httpx.get(f"{both.group}/metrics").text


def test_the_ranks_listen_on_the_loopback_interface_only(both: Both) -> None:
    ranks = [child for child in both.leader.children() if "spawn_main" in " ".join(child.cmdline())]
    assert len(ranks) == 1
    for rank in (both.leader, *ranks):
        listening = [c.laddr.ip for c in rank.net_connections("inet") if c.status == psutil.CONN_LISTEN]
        assert set(listening) <= {"127.0.0.1", "::1"}


def test_a_lost_rank_ends_the_group(both: Both) -> None:
    """The last test of the file: the server does not survive it."""
    (rank,) = [child for child in both.leader.children() if "spawn_main" in " ".join(child.cmdline())]
    body = {**GREEDY, "model": "llama", "prompt": TEXT[:60], "max_new_tokens": 1500, "stream": True}
    with httpx.stream("POST", f"{both.group}/generate", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        next(line for line in lines if line.startswith("data:"))
        os.kill(rank.pid, signal.SIGKILL)
        rest = list(lines)
    assert rest[-2:] == ["data: [DONE]", ""] or rest[-1] == "data: [DONE]"
    assert any('"rank_lost"' in line for line in rest)
    wait_for(lambda: not both.leader.is_running() or both.leader.status() == psutil.STATUS_ZOMBIE, 30)


def test_a_rank_is_lost_before_its_exit_code_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pipe of a process closes a moment before the system reports its end."""
    reasons = Queue[str]()
    leader = Leader(size=2)
    monkeypatch.setattr(leader, "_lost", reasons.put)
    ended, ours = Pipe()
    rank = SimpleNamespace(sentinel=ended, name="rank 1", exitcode=None)
    rank.join = lambda timeout: setattr(rank, "exitcode", -9)
    leader._processes.append(rank)
    leader.watch()
    ours.close()
    assert reasons.get(timeout=10) == "rank 1 has ended with exit code -9"


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"quantization": "int8"}, "ROPEWAY_QUANTIZATION"),
        ({"attention": "eager"}, "ROPEWAY_ATTENTION"),
        ({"cuda_graphs": True}, "ROPEWAY_CUDA_GRAPHS"),
        ({"tensor_parallel": 3}, "num_attention_heads 4 is no multiple of ROPEWAY_TENSOR_PARALLEL=3: allowed are 1, 2"),
    ],
)
def test_settings_and_models_that_cannot_be_divided_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], named: str
) -> None:
    settings = Settings(_env_file=None, model=str(folder / "llama"), **{"tensor_parallel": 2, **given})
    monkeypatch.setattr("service.models.registry.leading", pytest.fail)  # no rank starts
    with pytest.raises(ModelLoadError, match=named):
        ModelRegistry(settings)
