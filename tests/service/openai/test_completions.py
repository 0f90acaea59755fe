"""POST /v1/completions over a real socket: prompts, scoring, streams, stops, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from service.api.generation.token_names import TokenNames
from tests.service.conftest import TEXT
from tests.service.openai.conftest import ENDS, answer, chunks, counts, plain_logprobs
from tests.service.serving import wait_for

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
SCORING: dict[str, Any] = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
"""Fields that lm-eval sends, beside the model and the prompt."""


def test_the_four_kinds_of_prompt(http: httpx.Client, tokenizer: Any) -> None:
    texts = [TEXT[:50], TEXT[30:120]]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    by_texts = [choice["text"] for choice in answer(http, prompt=texts, **GREEDY)["choices"]]
    by_ids = answer(http, prompt=ids, **GREEDY)
    assert [choice["text"] for choice in by_ids["choices"]] == by_texts
    assert [choice["index"] for choice in by_ids["choices"]] == [0, 1]
    assert by_ids["usage"] == {
        "prompt_tokens": len(ids[0]) + len(ids[1]),
        "completion_tokens": 24,
        "total_tokens": len(ids[0]) + len(ids[1]) + 24,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert [answer(http, prompt=p, **GREEDY)["choices"][0]["text"] for p in (texts[0], ids[1])] == by_texts


def test_greedy_text_is_the_models(http: httpx.Client, tiny: Path, tokenizer: Any) -> None:
    got = answer(http, prompt=TEXT[:60], logprobs=3, **GREEDY)["choices"][0]
    ids = tokenizer(TEXT[:60])["input_ids"]
    for entry, top in zip(got["logprobs"]["token_logprobs"], got["logprobs"]["top_logprobs"], strict=True):
        row = plain_logprobs(tiny, ids)[-1]
        assert entry == pytest.approx(float(row.max()), abs=1e-4)
        assert sorted(top.values(), reverse=True) == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
        ids.append(int(row.argmax()))
    assert got["text"] == tokenizer.decode(ids[-12:])
    assert (got["finish_reason"], got["pe"]["method"]) == ("length", "default")


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
@pytest.mark.parametrize("length", [1, 2, 64, 65, 300])
def test_echo_scores_the_prompt_as_plain_transformers_does(
    http: httpx.Client, tiny: Path, tokenizer: Any, max_tokens: int, length: int
) -> None:
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"][:length]
    body: dict[str, Any] = {**SCORING, "max_tokens": max_tokens, "logprobs": 2}
    choice = answer(http, prompt=[ids], **body)["choices"][0]
    got = choice["logprobs"]
    assert {len(values) for values in got.values()} == {length + max_tokens}, "one entry per token, no BOS added"
    assert (got["token_logprobs"][0], got["top_logprobs"][0]) == (None, None)
    rows = plain_logprobs(tiny, ids)
    for i in range(1, length):
        own, top = got["token_logprobs"][i], got["top_logprobs"][i]
        assert own == pytest.approx(float(rows[i - 1, ids[i]]), abs=1e-4)
        assert top[got["tokens"][i]] == own, "identical and unrounded"
        assert sorted(top.values(), reverse=True)[:2] == pytest.approx(rows[i - 1].topk(2).values.tolist(), abs=1e-4)
        assert (own == max(top.values())) == (ids[i] == int(rows[i - 1].argmax()))
    if max_tokens:
        assert got["token_logprobs"][length] == pytest.approx(float(rows[-1].max()), abs=1e-4)
    assert choice["text"].startswith(tokenizer.decode(ids))
    assert choice["finish_reason"] == "length"
    for offset, token in zip(got["text_offset"][:length], got["tokens"], strict=False):
        assert choice["text"][offset:].startswith(token)


def test_one_token_is_generated_even_if_it_ends_the_text(http: httpx.Client) -> None:
    for extra in ({}, {"temperature": 1e-3}):
        got = answer(http, prompt=[ENDS], **{**SCORING, **extra})
        assert got["choices"][0]["finish_reason"] == "stop"
        assert len(got["choices"][0]["logprobs"]["token_logprobs"]) == len(ENDS) + 1
        assert got["usage"]["completion_tokens"] == 1


def test_texts_get_what_the_tokenizer_adds_and_keep_their_spelling(http: httpx.Client) -> None:
    text = "The  naïve 東京 ropes 🙂 "
    choice = answer(http, prompt=text, **{**SCORING, "max_tokens": 0})["choices"][0]
    assert choice["text"] == text
    assert choice["logprobs"]["tokens"][0] == "<bos>"
    offsets = choice["logprobs"]["text_offset"]
    assert (offsets[:2], offsets) == ([0, 0], sorted(offsets))
    assert offsets[-1] <= len(text)


def test_scoring_uses_the_encoding_asked_for(http: httpx.Client, tokenizer: Any) -> None:
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"][:200]
    yarn = {"method": "yarn", "factor": 4}
    by_field = answer(http, prompt=ids, pe=yarn, **SCORING)["choices"][0]
    by_alias = answer(http, prompt=ids, model="tiny@yarn:4", **SCORING)["choices"][0]
    default = answer(http, prompt=ids, **SCORING)["choices"][0]
    assert by_field == by_alias
    assert (by_field["pe"]["method"], by_field["pe"]["factor"]) == ("yarn", 4)
    assert by_field["logprobs"]["token_logprobs"] != default["logprobs"]["token_logprobs"]


def test_prompt_logprobs_as_vllm_gives_them(http: httpx.Client, tiny: Path, tokenizer: Any) -> None:
    ids = tokenizer(TEXT)["input_ids"][:80]
    got = answer(http, prompt=ids, prompt_logprobs=2, **GREEDY)["choices"][0]["prompt_logprobs"]
    rows = plain_logprobs(tiny, ids)
    assert (got[0], len(got)) == (None, len(ids))
    for i, entry in enumerate(got[1:], 1):
        row, own = rows[i - 1], entry[str(ids[i])]
        assert own["logprob"] == pytest.approx(float(row[ids[i]]), abs=1e-4)
        assert own["rank"] == int((row > row[ids[i]]).sum()) + 1
        assert own["decoded_token"] == TokenNames(tokenizer)(ids[i])
        assert sorted(value["rank"] for value in entry.values())[:2] == [1, 2]
        assert len(entry) == (2 if own["rank"] <= 2 else 3)
    alone = answer(http, prompt=ids, prompt_logprobs=0, max_tokens=0)["choices"][0]
    assert [len(entry) for entry in alone["prompt_logprobs"][1:]] == [1] * 79
    assert (alone["text"], alone["logprobs"]) == ("", None)


def test_n_and_seed(http: httpx.Client) -> None:
    body: dict[str, Any] = {"prompt": [TEXT[:40], TEXT[:90]], "n": 3, "seed": 7, "temperature": 1.0, "max_tokens": 8}
    first = answer(http, **body)["choices"]
    assert [choice["index"] for choice in first] == list(range(6))
    assert len({choice["text"] for choice in first}) == 6
    assert first == answer(http, **body)["choices"]
    second_draw = answer(http, prompt=TEXT[:90], seed=8, temperature=1.0, max_tokens=8)["choices"][0]
    assert second_draw["text"] == first[4]["text"]


def test_a_stream_adds_up_to_the_answer(http: httpx.Client) -> None:
    body: dict[str, Any] = {
        "prompt": [TEXT[:40], TEXT[:300]],
        "n": 2,
        "echo": True,
        "logprobs": 1,
        "seed": 3,
        "max_tokens": 20,
    }
    whole = answer(http, **body)
    got = chunks(http, **body, stream_options={"include_usage": True})
    assert got[-1]["choices"] == []
    assert counts(got[-1]["usage"]) == counts(whole["usage"])
    assert all(chunk["usage"] is None for chunk in got[:-1])
    assert len({chunk["id"] for chunk in got}) == 1
    for choice in whole["choices"]:
        mine = [c for chunk in got for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"]
        for key, values in choice["logprobs"].items():
            streamed = [value for c in mine for value in c["logprobs"][key]]
            if key in ("tokens", "text_offset"):
                assert streamed == values
            else:  # the neighbours in a batch show in the last digits
                assert (streamed[0], values[0]) == (None, None)
                assert all(a == pytest.approx(b, abs=1e-4) for a, b in zip(streamed[1:], values[1:], strict=True))
        assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + [choice["finish_reason"]]
        assert mine[-1]["pe"] == choice["pe"]
    assert all("usage" not in chunk for chunk in chunks(http, prompt="a", max_tokens=2))


def test_stop_strings_across_tokens_are_never_shown(http: httpx.Client) -> None:
    body: dict[str, Any] = {"prompt": TEXT[:200], "temperature": 0, "max_tokens": 40, "logprobs": 0}
    whole = answer(http, **body)["choices"][0]
    offsets = [offset for offset in whole["logprobs"]["text_offset"] if 8 < offset < len(whole["text"]) - 4]
    for boundary in offsets[2:6]:
        stop = whole["text"][boundary - 1 : boundary + 2]  # one character before, two after a token boundary
        cut = whole["text"].index(stop)
        got = answer(http, **body, stop=[stop, "never there"])["choices"][0]
        assert (got["text"], got["finish_reason"]) == (whole["text"][:cut], "stop")
        assert all(offset < max(cut, 1) for offset in got["logprobs"]["text_offset"])
        streamed = [chunk["choices"][0] for chunk in chunks(http, **body, stop=stop)]
        assert "".join(choice["text"] for choice in streamed) == whole["text"][:cut]
        assert [t for c in streamed for t in c["logprobs"]["tokens"]] == got["logprobs"]["tokens"]
        kept = {**body, "stop": [stop, "never there"], "include_stop_str_in_output": True}
        got = answer(http, **kept)["choices"][0]
        assert (got["text"], got["finish_reason"]) == (whole["text"][: cut + len(stop)], "stop")
        assert got["logprobs"]["tokens"] == whole["logprobs"]["tokens"][: len(got["logprobs"]["tokens"])]
        assert max(got["logprobs"]["text_offset"]) < cut + len(stop) <= len("".join(got["logprobs"]["tokens"]))
        streamed = [chunk["choices"][0] for chunk in chunks(http, **kept)]
        assert "".join(choice["text"] for choice in streamed) == got["text"]
        assert [t for c in streamed for t in c["logprobs"]["tokens"]] == got["logprobs"]["tokens"]


def test_a_context_that_is_too_long_is_refused_before_a_stream_opens(http: httpx.Client) -> None:
    for extra in ({}, {"stream": True}, {"model": "tiny@linear:4"}):
        reply = http.post("/v1/completions", json={"prompt": [5] * 4000, "max_tokens": 100, **extra})
        error = reply.json()["error"]
        assert (reply.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
        assert (error["n_prompt_tokens"], error["n_ctx"]) == (4000, 4096)
        assert "maximum context length is 4096 tokens" in error["message"]
        assert "exceeds the available context size" in error["message"]


@pytest.mark.parametrize(
    ("change", "param", "says"),
    [
        (
            {"prompt": "", "add_special_tokens": False},
            "prompt",
            "needs special tokens that the tokenizer adds, such as BOS",
        ),
        ({"prompt": ["a", ""], "add_special_tokens": False}, "prompt", "holds no tokens"),
        ({"prompt": [384]}, "prompt", "0..383"),
        ({"prompt": None}, "prompt", "required"),
        ({"max_tokens": 0}, "max_tokens", "without echo"),
        ({"max_tokens": 1025}, "max_tokens", "at most 1024"),
        ({"n": 65}, "n", "at most 64"),
        ({"prompt": [[5]] * 65}, "prompt", "at most 64"),
        ({"logprobs": 21}, "logprobs", "must be at most 20, not 21"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "only with stream"),
        ({"stop": ["a", ""]}, "stop.1", "at least 1"),
        ({"best_of": 2}, "best_of", "best_of is not supported by this server; leave it out (or send 1)"),
        ({"suffix": "end"}, "suffix", 'leave it out (or send "")'),
        ({"guided_json": {}}, "guided_json", "not supported by this server; leave it out"),
        ({"pe": {"method": "yarn", "factor": 0.5}}, "pe.factor", "must be at least 1, not 0.5"),
        ({"pe": {"method": "yarn", "factor": 2}, "model": "tiny@yarn:4"}, "pe", "already names an encoding"),
        ({"timeout_s": 1e9}, "timeout_s", "at most"),
    ],
)
def test_refusals_name_the_field(http: httpx.Client, change: dict[str, Any], param: str, says: str) -> None:
    reply = http.post("/v1/completions", json={"prompt": "a", **change})
    error = reply.json()["error"]
    assert (reply.status_code, error["type"]) == (400, "invalid_request_error"), error
    assert error["param"] == param
    assert says in error["message"]


def test_openai_fields_at_the_value_that_asks_for_nothing(http: httpx.Client) -> None:
    neutral: dict[str, Any] = {
        "user": "me",
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "best_of": 1,
        "logit_bias": {},
    }
    nothing: dict[str, Any] = dict.fromkeys(
        ("suffix", "stop", "n", "seed", "logprobs", "stream", "echo", "model", "stream_options")
    )
    plainly = answer(http, prompt="The ropes", **GREEDY)["choices"]
    assert answer(http, prompt="The ropes", **GREEDY, **neutral, **nothing, top_k=-1)["choices"] == plainly


def test_an_impossible_token_has_a_number_in_json(tiny: Path) -> None:
    from service.api.generation.pieces import Token
    from service.api.openai import logprobs
    from service.engine.request import TokenLogprobs

    class Letters:
        def decode(self, ids: list[int]) -> str:
            return "\ufffd" if ids[0] > 9 else "x"

        def convert_ids_to_tokens(self, token_id: int) -> str:
            return f"<0x{token_id:02X}>"

    names = TokenNames(Letters())
    tokens = [Token(3, 0, TokenLogprobs(float("-inf"), ((4, -0.5), (0xCC, float("-inf")))))]
    got = logprobs.legacy(tokens, names)
    assert got.token_logprobs == [-9999.0]
    assert got.top_logprobs == [{"x": -9999.0, "token_id:4": -0.5, "bytes:\\xcc": -9999.0}], "equal texts stay apart"


def test_parts_of_characters_have_names_of_their_own(http: httpx.Client, tokenizer: Any) -> None:
    """In GPT-2's spelling, the byte 0xE9 is é. The tokenizer has a token of é too, or none: names differ from it."""
    (part,) = (i for spelling, i in tokenizer.get_vocab().items() if spelling == "é")
    body: dict[str, Any] = {"max_tokens": 2, "temperature": 0, "logprobs": 1, "logit_bias": {str(part): 100}}
    choice = answer(http, prompt="x", echo=True, **body)["choices"][0]
    shown = choice["logprobs"]
    assert shown["tokens"][-2:] == ["bytes:\\xe9"] * 2
    assert all("bytes:\\xe9" in top for top in shown["top_logprobs"][-2:])
    assert shown["text_offset"][-2:] == [1, 2], "one that is not whole is a character for the next one"
    assert choice["text"] == "x" + tokenizer.decode([part] * 2)
    chat = answer(
        http, "/v1/chat/completions", messages=[{"role": "user", "content": "x"}], **body | {"logprobs": True}
    )
    assert {entry["token"] for entry in chat["choices"][0]["logprobs"]["content"]} == {"bytes:\\xe9"}


