"""Refusals before a token is read: passes beyond the free memory, and bodies that make no sense."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from patches import Patched, parse, patched
from service.api.validation import problems_in
from service.evaluation import checks
from service.evaluation.catalogue import EVALUATIONS, plan_of
from service.evaluation.checks import InvalidEvaluation
from service.evaluation.documents import BUILT_IN
from service.evaluation.long_perplexity.plan import LongPerplexityPlan
from service.evaluation.probe.units import CopyUnit
from service.evaluation.recommend.request import RecommendRequest
from service.evaluation.request import EvaluationRequest, LengthRange
from service.evaluation.retrieval.request import PasskeyRequest
from service.evaluation.ruler.request import RulerRequest
from service.evaluation.scoring.chunks import shortened
from service.evaluation.scoring.pass_memory import WORKING, held_tokens, pass_bytes
from service.evaluation.scoring.token_scores import NotANumber, token_nll
from service.evaluation.sweep.request import SweepRequest
from service.evaluation.unit import Plan
from service.machine import memory
from service.models.memory.cache_size import cache_bytes_per_token
from service.models.registry import ModelRegistry
from tests.field import configurations
from tests.models import tiny_model
from tests.service.conftest import TEXT
from tests.service.evaluation.prompting import finish, settings_of

STREAMING = {"method": "streaming", "sink_tokens": 4, "window": 32}
BODIES: dict[str, dict[str, Any]] = {
    "perplexity": {"input": TEXT, "lengths": [64, 512]},
    "long_perplexity": {"input": TEXT, "lengths": [64, 512]},
    "passkey": {"lengths": [512], "depths": [0.5], "samples": 1},
    "probe": {"input": TEXT, "lengths": [64, 512], "distances": [16], "samples": 1},
    "recommend": {"input": TEXT, "length": 512, "windows": 2, "methods": [{"method": "default"}]},
    "search": {"input": TEXT, "length": 512, "windows": 1, "held_out": 3, "methods": [{"method": "default"}]},
    "sweep": {"lengths": [64, 512], "evaluations": [{"evaluation": "perplexity", "input": TEXT}]},
}


def planned(models: ModelRegistry, evaluation: str, **fields: Any) -> Plan:
    request = EVALUATIONS[evaluation].request.model_validate(BODIES[evaluation] | fields)
    return plan_of(request, models, settings_of(Path("tiny")))


@pytest.mark.parametrize("evaluation", ["perplexity", "long_perplexity", "recommend"])
@pytest.mark.parametrize(
    ("given", "cut"),
    [
        ([TEXT, "x" + TEXT, TEXT], None),
        ([next(iter(BUILT_IN)), TEXT, next(iter(BUILT_IN))], None),
        ([[3, 4, 5] * 400, TEXT, [3, 4, 5] * 300], 700),
    ],
)
def test_a_repeated_document_is_no_second_one(
    models: ModelRegistry, evaluation: str, given: list[str | list[int]], cut: int | None
) -> None:
    """Five copies of a document had an interval without width, and a difference of probability 1."""
    with pytest.raises(InvalidEvaluation, match=r"^input\[2\] has the same tokens as input\[0\]: send each"):
        planned(models, evaluation, input=given, max_tokens=cut)
    planned(models, evaluation, input=given[:2], max_tokens=cut)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (next(iter(BUILT_IN))[:-1], f"did you mean '{next(iter(BUILT_IN))}'?"),
        (next(iter(BUILT_IN)).upper(), f"did you mean '{next(iter(BUILT_IN))}'?"),
        ("data/chapter-1.txt", "looks like the name of a file"),
        ("Notes.MD", "looks like the name of a file"),
    ],
)
def test_a_name_that_is_no_built_in_document_is_not_scored(models: ModelRegistry, given: str, message: str) -> None:
    with pytest.raises(InvalidEvaluation, match=re.escape(message)) as refused:
        planned(models, "perplexity", input=[TEXT, given], lengths=[2])
    assert refused.value.param == "input"


@pytest.mark.parametrize(
    ("given", "lengths", "message"),
    [
        ([TEXT, "A short text."], [64], "lengths: 64 is beyond the shortest document, input[1]: at most "),
        (["A short text."], [64], "lengths: 64 is beyond the shortest document: at most "),
        ([TEXT, [1, 2, 1 << 20]], [2], "input[1]: token id 1048576 is outside 0.."),
        ([TEXT, "read.txt"], [2], "input[1]: 'read.txt' looks like the name of a file"),
        ([TEXT, [5]], None, "input[1]: needs at least 2 tokens"),
    ],
)
def test_an_error_names_one_of_several_documents(
    models: ModelRegistry, given: list[Any], lengths: list[int] | None, message: str
) -> None:
    with pytest.raises(InvalidEvaluation, match=f"^{re.escape(message)}"):
        planned(models, "perplexity", input=given, lengths=lengths, bos="never")


def test_a_document_has_only_tokens_with_a_logit(models: ModelRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Moshi has one more row of embeddings than logits."""
    monkeypatch.setattr(Patched, "num_logits", 300)
    with pytest.raises(InvalidEvaluation, match=r"^input: token id 300 is outside 0\.\.299$"):
        planned(models, "perplexity", input=[1, 2, 300], lengths=[2])


