"""A result names all that its numbers depend on, so that another person can get them again."""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from service.evaluation import setup
from service.evaluation.setup import hash_of_sources
from service.models.checkpoint.fingerprint import of_tokenizer
from service.models.registry import ModelRegistry
from tests.service.conftest import TEXT, tiny_tokenizer
from tests.service.jobs.test_routes import ended
from tests.service.serving import SMALL

BODY: dict[str, Any] = {"input": TEXT[:600], "lengths": [32], "methods": [{"method": "default"}]}


def test_versions_weights_and_numerics(client: httpx.Client) -> None:
    found = client.post("/perplexity", json=BODY).json()
    (served,) = [each for each in client.get("/models").json()["models"] if each["default"]]
    expected = {
        "fingerprint": served["fingerprint"],
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "device": served["device"],
        "dtype": served["dtype"],
        "threads": torch.get_num_threads(),
        "tensor_parallel": 1,
        "products": served["products"],
        "score_chunk": SMALL["score_chunk"],
        "tokenizer": of_tokenizer(tiny_tokenizer()),
        "eos_token_ids": [tiny_tokenizer().eos_token_id],
        "quantization": None,
    }
    (model,) = found["setup"]["models"].values()
    assert model.pop("hardware")
    assert model == expected
    assert found["setup"]["ropeway"] == version("ropeway")
    assert found["setup"]["code"] == setup.code_version()


def test_every_model_that_answered(client: httpx.Client) -> None:
    """Also that of a job, and on its page."""
    models = client.get("/models").json()["models"]
    (variants,) = [each["variants"] for each in models if each["default"]]
    methods = [{"method": "default"}, {"method": "alibi"}]
    expected = {"tiny", variants.get("alibi", "tiny")}
    job = client.post("/jobs", json=BODY | {"evaluation": "perplexity", "methods": methods}).json()
    ended(client, job["id"])
    found = client.get(f"/jobs/{job['id']}/results.json").json()["setup"]["models"]
    assert found.keys() == expected
    assert {name: each["fingerprint"] for name, each in found.items()} == {
        each["id"]: each["fingerprint"] for each in models if each["id"] in expected
    }
    page = client.get(f"/jobs/{job['id']}/report.html").text
    for name, each in found.items():
        assert f"<dt>setup of {name}</dt><dd>weights {each['fingerprint'][:12]}; torch {torch.__version__}" in page


@pytest.mark.parametrize("most", [None, 40])
def test_a_document_is_known_by_its_tokens(client: httpx.Client, most: int | None) -> None:
    (document,) = client.post("/perplexity", json=BODY | {"max_tokens": most}).json()["documents"]
    used = tiny_tokenizer().encode(BODY["input"], add_special_tokens=False)[:most]
    assert document["tokens"] == len(used)
    assert document["tokens_sha256"] == hashlib.sha256(np.asarray(used, "<i8").tobytes()).hexdigest()


def test_threads_count(models: ModelRegistry) -> None:
    of_one = setup.setup_of(["tiny"], models)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 77)
        assert setup.setup_of(["tiny"], models) != of_one


def test_sources_are_hashed_by_name_and_contents(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    for name, contents in (("a.py", "x = 1"), ("inner/b.py", "y = 2"), ("notes.txt", "any")):
        (tmp_path / name).write_text(contents)
    found = [hash_of_sources([tmp_path])]
    (tmp_path / "notes.txt").write_text("other")
    assert hash_of_sources([tmp_path]) == found[0]
    (tmp_path / "inner/b.py").write_text("y = 3")
    found.append(hash_of_sources([tmp_path]))
    (tmp_path / "inner/b.py").rename(tmp_path / "inner/c.py")
    found.append(hash_of_sources([tmp_path]))
    assert len(set(found)) == 3
    folders = [setup.folder_of(package) for package in setup.CODE]
    assert {"hf.py", "token_scores.py"} <= {path.name for folder in folders for path in folder.rglob("*.py")}


def test_a_tokenizer_is_known_by_its_rules() -> None:
    """And not by how its last call cut or padded, nor by its object."""
    first, second = tiny_tokenizer(), tiny_tokenizer()
    first.pad_token = second.pad_token = "<eos>"
    before = of_tokenizer(first)
    second(["a", "a b"], padding=True, truncation=True, max_length=4)
    assert json.loads(second.backend_tokenizer.to_str())["truncation"]
    assert of_tokenizer(second) == before
    second.chat_template = "{{ messages }}"
    assert of_tokenizer(second) != before
    second.chat_template = first.chat_template
    assert of_tokenizer(second) == before
    second.bos_token = "<eos>"
    assert of_tokenizer(second) != before
    second.bos_token = first.bos_token
    second.add_tokens(["rope"])
    assert of_tokenizer(second) != before


def test_a_sweep_has_the_evaluators_of_its_parts(client: httpx.Client) -> None:
    part = {"evaluation": "long_perplexity", "alpha": 0.1, "beta": -6}
    part |= {"input": TEXT[:1500]}
    body = {"methods": [{"method": "default"}], "lengths": [64]}
    names = []
    for evaluator in ("tiny", "tiny-alibi"):
        asked = body | {"evaluations": [part | {"evaluator": {"model": evaluator}}]}
        answer = client.post("/sweep", json=asked)
        assert answer.status_code == 200, answer.text
        names.append([*answer.json()["setup"]["models"]])
    assert names == [["tiny"], ["tiny", "tiny-alibi"]]
