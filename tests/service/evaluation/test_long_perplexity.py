"""Long perplexity: the golden vectors, loops over plain transformers, and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from transformers import AutoModelForCausalLM, AutoTokenizer

from service.evaluation.checks import InvalidEvaluation
from service.evaluation.long_perplexity.keys import Contexts, contexts_of, is_key
from service.evaluation.long_perplexity.plan import plan_of
from service.evaluation.long_perplexity.request import LongPerplexityRequest
from service.evaluation.long_perplexity.results import LongPerplexityResult
from service.evaluation.perplexity.plan import plan_of as perplexity_plan_of
from service.evaluation.perplexity.request import PerplexityRequest
from service.evaluation.sweep.plan import plan_of as sweep_plan_of
from service.evaluation.sweep.request import SweepRequest
from service.evaluation.unit import evaluate
from service.models.registry import ModelRegistry, UnknownModel
from service.settings import Settings
from tests.service.conftest import TEXT, tiny_checkpoint
from tests.service.evaluation.prompting import finish

PLAIN = Settings(_env_file=None)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}


def measured(models: ModelRegistry, **body: Any) -> LongPerplexityResult:
    result: LongPerplexityResult = finish(evaluate(plan_of(LongPerplexityRequest(**body), models, PLAIN)))
    return result


def test_key_tokens_are_those_of_the_golden_vectors(shared: Path) -> None:
    golden = json.loads((shared / "golden" / "ppl_protocols.json").read_text())["longppl"]
    long, short = np.array(golden["nll_long"]), np.array(golden["nll_short"])
    key = is_key(long, short, alpha=2, beta=-2)
    assert key.tolist() == golden["is_key"]
    assert math.exp(long[key].mean()) == pytest.approx(golden["longppl"], rel=1e-12)
    assert math.exp(long.mean()) == pytest.approx(golden["ppl"], rel=1e-12)


@pytest.mark.parametrize(("bos", "tokens"), [(0, 1000), (1, 1000), (0, 37), (1, 100)])
def test_windows_leave_the_contexts_that_they_promise(bos: int, tokens: int) -> None:
    contexts = Contexts(long=96, short=24, stride=10)
    long = np.full(tokens, -1)
    short = np.full(tokens, -1)
    for found, windows in (
        (long, contexts.long_windows(tokens, bos)),
        (short, contexts.short_windows(tokens, bos)),
    ):
        for window in windows:
            scored = np.arange(window.first_scored, window.stop)
            assert (found[scored] == -1).all(), "every token once"
            found[scored] = scored - window.start + bos
    everything = np.arange(tokens) + bos
    assert (long >= np.minimum(96 - 10, everything)).all()
    assert long.max(initial=0) <= 95
    assert (short >= np.minimum(24, everything)).all()
    assert short.max(initial=0) <= 24 + 10 - 1
    assert (long >= short).all()


class Published:
    """A trained model in plain transformers, and the published program on it, written from its description: NLL by
    token with one pass over the whole text; in short windows, of which only the last ``stride`` tokens count."""

    def __init__(self, folder: Path, rope: dict[str, Any] | None = None) -> None:
        overrides = {"rope_parameters": {"rope_theta": 10_000.0, **rope}} if rope else {}
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **overrides).eval()

    def nll(self, ids: list[int]) -> np.ndarray:
        with torch.no_grad():
            logits = self.model(torch.tensor([ids])).logits[0]
        loss = F.cross_entropy(logits[:-1].double(), torch.tensor(ids[1:]), reduction="none")
        return np.array([np.nan, *loss.numpy()])

    def key_tokens(self, ids: list[int], short: int, stride: int, alpha: float, beta: float) -> list[int]:
        full, found = self.nll(ids), []
        for start in range(0, len(ids) - short, stride):
            stop = min(start + short + stride, len(ids))
            inside = self.nll(ids[start:stop])
            for token in range(start + short, stop):
                gained = inside[token - start] - full[token]
                if gained > alpha and -full[token] > beta:
                    found.append(token)
        return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stories260K", "llama3-1m-atto"])
def test_it_is_the_published_program(shared: Path, name: str) -> None:
    """Evaluator: the checkpoint's own encoding within its trained length, in one window without BOS."""
    folder = shared / "data" / "models" / name
    text = (shared / "data" / "corpora" / "tinystories.txt").read_text(encoding="utf-8")[:4000]
    ids = AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=False)["input_ids"][:512]
    plain = Published(folder)
    key = plain.key_tokens(ids, short=32, stride=8, alpha=1.0, beta=-2.0)
    assert len(key) >= 8
    expected = {"default": plain.nll(ids), "yarn": Published(folder, YARN).nll(ids)}

    models = ModelRegistry(Settings(model=str(folder), dtype="float32", device="cpu", _env_file=None))
    try:
        result = measured(
            models,
            input=ids,
            bos="never",
            methods=[{"method": "default"}, {"method": "yarn", "factor": 4}],
            lengths=[300, 512],
            short_context=32,
            stride=8,
            alpha=1.0,
        )
    finally:
        models.close()
    assert (result.evaluator.long_context, result.evaluator.beta, result.evaluator.tokens) == (512, -2.0, 512)
    assert result.evaluator.key_tokens == len(key)
    for method, nll in zip(result.methods, expected.values(), strict=True):
        for at in method.lengths:
            inside = [token for token in key if token < at.length]
            assert at.key_tokens == len(inside)
            assert at.key_fraction == len(inside) / (at.length - 1)
            assert at.long_perplexity == pytest.approx(math.exp(nll[inside].mean()), rel=1e-5)
            assert at.perplexity == pytest.approx(math.exp(nll[1 : at.length].mean()), rel=1e-5)
            assert sum(tokens for _, tokens in at.groups) == len(inside)
            assert sum(total for total, _ in at.groups) == pytest.approx(at.nll_sum)
            assert at.interval is not None
            assert at.interval.low < at.long_perplexity < at.interval.high
    default, yarn = (method.lengths[-1] for method in result.methods)
    assert default.long_perplexity != pytest.approx(yarn.long_perplexity, rel=1e-2)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelRegistry]:
    """Two models with one tokenizer, and a third whose tokenizer has two words the other way round."""
    folder = tmp_path_factory.mktemp("evaluators")
    for seed, name in enumerate(("one", "two", "other")):
        tiny_checkpoint(folder / name, seed=seed)
    file = folder / "other" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    words = tokenizer["model"]["vocab"]
    *_, first, second = sorted(words, key=words.get)
    words[first], words[second] = words[second], words[first]
    file.write_text(json.dumps(tokenizer))
    sizes = {"cache_tokens": 2048, "score_tokens": 2048, "max_batch_tokens": 128}
    models = ModelRegistry(Settings(model=str(folder), dtype="float32", device="cpu", _env_file=None, **sizes))
    yield models
    models.close()