def test_an_error_has_the_names_of_the_request(models: ModelRegistry) -> None:
    for given, names, message in (
        ([TEXT, "A short text."], ["a.txt", "b.txt"], "lengths: 64 is beyond the shortest document, b.txt: at most "),
        ("A short text.", ["b.txt"], "lengths: 64 is beyond the shortest document, b.txt: at most "),
        ([TEXT, [1, 2, 1 << 20]], ["a.txt", "b.txt"], "input: b.txt: token id 1048576 is outside 0.."),
        ([TEXT, TEXT], ["a.txt", "b.txt"], "input: b.txt has the same tokens as a.txt: send each document once"),
    ):
        with pytest.raises(InvalidEvaluation, match=f"^{re.escape(message)}"):
            planned(models, "perplexity", input=given, names=names, lengths=[64])


def test_a_length_beyond_a_document_says_how_its_tokens_are_counted(models: ModelRegistry) -> None:
    """Results have the tokens of the document, without the BOS."""
    tokens = len(planned(models, "perplexity", input="A short text.", lengths=[2]).documents[0].token_ids)
    for bos, most in (
        ("always", f"{tokens + 1} tokens, its {tokens} and the BOS before them"),
        ("never", f"{tokens} tokens"),
    ):
        with pytest.raises(InvalidEvaluation, match=f": at most {most}$"):
            planned(models, "perplexity", input="A short text.", lengths=[64], bos=bos)


@pytest.mark.parametrize("evaluation", ["perplexity", "passkey", "recommend"])
def test_a_name_has_no_nul(models: ModelRegistry, evaluation: str) -> None:
    with pytest.raises(ValidationError, match=r"names\.1\n  must have no NUL character"):
        planned(models, evaluation, input=[TEXT, "A text."], names=["a", "b\0c"])


@pytest.mark.parametrize("evaluation", ["perplexity", "long_perplexity", "passkey", "probe", "recommend", "search"])
def test_documents_have_the_names_of_the_request(models: ModelRegistry, evaluation: str) -> None:
    given = {"input": [TEXT, next(iter(BUILT_IN))], "max_tokens": 1500}
    plan = planned(models, evaluation, **given, names=["a.txt", "b.txt"])
    measured: Any = plan.measured if isinstance(plan, LongPerplexityPlan) else plan
    documents = measured.documents
    assert [document.name for document in documents] == ["a.txt", "b.txt"]
    assert EVALUATIONS[evaluation].request.model_validate(given).texts() == given["input"]
    for names in ([], ["a.txt"], ["a.txt", "b.txt", "c.txt"]):
        with pytest.raises(ValidationError, match=f"needs as many entries as input, 2, and has {len(names)}"):
            planned(models, evaluation, **given, names=names)


