"""Perplexity against the programs that others use: the YaRN script's loop, and lm-evaluation-harness in process.

Both on trained models in plain transformers: no cache, no chunks, nothing patched.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from service.evaluation.perplexity.plan import plan_of
from service.evaluation.perplexity.request import PerplexityRequest
from service.evaluation.statistics.nll import LengthResult
from service.evaluation.unit import evaluate
from service.models.registry import ModelRegistry
from service.settings import Settings
from tests.service import harness

pytestmark = pytest.mark.slow

MODELS = ["stories260K", "llama3-1m-atto"]


class Real(NamedTuple):
    """A trained model served in this process, the same weights in plain transformers, and a text it knows."""

    models: ModelRegistry
    plain: Any
    tokenizer: Any
    text: str


@pytest.fixture(scope="module", params=MODELS)
def real(request: pytest.FixtureRequest, shared: Path) -> Iterator[Real]:
    folder = shared / "data" / "models" / request.param
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    text = (shared / "data" / "corpora" / "tinystories.txt").read_text(encoding="utf-8")
    models = ModelRegistry(Settings(model=str(folder), dtype="float32", device="cpu", _env_file=None))
    yield Real(models, plain, AutoTokenizer.from_pretrained(folder), text)
    models.close()


def measured(models: ModelRegistry, **body: Any) -> list[LengthResult]:
    """The lengths of the first method."""
    work = evaluate(plan_of(PerplexityRequest(**body), models, Settings(_env_file=None)))
    try:
        while True:
            next(work)
    except StopIteration as stop:
        lengths: list[LengthResult] = stop.value.methods[0].lengths
        return lengths


@pytest.mark.parametrize(("window", "stride", "characters"), [(128, 127, 1500), (256, 64, 2000), (640, 256, 4000)])
def test_sliding_is_the_yarn_script(real: Real, window: int, stride: int, characters: int) -> None:
    """eval/perplexity.py of jquesnelle/yarn: BOS before every window, labels of what an earlier window scored masked.
    It takes the mean loss of every window, then the plain mean over windows. The last window is shorter."""
    text = real.text[:characters]
    ids = real.tokenizer(text, add_special_tokens=False)["input_ids"]
    room, done = window - 1, 0
    means, total, count = [], 0.0, 0
    for begin in range(0, len(ids), stride):
        end = min(begin + room, len(ids))
        scored = end - done
        inputs = torch.tensor([[real.tokenizer.bos_token_id, *ids[begin:end]]])
        labels = inputs.clone()
        labels[:, :-scored] = -100
        with torch.no_grad():
            logits = real.plain(inputs).logits.double()
        loss = F.cross_entropy(logits[0, :-1], labels[0, 1:], ignore_index=-100).item()
        means.append(loss)
        total, count, done = total + loss * scored, count + scored, end
        if end == len(ids):
            break
    assert len(means) >= 3
    assert count == len(ids)
    (got,) = measured(real.models, input=text, protocol="sliding", lengths=[window], stride=stride)
    assert (got.windows, got.tokens_scored) == (len(means), count)
    assert got.perplexity_window_mean == pytest.approx(math.exp(sum(means) / len(means)), rel=1e-6)
    assert got.nll_sum == pytest.approx(total, rel=1e-6)
    assert abs(got.perplexity_window_mean / got.perplexity - 1) > 1e-4, "the two aggregations differ on this text"


WINDOW = 192


def documents_of(text: str) -> list[str]:
    """Several windows with a rest, less than a window, and white space and characters of several bytes at the ends."""
    return [text[:2500], text[4000:4100], f"\n  {text[5000:5900]} a naïve café in 東京 \n"]


@pytest.fixture
def harness_of(tmp_path: Path) -> Iterator[Any]:
    """Calls lm-eval on documents with a plain model: no network, no cache outside of the test's folder."""
    for package in ("lm_eval", "accelerate"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install -e .[harness]")
    from lm_eval.models.huggingface import HFLM

    def run(real: Real, documents: list[str], *, add_bos_token: bool | None) -> dict[str, float]:
        harness.add_task(tmp_path, "rolling", harness.ROLLING, [{"text": text} for text in documents])
        model = HFLM(
            pretrained=real.plain,
            tokenizer=real.tokenizer,
            max_length=WINDOW,
            batch_size=1,
            add_bos_token=add_bos_token,
            device="cpu",
        )
        found = harness.evaluate(tmp_path, ["rolling"], model)["results"]["rolling"]
        return {name: found[f"{name},none"] for name in METRICS}

    with harness.offline(tmp_path):
        yield run


METRICS = ("word_perplexity", "byte_perplexity", "bits_per_byte")


def test_rolling_is_the_harness_own(real: Real, harness_of: Any) -> None:
    documents = documents_of(real.text)
    expected = harness_of(real, documents, add_bos_token=False)
    got, smaller = reversed(measured(real.models, input=documents, protocol="rolling", lengths=[WINDOW // 2, WINDOW]))
    assert {name: getattr(got, name) for name in METRICS} == pytest.approx(expected, rel=1e-5)
    assert getattr(smaller, METRICS[0]) != pytest.approx(expected[METRICS[0]], rel=1e-3), "the window matters here"


def test_rolling_of_token_ids_is_the_harness_as_it_comes(real: Real, harness_of: Any) -> None:
    """Left alone, the harness lets the tokenizer add a BOS after its own and predicts it. Token ids give the same."""
    documents = documents_of(real.text)
    expected = harness_of(real, documents, add_bos_token=None)
    ids = [real.tokenizer(text)["input_ids"] for text in documents]
    assert all(document[0] == real.tokenizer.bos_token_id for document in ids)
    (got,) = measured(real.models, input=ids, protocol="rolling", lengths=[WINDOW])
    assert {name: getattr(got, name) for name in METRICS} == pytest.approx(expected, rel=1e-5)