def test_every_token_has_one_name(tokenizer: Any) -> None:
    names = TokenNames(tokenizer)
    assert len({names(token_id) for token_id in range(len(tokenizer))}) == len(tokenizer)


def test_an_empty_prompt_begins_at_bos(http: httpx.Client) -> None:
    """An empty prompt is the tokens that the tokenizer adds, also beside others, and where the prompt is scored."""
    fields: dict[str, Any] = {**GREEDY, "logprobs": 1}
    begun = answer(http, prompt=[0], **fields)["choices"][0]
    assert answer(http, prompt="", **fields)["choices"][0] == begun
    assert answer(http, prompt=["The", ""], **GREEDY)["choices"][1]["text"] == begun["text"]
    scored = answer(http, prompt="", **fields, echo=True)["choices"][0]
    assert (scored["text"], scored["logprobs"]["token_logprobs"][0]) == (begun["text"], None)
    assert scored["logprobs"]["tokens"] == ["<bos>", *begun["logprobs"]["tokens"]]
    same = http.post("/generate", json={"prompt": ["", [0]], "max_new_tokens": 12}).json()["results"]
    assert [result["text"] for result in same] == [begun["text"]] * 2
    for body in ({"prompt": ""}, {"text": ""}):
        limit = (
            {"max_tokens": 12} if "prompt" in body else {"sampling_params": {"max_new_tokens": 12, "temperature": 0}}
        )
        put = http.put("/generate", json={**body, **limit, **({"temperature": 0} if "prompt" in body else {})})
        assert put.json()["text"] in (begun["text"], [begun["text"]])