def test_a_name_is_that_of_one_document(models: ModelRegistry) -> None:
    with pytest.raises(ValidationError, match="'b' names two documents: give each its own name"):
        planned(models, "perplexity", input=[TEXT, "A text.", "Another."], names=["a", "b", "b"])


@pytest.mark.parametrize("evaluation", [name for name in BODIES if name not in ("sweep", "recommend", "search")])
def test_an_encoding_is_measured_once(models: ModelRegistry, evaluation: str) -> None:
    """Its rows and its line were there three times, and the measurements too."""
    asked = ["yarn:4", "default", "yarn:4.0", {"method": "yarn", "factor": 4, "beta_fast": 32}, "yarn:2"]
    plan: Any = planned(models, evaluation, methods=asked)
    subjects = (plan.measured if isinstance(plan, LongPerplexityPlan) else plan).subjects
    assert [subject.label for subject in subjects] == ["yarn(factor=4)", "default", "yarn(factor=2)"]


def test_names_of_files_are_for_the_documents_of_a_sweep_alone() -> None:
    files, own = {"input": [TEXT, "A text."], "names": ["a.txt", "b.txt"]}, {"input": "Mine."}
    parts = ["perplexity", {"evaluation": "passkey", **own}]
    placed = SweepRequest.model_validate(SweepRequest.placed(files, {"evaluations": parts, "lengths": [64]}))
    assert [getattr(part, "names", None) for part in placed.evaluations] == [files["names"], None]
    assert placed.texts() == [*files["input"], own["input"]]
    parts = ["ruler", {"evaluation": "ruler", "tasks": ["vt"]}]
    every, none = SweepRequest.model_validate(SweepRequest.placed(files, {"evaluations": parts})).evaluations
    assert every.texts() == files["input"]
    assert "input" not in none.model_fields_set, "it reads no documents"
    (alone,) = SweepRequest.placed(files, {"evaluations": parts[1:]})["evaluations"]
    assert alone["input"] == files["input"], "it refuses them"
    for wrong in ([5], [{"evaluation": "ruler", "tasks": [["x"]]}], ["perplexty"]):
        with pytest.raises(ValidationError, match="evaluations"):
            SweepRequest.model_validate(SweepRequest.placed(files, {"evaluations": wrong}))


@pytest.mark.parametrize("given", ["ropeways", f"see {next(iter(BUILT_IN))[:-1]}", "read a.txt", "3.14159", "e.g.text"])
def test_a_short_text_is_scored_all_the_same(models: ModelRegistry, given: str) -> None:
    assert planned(models, "perplexity", input=given, lengths=[2]).tokens


@pytest.mark.parametrize(
    ("capacity", "settings", "cause"),
    [
        (500, {}, "the memory that weights and caches leave"),
        (500, {"score_tokens": 600}, "the memory that weights and caches leave"),
        (500, {"score_tokens": 500}, "the setting ROPEWAY_SCORE_TOKENS"),
        (300000, {"score_tokens": 300000}, "the setting ROPEWAY_SCORE_TOKENS"),
        (262144, {}, r"the setting ROPEWAY_SCORE_TOKENS \(unset\)"),
        (375, {"score_tokens": 500, "api_keys": "a"}, "the setting ROPEWAY_SCORE_TOKENS, of which one key gets"),
    ],
)
def test_a_refusal_of_a_length_names_what_bounds_it(
    models: ModelRegistry, capacity: int, settings: dict[str, Any], cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models.default.engine.scores, "capacity", capacity)
    own = settings_of(Path("tiny"), max_scored_tokens=10**7, **settings)
    for name, body in (
        ("passkey", {"lengths": [300001]}),
        ("passkey", {"lengths": [512], "depths": [0.5], "samples": 1} if capacity <= 500 else {"lengths": [300001]}),
        ("long_perplexity", {"input": TEXT, "lengths": [64], "long_context": 1 << 22}),
    ):
        request = EVALUATIONS[name].request.model_validate(body)
        with pytest.raises(
            InvalidEvaluation, match=rf"is beyond what this server scores: at most \d+ tokens by {cause}"
        ):
            plan_of(request, models, own)


