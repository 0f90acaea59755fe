"""Aliases, GET /v1/models, and the tokenizer routes at the root."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from patches import METHODS, examples, from_shorthand, parse, to_shorthand
from tests.methods import ROWS
from tests.service.conftest import TEXT
from tests.service.openai.conftest import TEMPLATE, answer
from tests.service.serving import serving

MESSAGES = [{"role": "user", "content": "The 3 ropes?"}]


def test_models_are_listed_with_their_presets(client: httpx.Client) -> None:
    """On the server of two models, of which one is the other's variant."""
    listed = answer_of(client.get("/v1/models"))
    assert listed["object"] == "list"
    models = {model["id"]: model for model in listed["data"]}
    assert next(iter(models)) == "tiny"
    for model in models.values():
        assert set(model) == {"id", "object", "created", "owned_by", "root", "parent", "max_model_len"}
        assert (model["object"], model["max_model_len"]) == ("model", 4096)
        assert answer_of(client.get(f"/v1/models/{model['id']}")) == model
        body: dict[str, Any] = {"model": model["id"], "prompt": "The ropes", "max_tokens": 1}
        assert answer_of(client.post("/v1/completions", json=body))["model"] == model["id"]
    assert models["tiny"]["parent"] is None
    assert (models["tiny@alibi"]["parent"], models["tiny@alibi"]["root"]) == ("tiny", "tiny-alibi")
    presets = {model["id"] for model in models.values() if model["parent"] == "tiny"}
    assert presets == {f"tiny@{to_shorthand(fields)}" for fields in examples() if fields["method"] != "default"}
    assert {id for id in models if id.startswith("tiny-alibi")} == {"tiny-alibi"}, (
        "presets that fit and change something"
    )


def answer_of(reply: httpx.Response) -> dict[str, Any]:
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


