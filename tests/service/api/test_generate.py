"""POST /generate over a real socket: encodings side by side, streams, seeds, stops, refusals, cancelling."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from patches import METHODS
from tests.service.conftest import TEXT
from tests.service.serving import wait_for

ENCODINGS = [
    {"method": "default"},
    {"method": "none", "attention_temperature": {"kind": "constant", "multiplier": 1.2, "rotated_only": False}},
    {"method": "linear", "factor": 4},
    {"method": "ntk", "factor": 4},
    {"method": "dynamic", "factor": 2},
    {"method": "yarn", "factor": 4},
    {"method": "alibi", "use_variant": False},
    {"method": "self_extend", "group_size": 4, "neighbor_window": 16},
]
PROMPTS = [TEXT[: 40 + 70 * n] for n in range(8)]


def generate(client: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = client.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(client: httpx.Client, **body: Any) -> list[Any]:
    with client.stream("POST", "/generate", json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_greedy_tokens_equal_transformers_generate(client: httpx.Client, checkpoints: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoints / "tiny").eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoints / "tiny")
    ids = tokenizer(PROMPTS[2], return_tensors="pt")["input_ids"]
    expected = model.generate(ids, max_new_tokens=24, do_sample=False, pad_token_id=1)[0, ids.shape[1] :]
    answer = generate(client, prompt=PROMPTS[2], max_new_tokens=24)["results"][0]
    assert answer["token_ids"] == expected.tolist()
    assert answer["text"] == tokenizer.decode(expected, skip_special_tokens=True)
    assert answer["usage"] == {"prompt_tokens": ids.shape[1], "completion_tokens": len(expected)}


def test_eight_encodings_at_once_equal_each_alone(client: httpx.Client) -> None:
    bodies = [{"prompt": p, "pe": e, "max_new_tokens": 20} for p, e in zip(PROMPTS, ENCODINGS, strict=True)]
    alone = [generate(client, **body)["results"][0]["token_ids"] for body in bodies]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda body: generate(client, **body)["results"][0]["token_ids"], bodies))
    assert together == alone


def test_one_prompt_under_several_encodings(client: httpx.Client) -> None:
    answer = generate(client, prompt=PROMPTS[5], pe=ENCODINGS, max_new_tokens=12)
    assert [r["pe"]["method"] for r in answer["results"]] == [e["method"] for e in ENCODINGS]
    assert len({tuple(r["token_ids"]) for r in answer["results"]}) > 4, "encodings must take effect"
    for encoding, result in zip(ENCODINGS, answer["results"], strict=True):
        assert encoding.items() <= result["pe"].items()
        assert (
            generate(client, prompt=PROMPTS[5], pe=encoding, max_new_tokens=12)["results"][0]["token_ids"]
            == (result["token_ids"])
        )


def test_the_prefix_cache_never_crosses_encodings(client: httpx.Client) -> None:
    prompt = PROMPTS[7] + " Only here."  # several pages long, not used by another test
    first = {e["method"]: generate(client, prompt=prompt, pe=e, max_new_tokens=8)["results"][0] for e in ENCODINGS}
    for encoding in reversed(ENCODINGS):  # every prefix is cached now, under every encoding
        again = generate(client, prompt=prompt, pe=encoding, max_new_tokens=8)["results"][0]
        assert again["token_ids"] == first[encoding["method"]]["token_ids"]


def test_the_trained_variant_answers(client: httpx.Client) -> None:
    chosen, kept = generate(
        client, prompt=PROMPTS[3], pe=[{"method": "alibi"}, {"method": "alibi", "use_variant": False}]
    )["results"]
    assert (chosen["model"], kept["model"]) == ("tiny-alibi", "tiny")
    direct = generate(client, prompt=PROMPTS[3], model="tiny-alibi")["results"][0]
    assert direct["token_ids"] == chosen["token_ids"] != kept["token_ids"]
    assert direct["pe"]["method"] == "alibi"
    assert direct["pe"]["requested"] == "default"


def test_a_rope_parameters_object_pastes_in(client: httpx.Client) -> None:
    pasted = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    pasted |= {"original_max_position_embeddings": 64, "rope_theta": 10000.0}
    pe = generate(client, prompt="a", pe=pasted, max_new_tokens=1)["results"][0]["pe"]
    assert pe["method"] == "llama3"
    assert pe["original_max_position_embeddings"] == 64


def test_seed_decides_whatever_the_company(client: httpx.Client) -> None:
    body = {"prompt": PROMPTS[1], "temperature": 1.0, "top_p": 0.95, "top_k": 50, "seed": 11, "max_new_tokens": 16}
    alone = generate(client, **body)["results"][0]["token_ids"]
    noise = [{**body, "prompt": p, "seed": None} for p in PROMPTS]
    with ThreadPoolExecutor(9) as pool:
        crowded = list(pool.map(lambda b: generate(client, **b)["results"][0]["token_ids"], [body, *noise]))
    assert crowded[0] == alone
    assert generate(client, **{**body, "seed": 12})["results"][0]["token_ids"] != alone


def test_top_k_one_is_greedy(client: httpx.Client) -> None:
    greedy = generate(client, prompt=PROMPTS[1], max_new_tokens=12)["results"][0]["token_ids"]
    sampled = generate(client, prompt=PROMPTS[1], max_new_tokens=12, temperature=2.0, top_k=1)["results"][0]
    assert sampled["token_ids"] == greedy


def test_logprobs_are_the_models_own(client: httpx.Client, checkpoints: Path) -> None:
    answer = generate(client, prompt=PROMPTS[1], max_new_tokens=5, logprobs=3)["results"][0]
    model = AutoModelForCausalLM.from_pretrained(checkpoints / "tiny").eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoints / "tiny")
    prompt = tokenizer(PROMPTS[1])["input_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer["token_ids"]])).logits[0]
    expected = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    for row, entry in zip(expected, answer["logprobs"], strict=True):
        assert entry["logprob"] == pytest.approx(float(row[entry["token_id"]]), abs=1e-4)
        assert [a["token_id"] for a in entry["top"]] == row.topk(3).indices.tolist()
        assert entry["logprob"] == entry["top"][0]["logprob"]


def test_stream_adds_up_to_the_answer(client: httpx.Client) -> None:
    body = {"prompt": PROMPTS[4], "pe": ENCODINGS[:3], "max_new_tokens": 16}
    whole = generate(client, **body)["results"]
    got = events(client, **body)
    for result in whole:
        mine = [event for event in got if event["index"] == result["index"]]
        assert "".join(event.get("text", "") for event in mine) == result["text"]
        assert [t for event in mine for t in event.get("token_ids", [])] == result["token_ids"]
        assert mine[-1]["finish_reason"] == result["finish_reason"]
        assert mine[-1]["pe"] == result["pe"]


def test_a_stream_has_each_tokens_logprobs_with_the_token(client: httpx.Client) -> None:
    body = {"prompt": PROMPTS[4], "pe": ENCODINGS[:2], "max_new_tokens": 12}
    got = events(client, **body, logprobs=2)
    for index in range(2):
        *deltas, end = [event for event in got if event["index"] == index]
        assert [entry for delta in deltas for entry in delta.get("logprobs", [])] == end["logprobs"]
        for delta in deltas:
            assert [entry["token_id"] for entry in delta["logprobs"]] == delta["token_ids"]
    assert not any("logprobs" in event for event in events(client, **body) if "text" in event)


def test_stop_strings_end_and_are_left_out(client: httpx.Client) -> None:
    whole = generate(client, prompt=PROMPTS[4], max_new_tokens=24)["results"][0]["text"]
    stop = whole[len(whole) // 2 : len(whole) // 2 + 3]
    answer = generate(client, prompt=PROMPTS[4], max_new_tokens=24, stop=[stop])["results"][0]
    assert answer["text"] == whole[: whole.index(stop)]
    assert answer["finish_reason"] == "stop"
    streamed = events(client, prompt=PROMPTS[4], max_new_tokens=24, stop=stop)
    assert "".join(event.get("text", "") for event in streamed) == answer["text"]


@pytest.mark.parametrize(
    ("change", "param", "says"),
    [
        ({"pe": {"method": "yarm"}}, "pe.method", "unknown method 'yarm': did you mean yarn?"),
        ({"pe": {"method": "zzz"}}, "pe.method", f"and {len(METHODS) - 6} others: see GET /methods"),
        ({"pe": "yarm:4"}, "pe", "unknown method 'yarm': did you mean yarn?"),
        ({"pe": ["default", "yarn:0.5"]}, "pe.1.factor", "must be at least 1, not 0.5"),
        ({"pe": "self_extend:base=yarn:four"}, "pe.base.factor", "must be a number, not 'four'"),
        ({"pe": 4}, "pe", "an encoding is an object with method, or a text such as 'yarn:4'"),
        ({"pe": {"factor": 4}}, "pe.method", "required"),
        ({"pe": {"method": "yarn", "factor": 0.5}}, "pe.factor", "must be at least 1, not 0.5"),
        ({"pe": {"method": "yarn", "factor": 4, "beta": 1}}, "pe.beta", "did you mean beta_slow or beta_fast?"),
        ({"pe": {"method": "yarn", "factor": "four"}}, "pe.factor", "must be a number, not 'four'"),
        ({"pe": [{"method": "linear"}]}, "pe.0.factor", "required"),
        ({"pe": {"method": "yarn"}}, "pe", "factor: required"),
        ({"pe": ["default", "yarn"]}, "pe.1", "factor: required"),
        ({"pe": []}, "pe", "at least 1"),
        ({"pe": {"method": "longrope", "short_factor": [1.0], "long_factor": [2.0]}}, "pe", "8 rotary pairs"),
        ({"pe": {"method": "yarn", "factor": 2}, "model": "tiny-alibi"}, "pe", "without rotary"),
        ({"prompt": ["a", []]}, "prompt.1", "at least 1"),
        ({"stop": [""]}, "stop.0", "at least 1 character"),
        ({"stream": "perhaps"}, "stream", "must be true or false, not 'perhaps'"),
        ({"prompt": []}, "prompt", "at least 1"),
        ({"prompt": [1, 2, 100000]}, "prompt", "0..383"),
        ({"prompt": [1, -2]}, "prompt.1", "must be at least 0, not -2"),
        ({"prompt": {"a": 1}}, "prompt", "text, a list of token ids"),
        ({"max_new_tokens": 0}, "max_new_tokens", "must be at least 1, not 0"),
        ({"max_new_tokens": 1025}, "max_new_tokens", "at most 1024"),
        ({"prompt": list(range(300)) * 14, "max_new_tokens": 10}, "prompt", "4096"),
        ({"temperature": -1}, "temperature", "must be at least 0, not -1"),
        ({"top_p": 0}, "top_p", "must be above 0, not 0"),
        ({"model": "nobody"}, "model", "tiny"),
        ({"temprature": 1}, "temprature", "unknown field: did you mean temperature?"),
        ({"temperature": 10**400}, "temperature", f"must be within ±1.8e+308, not 1{'0' * 63}..."),
        ({"temperature": -(10**400)}, "temperature", "must be within ±1.8e+308, not -1"),
        ({"stop": 4}, "stop", "must be a text or a list of texts, not 4"),
        ({"max_tokens": 1}, "max_tokens", "did you mean max_new_tokens"),
        ({"zzz": 1}, "zzz", "unknown field: there are prompt, pe, model, max_new_tokens"),
    ],
)
def test_refusals_name_the_field_and_what_is_allowed(
    client: httpx.Client, change: dict[str, Any], param: str, says: str
) -> None:
    answer = client.post("/generate", json={"prompt": "a", "max_new_tokens": 4, **change})
    error = answer.json()["error"]
    assert answer.status_code == (404 if param == "model" else 400)
    assert error["param"] == param
    assert says in error["message"]
    numbers = {"n_prompt_tokens", "n_new_tokens", "n_ctx"} if error["code"] == "context_length_exceeded" else set()
    assert set(error) == {"message", "type", "param", "code"} | numbers


def test_a_refusal_is_one_sentence(client: httpx.Client) -> None:
    def message(body: Any) -> str:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = client.post("/generate", content=content, headers={"Content-Type": "application/json"})
        return str(answer.json()["error"]["message"])

    assert message({"prompt": "a", "pe": {"method": "yarm"}}) == "pe.method: unknown method 'yarm': did you mean yarn?"
    assert message({"prompt": "a", "temprature": 1}) == "temprature: unknown field: did you mean temperature?"
    assert message({"pe": "default"}) == "prompt: required"
    assert message(b'{"prompt": "a", x}').startswith("body: not valid JSON: ")
    assert message(b'{"prompt": "a", x}').endswith(" at character 17")
    assert message(b'{"prompt": "a", "seed": 1%s}' % (b"0" * 4300)) == (
        "body: not valid JSON: a number has more than 4300 digits"
    )
    assert message([]) == "body: must be an object, not a list"
    many = message({"prompt": "a", "pe": [{"method": "zzz"}] * 200})
    assert many.startswith("pe.0.method: unknown method 'zzz': there are default, linear, ")
    assert "methods`; pe.1.method: " in many
    assert many.endswith("; and more")


def test_nan_and_broken_json_are_refused(client: httpx.Client) -> None:
    for content in (b'{"prompt": "a", "temperature": NaN}', b'{"prompt": "a"', b"[]", b"\xff\xfe"):
        answer = client.post("/generate", content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400, content
        assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_flood_of_problems_gets_a_bounded_answer(client: httpx.Client) -> None:
    answer = client.post("/generate", json={"prompt": "a", "pe": [{"method": "x" * 2000}] * 500})
    assert answer.status_code == 400
    assert len(answer.content) < 5000


def test_a_client_that_leaves_frees_its_slot_and_cache(client: httpx.Client) -> None:
    with client.stream(
        "POST", "/generate", json={"prompt": PROMPTS[0], "max_new_tokens": 1000, "ignore_eos": True, "stream": True}
    ) as answer:
        lines = answer.iter_lines()  # kept: httpx closes the connection with its iterator
        next(lines)
        assert _load(client)["running"] == 1
    assert _settled(client)["running"] == 0
    with pytest.raises(httpx.ReadTimeout):
        client.post("/generate", json={"prompt": PROMPTS[0], "max_new_tokens": 1000, "ignore_eos": True}, timeout=0.2)
    load = _settled(client)
    assert load["running"] == 0
    assert load["slots_in_use"] == 0


def _load(client: httpx.Client) -> dict[str, int]:
    return client.get("/health/ready").json()["models"]["tiny"]


def _settled(client: httpx.Client) -> dict[str, int]:
    """The load once nothing runs any more."""
    wait_for(lambda: _load(client)["running"] + _load(client)["slots_in_use"] == 0)
    return _load(client)