SMALL: dict[str, Any] = {"input": TEXT[:1500], "lengths": [64, 128], "alpha": 0.1, "beta": -6.0}


def test_an_evaluator_of_its_own_in_sliding_windows(tiny: ModelRegistry, tmp_path: Path) -> None:
    """By the definition, token by token: the contexts begin where the first window that holds the token begins."""
    long, short, stride = 48, 12, 6
    documents = [TEXT[:700], TEXT[3000:3900], TEXT[7000:7900]]
    result = measured(
        tiny,
        **(SMALL | {"input": documents, "lengths": [128]}),
        evaluator={"model": "two", "pe": {"method": "linear", "factor": 2}},
        long_context=long,
        short_context=short,
        stride=stride,
    )
    assert (result.evaluator.model, result.evaluator.label) == ("two", "linear(factor=2)")
    evaluator = Published(tiny_checkpoint(tmp_path / "two", seed=1), {"rope_type": "linear", "factor": 2.0})
    scored = Published(tiny_checkpoint(tmp_path / "one", seed=0))
    tokenizer = tiny.default.tokenizer

    def first(token: int, size: int) -> int:
        return max(0, math.ceil((token + 1 - size) / stride)) * stride

    groups = []
    for text in documents:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"][:127]
        nll = scored.nll([0, *ids])[1:]
        key = []
        for token in range(len(ids)):
            after = [
                evaluator.nll([0, *ids[first(token, size - 1) : token + 1]])[-1] for size in (long, short + stride)
            ]
            if after[1] - after[0] > 0.1 and after[0] < 6.0:
                key.append(token)
        groups.append((nll[key].sum(), len(key)))
    (at,) = result.methods[0].lengths
    assert [tokens for _, tokens in at.groups] == [tokens for _, tokens in groups]
    assert [total for total, _ in at.groups] == pytest.approx([total for total, _ in groups], rel=1e-5)
    assert at.key_tokens == sum(tokens for _, tokens in groups) > 10
    assert at.interval is not None
    assert at.interval.kind == "documents"


def test_without_key_tokens_there_is_no_long_perplexity(tiny: ModelRegistry) -> None:
    result = measured(tiny, **(SMALL | {"alpha": 50.0}))
    for at in result.methods[0].lengths:
        assert (at.key_tokens, at.key_fraction, at.long_perplexity, at.nll_mean, at.interval) == (
            0,
            0,
            None,
            None,
            None,
        )
        assert at.perplexity > 1
    assert result.rows()[0]["long_perplexity"] is None