@pytest.mark.parametrize(
    ("alias", "pe"),
    [
        ("yarn:4", {"method": "yarn", "factor": 4}),
        ("ntk:factor=2", {"method": "ntk", "factor": 2}),
        (
            "self_extend:group_size=4,neighbor_window=512",
            {"method": "self_extend", "group_size": 4, "neighbor_window": 512},
        ),
        ("default", {"method": "default"}),
    ],
)
def test_an_alias_is_the_encoding_it_names(http: httpx.Client, alias: str, pe: dict[str, Any]) -> None:
    body: dict[str, Any] = {"prompt": TEXT[:400], "temperature": 0, "max_tokens": 8}
    by_alias = answer(http, model=f"tiny@{alias}", **body)
    by_field = answer(http, model="tiny", pe=pe, **body)
    assert by_alias["choices"] == by_field["choices"]
    assert by_alias["model"] == f"tiny@{alias}"
    both = answer(http, model=f"tiny@{alias}", pe=from_shorthand(alias), **body)
    assert both["choices"] == by_alias["choices"], "the same encoding twice is no contradiction"
    assert answer_of(http.get(f"/v1/models/tiny@{alias}"))["parent"] == "tiny"


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("nobody", "unknown model"),
        ("nobody@yarn:4", "unknown model"),
        ("tiny@yrn:4", "unknown method"),
        ("tiny@yarn:0.5", "factor: must be at least 1, not 0.5"),
        ("tiny@yarn", "factor: required"),
        ("tiny@", "unknown method"),
        ("@yarn:4", "unknown model"),
        ("tiny@longrope:short_factor=[1.0],long_factor=[2.0]", "8 rotary pairs"),
        ("", "unknown model"),
    ],
)
def test_an_unknown_name_or_alias_is_404_with_the_reason(http: httpx.Client, model: str, says: str) -> None:
    for reply in (
        http.post("/v1/completions", json={"model": model, "prompt": "a"}),
        http.post("/v1/chat/completions", json={"model": model, "messages": [{"role": "user", "content": "a"}]}),
        http.get(f"/v1/models/{model or ' '}"),
        http.post("/tokenize", json={"model": model, "prompt": "a"}),
    ):
        error = reply.json()["error"]
        assert (reply.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
        assert says in error["message"]


def test_the_short_form_gives_back_what_it_was_made_of() -> None:
    for row in ROWS:
        for fields in (row.easy, row.hard):
            request = {"method": row.name, **fields}
            assert parse(from_shorthand(to_shorthand(request))) == parse(request)
    assert to_shorthand({"method": "yarn", "factor": 4}) == "yarn:4"
    assert {to_shorthand({"method": name}) for name in METHODS} == set(METHODS)


def test_tokenizer_routes_need_no_model(http: httpx.Client, tokenizer: Any, tiny: Path) -> None:
    for special in (True, False):
        got = http.post("/tokenize", json={"prompt": TEXT[:80], "add_special_tokens": special}).json()
        ids = tokenizer(TEXT[:80], add_special_tokens=special)["input_ids"]
        assert got == {"tokens": ids, "count": len(ids), "max_model_len": 4096, "token_strs": None}
    assert http.post("/tokenize", json={"prompt": "", "add_special_tokens": False}).json()["tokens"] == []
    assert http.post("/detokenize", json={"tokens": ids}).json() == {"prompt": TEXT[:80]}
    assert http.post("/detokenize", json={"tokens": [0, *ids], "model": "tiny@yarn:4"}).json()["prompt"][:5] == "<bos>"
    info = http.get("/tokenizer_info").json()
    assert info == http.get("/tokenizer_info", params={"model": "tiny@ntk:2"}).json()
    assert (info["bos_token"], info["eos_token"], info["pad_token"]) == ("<bos>", "<eos>", None)
    assert (info["chat_template"], info["add_bos_token"], info["vocab_size"]) == (TEMPLATE, True, 384)


def test_a_conversation_has_the_tokens_that_a_chat_reads(http: httpx.Client, tokenizer: Any) -> None:
    def ids(**fields: Any) -> list[int]:
        got = http.post("/tokenize", json={"messages": MESSAGES, **fields}).json()
        assert got["count"] == len(got["tokens"])
        return list(got["tokens"])

    usage = http.post("/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 1}).json()["usage"]
    assert usage["prompt_tokens"] == len(ids())
    assert ids() == tokenizer("<user>The 3 ropes?\n<assistant>", add_special_tokens=False)["input_ids"]
    assert ids(add_generation_prompt=False) == tokenizer("<user>The 3 ropes?\n", add_special_tokens=False)["input_ids"]
    assert ids(add_special_tokens=True) == [0, *ids()]
    assert ids(tools=[], continue_final_message=False) == ids(tools=None) == ids(), "they ask for nothing"
    text = {"prompt": "The 3 ropes", "return_token_strs": True, "add_generation_prompt": True}
    got = http.post("/tokenize", json=text).json()
    assert got["token_strs"] == tokenizer.convert_ids_to_tokens(got["tokens"])
    assert got["token_strs"][0] == "<bos>"


def test_a_conversation_needs_a_template(client: httpx.Client) -> None:
    reply = client.post("/tokenize", json={"messages": MESSAGES})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "no_chat_template")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a", "surprise": 1}, "surprise"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "messages"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": False}, "add_generation_prompt"),
        ("/tokenize", {"messages": [{"role": "tool", "content": "a"}]}, "messages"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {"tokens": [384]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0"),
        ("/detokenize", {"tokens": ["a"]}, "tokens.0"),
    ],
)
def test_tokenizer_routes_refuse(http: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    reply = http.post(path, json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


def test_a_tokenizer_among_several_needs_a_name(checkpoints: Path) -> None:
    """lm-eval asks without one, and would score a model by the tokens of another."""
    with serving(checkpoints) as (url, app):
        assert httpx.get(f"{url}/tokenizer_info").status_code == 200
        models = app.state.models
        shared, models.get("tiny-alibi").tokenizer = models.get("tiny-alibi").tokenizer, models.default.tokenizer
        vars(models.get("tiny-alibi"))["tokenizer_hash"] = "another"
        assert httpx.get(f"{url}/tokenizer_info").status_code == 200, "one object"
        models.get("tiny-alibi").tokenizer = shared
        answer = httpx.get(f"{url}/tokenizer_info")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
        assert "tokenizer=FOLDER" in answer.json()["error"]["message"]
        assert httpx.get(f"{url}/tokenizer_info", params={"model": "tiny-alibi"}).status_code == 200
