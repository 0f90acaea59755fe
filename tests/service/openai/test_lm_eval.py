"""lm-eval's ``local-completions`` against the live server, on local tasks: scores equal the model's own.

Nothing but ``base_url`` and ``model`` is given: the tokenizer comes from the server's routes, the encoding from
the model's name.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.service import harness
from tests.service.conftest import TEXT
from tests.service.evaluation.perplexity.test_scoring import our_nll, plain_nll
from tests.service.openai.conftest import answer

pytestmark = pytest.mark.slow

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install -e .[harness]")

WINDOW = 64
EOS = 1
DOCUMENTS = [TEXT[:900], TEXT[2000:2300], "The ropes."]
QUESTIONS = [
    {"question": "The 3 ropes of the 21 ways are", "choices": [" 3 steps long", " 4 steps", " no longer"], "answer": 0},
    {"question": "The 7 ropes are long, and", "choices": [" no longer.", " 12 steps long."], "answer": 0},
    {"question": "The naïve ropes of 東京", "choices": [" are 5", " of the 9 ways are long"], "answer": 1},
]

CHOICES = """
task: tiny_choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
target_delimiter: ""
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
metadata: {{version: 1.0}}
"""

UNTIL = """
task: tiny_until
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: answer
generation_kwargs: {{until: ["\\n\\n"], max_gen_toks: 8, pe: {{method: ntk, factor: 8}}}}
metric_list: [{{metric: exact_match}}]
metadata: {{version: 1.0}}
"""

ENCODINGS: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {
    "tiny": (None, {"method": "default"}),
    "tiny@yarn:4": (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {"method": "yarn", "factor": 4},
    ),
    "tiny@self_extend:group_size=4,neighbor_window=16": (
        None,
        {"method": "self_extend", "group_size": 4, "neighbor_window": 16},
    ),
}
"""Model name -> (transformers' own rope parameters, where it has the method; the request's fields)."""


@pytest.fixture
def tasks(tmp_path: Path) -> Iterator[Path]:
    """A folder of task definitions with their data."""
    with harness.offline(tmp_path):
        harness.add_task(tmp_path, "rolling", harness.ROLLING, [{"text": text} for text in DOCUMENTS])
        for name, task in (("choices", CHOICES), ("until", UNTIL)):
            harness.add_task(tmp_path, name, task, QUESTIONS)
        yield tmp_path


def evaluate(folder: Path, url: str, model: str, *names: str) -> dict[str, Any]:
    arguments = {"model": model, "base_url": f"{url}/v1/completions", "max_length": WINDOW, "num_concurrent": 2}
    return harness.evaluate(folder, list(names), "local-completions", model_args=arguments, batch_size=2)


def direct_logprobs(folder: Path, ids: list[int], model: str) -> np.ndarray:
    """Of tokens 1 .. n-1: by plain transformers where it has the method, by the patched model alone elsewhere."""
    rope, fields = ENCODINGS[model]
    if rope is not None or model == "tiny":
        return -plain_nll(folder, ids, rope)
    return -our_nll(folder, ids, fields, 1024)


def rolling(folder: Path, ids: list[int], model: str) -> float:
    """Every token predicted once, after end-of-text or after a full window. One token of the length is kept for
    the answer and one for the window's first token. So a window has two inputs less than ``max_length``."""
    room, total, done = WINDOW - 2, 0.0, 0
    tokens = [EOS, *ids]
    while done < len(ids):
        end = min(done + room, len(ids))
        start = max(0, end - room)
        total += direct_logprobs(folder, tokens[start : end + 1], model)[-(end - done) :].sum()
        done = end
    return total


@pytest.mark.parametrize("model", ENCODINGS)
def test_scores_are_the_models_own(url: str, tiny: Path, tasks: Path, tokenizer: Any, model: str) -> None:
    results = evaluate(tasks, url, model, "rolling", "tiny_choices")

    def ids_of(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    expected = [rolling(tiny, ids_of(text), model) for text in DOCUMENTS]
    samples = sorted(results["samples"]["rolling"], key=lambda sample: sample["doc_id"])
    assert [sample["resps"][0][0] for sample in samples] == pytest.approx(expected, rel=1e-5)
    size = sum(len(text.encode()) for text in DOCUMENTS)
    bits = results["results"]["rolling"]["bits_per_byte,none"]
    assert bits == pytest.approx(-sum(expected) / size / np.log(2), rel=1e-5)

    correct = 0
    for sample in sorted(results["samples"]["tiny_choices"], key=lambda sample: sample["doc_id"]):
        question = QUESTIONS[sample["doc_id"]]
        context = ids_of(question["question"])
        sums = []
        for choice, (got, _) in zip(question["choices"], (resp[0] for resp in sample["resps"]), strict=True):
            ids = ids_of(question["question"] + choice)
            assert ids[: len(context)] == context
            sums.append(direct_logprobs(tiny, ids, model)[len(context) - 1 :].sum())
            assert got == pytest.approx(sums[-1], rel=1e-5)
        correct += int(np.argmax(sums) == question["answer"])
    assert results["results"]["tiny_choices"]["acc,none"] == pytest.approx(correct / len(QUESTIONS))


def test_the_encodings_differ_where_it_matters(tiny: Path, tokenizer: Any) -> None:
    """The test above can fail: within one window the three encodings score differently."""
    ids = tokenizer(DOCUMENTS[0], add_special_tokens=False)["input_ids"]
    found = [rolling(tiny, ids, model) for model in ENCODINGS]
    assert min(abs(a - b) for i, a in enumerate(found) for b in found[:i]) > 1.0


def test_generation_takes_an_encoding_from_the_task(url: str, tasks: Path, http: httpx.Client, tokenizer: Any) -> None:
    results = evaluate(tasks, url, "tiny", "tiny_until")
    for sample in results["samples"]["tiny_until"]:
        text = QUESTIONS[sample["doc_id"]]["question"]
        prompt = tokenizer(text, add_special_tokens=False)["input_ids"]  # which is what lm-eval sends
        body: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "model": "tiny@ntk:8", "stop": ["\n\n"]}
        assert sample["resps"][0][0] == answer(http, prompt=prompt, **body)["choices"][0]["text"]