@pytest.mark.parametrize("evaluation", BODIES)
def test_a_pass_beyond_the_memory_of_all_passes_is_refused(
    models: ModelRegistry, evaluation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 0)
    monkeypatch.setattr(models.default.engine.scores, "capacity", 512)
    assert planned(models, evaluation).tokens, "what others hold now does not count"
    monkeypatch.setattr(models.default.engine.scores, "capacity", 511)
    with pytest.raises(
        InvalidEvaluation, match=r"512 is beyond what .*: at most 511 tokens by .* about 3\d MB"
    ) as refused:
        planned(models, evaluation)
    assert refused.value.param == ("length" if evaluation in ("recommend", "search") else "lengths")
    monkeypatch.setattr(models.default.engine.scores, "capacity", 512)
    monkeypatch.setitem(models._models, models.default.name, replace(models.default, score_room=30 << 20))
    with pytest.raises(InvalidEvaluation, match=r"about 3\d MB beyond the weights, and weights and caches leave 30 MB"):
        planned(models, evaluation)


def test_what_leaves_the_cache_needs_no_memory(models: ModelRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    patch = models.default.patch
    resolved = patch.resolve(parse(STREAMING), 2048)
    windowed = pass_bytes(patch, 2048, 64, resolved)
    assert windowed == pass_bytes(patch, 2048 * 64, 64, resolved) < pass_bytes(patch, 2048, 64)
    monkeypatch.setattr(models.default.engine.scores, "capacity", 4 + 32 + 64)
    monkeypatch.setattr(checks, "MOST_TOKENS", 512)
    plan = planned(models, "perplexity", methods=[STREAMING], lengths=[2048])
    assert {held_tokens(unit, 64) for unit in plan.units} == {4 + 32 + 64}
    with pytest.raises(InvalidEvaluation, match="2048 is beyond"):
        planned(models, "perplexity", methods=[STREAMING, {"method": "none"}], lengths=[2048])


def test_a_length_beyond_the_text_holds_the_text(models: ModelRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models.default.engine.scores, "capacity", 64)
    assert planned(models, "perplexity", protocol="rolling", input=list(range(2, 60)), lengths=[4096])


@pytest.mark.parametrize(
    ("family", "full_layers"),
    [
        ("llama", 2),
        ("gpt2", 2),
        ("mpt", 2),
        ("gemma3", 2),
        ("starcoder2", 0),
        ("llama4", 1),
        ("gemma3n", 1),
        ("jamba", 1),
    ],
)
def test_only_layers_that_keep_everything_grow(family: str, full_layers: int) -> None:
    model = configurations.tiny_model(family) if family == "jamba" else tiny_model(family)[1]
    with patched(model) as patch:
        per_layer = cache_bytes_per_token(patch) / len(patch.caching_layers)
        spread = 1 + 2 * patch.geometry.num_attention_heads / patch.cached.heads if full_layers else 0
        per_token = per_layer * (full_layers + spread)
        grown = pass_bytes(patch, 20_000, 64) - pass_bytes(patch, 10_000, 64)
        assert grown == pytest.approx(10_000 * per_token, abs=1), "behind so many keys, a CPU makes no mask"
        masks = [4 * tokens * shortened(patch, 64, tokens) for tokens in (2000, 3000)] if full_layers else [0, 0]
        grown = pass_bytes(patch, 3000, 64) - pass_bytes(patch, 2000, 64)
        assert grown == pytest.approx(1000 * per_token + masks[1] - masks[0], abs=1)
        assert pass_bytes(patch, 2000, 64) > WORKING


def test_a_segment_longer_than_the_document_is_refused(models: ModelRegistry) -> None:
    short = {"input": list(range(2, 12)), "lengths": [8], "segment": 16, "distances": [16]}
    with pytest.raises(InvalidEvaluation, match="at most the shortest document's 10 tokens") as refused:
        planned(models, "probe", **short, segment_of="document")
    assert refused.value.param == "segment"


def test_a_copy_is_not_that_of_another_beginning(models: ModelRegistry) -> None:
    """Of equal tokens, the first is a BOS in one and the segment's in the other."""
    plan = planned(models, "probe", input=[0] * 600, segment_of="document", bos="always")
    unit = next(unit for unit in plan.units if isinstance(unit, CopyUnit))
    other = replace(unit, bos=None, repeated=unit.repeated._replace(distance=unit.repeated.distance + 1))
    assert unit.token_ids == other.token_ids
    assert unit.inputs() != other.inputs()


def test_a_range_is_no_way_to_fill_the_memory() -> None:
    assert len(LengthRange(start=2, stop=65_537, step=1).values()) == 65_536
    with pytest.raises(ValidationError, match="has 65537 lengths and at most 65536"):
        LengthRange(start=2, stop=65_538, step=1)


def test_parameters_of_tasks_that_are_not_asked_for_are_refused() -> None:
    with pytest.raises(ValidationError, match="vt_hops has no meaning without the task vt"):
        RulerRequest(tasks=["cwe"], vt_hops=3)
    assert RulerRequest(tasks=["vt"], vt_hops=3).parameters() == {"vt_chains": 1, "vt_hops": 3}
    everything = RulerRequest(tasks=["niah_single_1"]).model_dump()
    assert RulerRequest.model_validate(everything).tasks == ["niah_single_1"]


YARN = {"method": "yarn", "factor": 4}
OWN_LENGTHS = {"evaluation": "perplexity", "lengths": [64]}
PART = "evaluations.0.windows"


@pytest.mark.parametrize(
    ("request_class", "fields", "field"),
    [
        (PasskeyRequest, {"max_tokens": 9}, "max_tokens"),
        (RecommendRequest, {"methods": ["auto"]}, "methods"),
        (RulerRequest, {"tasks": ["cwe"], "vt_hops": 3}, "vt_hops"),
        (RulerRequest, {"cwe_uncommon_frequency": 30}, "cwe_uncommon_frequency"),
        (SweepRequest, {"evaluations": ["passkey", OWN_LENGTHS]}, "evaluations.1"),
        (SweepRequest, {"methods": ["none"], "factors": [2]}, "factors"),
        (SweepRequest, {"methods": [YARN], "factors": [5000]}, "factors.0"),
        (SweepRequest, {"methods": [YARN] * 200, "factors": [2, 4]}, "factors"),
        (SweepRequest, {"evaluations": [{"evaluation": "perplexity", "windows": 1, "protocol": "curve"}]}, PART),
    ],
)
def test_a_refusal_of_several_fields_names_the_one_to_change(
    request_class: type[EvaluationRequest], fields: dict[str, Any], field: str
) -> None:
    with pytest.raises(ValidationError) as refused:
        request_class.model_validate(fields)
    problems = problems_in(refused.value.errors())
    assert [problem.field for problem in problems] == [field]
    assert str(problems[0]).startswith(field)


def test_scores_that_are_no_numbers_are_an_error_and_no_result() -> None:
    model = tiny_model("llama")[1]
    with torch.no_grad():
        model.get_output_embeddings().weight[3] = float("nan")
    with patched(model) as patch, pytest.raises(NotANumber, match="no numbers any more"):
        finish(token_nll(patch, [5, 6, 7, 8], 0, 64))