def test_tail_has_the_same_key_tokens_at_every_length(tiny: ModelRegistry) -> None:
    result = measured(tiny, **(SMALL | {"lengths": [32, 64, 128], "protocol": "tail"}))
    counts = [[tokens for _, tokens in at.groups] for at in result.methods[0].lengths]
    assert counts[0] == counts[1] == counts[2]
    assert sum(counts[0]) > 3
    rows = result.rows()
    assert [row["length"] for row in rows] == [32, 64, 128]
    assert len({tuple(row) for row in rows}) == 1


def test_in_a_sweep_every_length_has_the_same_key_tokens(tiny: ModelRegistry) -> None:
    part = {"evaluation": "long_perplexity", **SMALL, "lengths": None}
    part = {name: value for name, value in part.items() if value is not None}
    request = SweepRequest.model_validate({"lengths": [32, 64, 128], "evaluations": [part]})
    sweep = finish(evaluate(sweep_plan_of(request, tiny, PLAIN)))
    (result,) = sweep.evaluations
    assert (result.protocol, result.parameters["windows"]) == ("tail", 8)
    counts = [[tokens for _, tokens in at.groups] for at in result.methods[0].lengths]
    assert counts[0] == counts[1] == counts[2]
    assert "Under curve" not in sweep.answer.words
    asked = SweepRequest.model_validate({"evaluations": [part | {"protocol": "curve"}]}).evaluations[0]
    assert isinstance(asked, LongPerplexityRequest)
    assert (asked.protocol, asked.windows) == ("curve", None)


def test_windows_bound_the_passes_of_tail_alone(tiny: ModelRegistry) -> None:
    body = SMALL | {"input": TEXT, "protocol": "tail"}
    every, one = (plan_of(LongPerplexityRequest(**body, windows=count), tiny, PLAIN) for count in (None, 1))
    assert one.cost.tokens < every.cost.tokens
    assert [len(unit.windows) for unit in one.measured.units] == [1, 1]
    with pytest.raises(ValidationError, match="windows has no meaning for protocol curve"):
        LongPerplexityRequest(**SMALL, windows=1)


def test_its_passes_are_those_of_plain_perplexity_and_of_other_methods(tiny: ModelRegistry) -> None:
    """The address of an outcome: inputs and encoding."""

    def keys(plan: Any) -> list[str]:
        return [json.dumps([unit.inputs(), unit.resolved.frequency_hash, unit.length]) for unit in plan.units]

    bodies = [SMALL | {"methods": [{"method": "yarn", "factor": factor}]} for factor in (2, 4)]
    first, second = (keys(plan_of(LongPerplexityRequest(**body), tiny, PLAIN)) for body in bodies)
    assert first[:2] == second[:2], "the evaluator's"
    fields = {name: bodies[0][name] for name in ("input", "lengths", "methods")}
    assert first[2:] == keys(perplexity_plan_of(PerplexityRequest(**fields), tiny, PLAIN))


@pytest.mark.parametrize(
    ("change", "param", "says"),
    [
        ({"evaluator": {"model": "other"}}, "evaluator.model", "another tokenizer"),
        (
            {"evaluator": {"pe": {"method": "longrope", "short_factor": [1.0], "long_factor": [2.0], "factor": 2}}},
            "evaluator.pe",
            "8",
        ),
        ({"long_context": 4096}, "long_context", "at most 2048"),
        ({"short_context": 63}, "short_context", "at most 62"),
        ({"stride": 25}, "stride", "at most 24"),
        ({"lengths": [64, 99_999]}, "lengths", "at most"),
    ],
)
def test_refusals(tiny: ModelRegistry, change: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(InvalidEvaluation, match=says) as refused:
        plan_of(LongPerplexityRequest(**(SMALL | change)), tiny, PLAIN)
    assert refused.value.param == param


def test_an_evaluator_that_is_not_served(tiny: ModelRegistry) -> None:
    with pytest.raises(UnknownModel):
        plan_of(LongPerplexityRequest(**SMALL, evaluator={"model": "nobody"}), tiny, PLAIN)


def test_too_many_tokens_count_the_evaluators_too(tiny: ModelRegistry) -> None:
    request = LongPerplexityRequest(**SMALL)
    few = plan_of(request, tiny, PLAIN).measured.tokens
    with pytest.raises(InvalidEvaluation, match="this server allows"):
        plan_of(request, tiny, Settings(_env_file=None, max_scored_tokens=few))


def test_defaults_are_the_published_ones_at_the_published_size() -> None:
    assert contexts_of(32_768, None, None) == Contexts(32_768, 4096, 1024)
    assert contexts_of(512, None, None) == Contexts(512, 128, 32)
    assert contexts_of(4, None, None) == Contexts(4, 1, 1)