def test_a_client_that_leaves_ends_its_scoring(http: httpx.Client) -> None:
    ids = [5 + n % 300 for n in range(4000)]
    with pytest.raises(httpx.ReadTimeout):
        http.post("/v1/completions", json={"prompt": [ids] * 16, **SCORING, "max_tokens": 0}, timeout=0.3)

    def held() -> list[int]:
        load = http.get("/health/ready").json()["models"]["tiny"]
        return [load[name] for name in ("scoring", "waiting", "slots_in_use")]

    wait_for(lambda: held() == [0, 0, 0], 5)


@pytest.mark.parametrize("body", [{"max_tokens": 50}, SCORING], ids=["text", "scores"])
def test_a_deadline_ends_the_work(http: httpx.Client, body: dict[str, Any]) -> None:
    reply = http.post("/v1/completions", json={"prompt": [[7] * 4000] * 8, "timeout_s": 0.1, **body})
    assert (reply.status_code, reply.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert reply.headers["x-should-retry"] == "false"


def test_memory_of_scores_is_bounded_by_the_chunk(tiny: Path) -> None:
    """Whatever the prompt's length, no logits of more than one chunk exist at once."""
    from patches import parse, patched
    from service.evaluation.scoring.token_scores import prompt_scores
    from tests.service.openai.conftest import plain

    model = plain(tiny)
    widest = 0

    def watch(module: torch.nn.Module, args: object, output: torch.Tensor) -> None:
        nonlocal widest
        widest = max(widest, output.shape[1])

    hook = model.lm_head.register_forward_hook(watch)
    try:
        with patched(model) as patch:
            resolved = patch.resolve(parse({"method": "default"}), 500)
            work = prompt_scores(patch, resolved, [7] * 500, 64, top=3, with_next=True)
            assert sum(work) == 500
            assert patch.slots.in_use() == 0
    finally:
        hook.remove()
    assert widest == 64
