"""``auto`` in generation: the encoding of the reserved length, its echo, its origin, and ranges in the request."""

from __future__ import annotations

import random
from typing import Any

import httpx
from fastapi import FastAPI

from tests.methods import rows
from tests.service.policy.asking import NEW, post, prompt, refusal, result
from tests.service.policy.conftest import RANGES
from tests.service.serving import events

LENGTHS = {20: (0, 64), 64: (0, 64), 65: (64, 128), 128: (64, 128), 129: (128, 256), 256: (128, 256)}
"""Reserved length -> the range that it lies in."""

CHOSEN = {64: "default", 128: "self_extend", 256: "yarn"}


class TestWithAPolicy:
    def test_every_reserved_length_has_the_encoding_of_its_range(self, served: tuple[str, FastAPI]) -> None:
        """The same request with the echoed encoding, and with the one that the policy names, is the same request."""
        url = served[0]
        for reserved, (above, up_to) in LENGTHS.items():
            found = result(url, reserved, "auto")
            origin = {"source": "file", "calibration": "a" * 32, "created": "2026-11-22T10:00:00+00:00"}
            assert found["auto"] == {**origin, "above": above, "up_to": up_to}
            assert found["pe"]["method"] == CHOSEN[up_to]
            fixed = next(r["pe"] for r in RANGES if r["up_to"] == up_to)
            for pe in (found["pe"], fixed):
                again = result(url, reserved, pe)
                assert (again["pe"], again["token_ids"]) == (found["pe"], found["token_ids"])
                assert again["auto"] is None

    def test_the_encodings_of_the_ranges_give_different_tokens(self, served: tuple[str, FastAPI]) -> None:
        ids = {pe: result(served[0], 200, pe, max_new_tokens=32)["token_ids"] for pe in ("auto", "default")}
        assert ids["auto"] != ids["default"]

    def test_beyond_the_last_range_a_request_is_refused(self, served: tuple[str, FastAPI]) -> None:
        error = refusal(served[0], prompt=prompt(257), pe="auto", max_new_tokens=NEW)
        assert error["param"] == "pe"
        assert "257" in error["message"]
        assert "256" in error["message"]

    def test_the_policy_of_the_operator_is_not_from_a_recommendation(self, served: tuple[str, FastAPI]) -> None:
        error = httpx.delete(f"{served[0]}/policies/tiny").json()["error"]
        assert error["message"] == "this server has no policy for 'tiny' from a recommendation"

    def test_new_tokens_count(self, served: tuple[str, FastAPI]) -> None:
        assert result(served[0], 60, "auto", max_new_tokens=NEW + 5)["auto"]["up_to"] == 128

    def test_auto_is_an_item_of_a_list_and_each_prompt_has_its_own(self, served: tuple[str, FastAPI]) -> None:
        body = {"prompt": [prompt(20), prompt(200)], "pe": ["default", "auto"], "max_new_tokens": NEW}
        results = post(served[0], **body)["results"]
        assert [found["pe"]["method"] for found in results] == ["default", "default", "default", "yarn"]
        assert [found["auto"] and found["auto"]["up_to"] for found in results] == [None, 64, None, 256]
        assert results[0]["token_ids"] == results[1]["token_ids"], "within the trained length the tokens are native"

    def test_a_stream_ends_with_the_choice(self, served: tuple[str, FastAPI]) -> None:
        body = {"prompt": prompt(200), "pe": "auto", "max_new_tokens": NEW, "ignore_eos": True}
        found = events(served[0], **body)
        end = found[-1][1]
        whole = result(served[0], 200, "auto")
        assert (end["pe"], end["auto"]) == (whole["pe"], whole["auto"])
        assert [t for _, data in found for t in data.get("token_ids", [])] == whole["token_ids"]

    def test_the_openai_routes(self, served: tuple[str, FastAPI]) -> None:
        url = served[0]
        greedy = {"prompt": prompt(200), "max_tokens": NEW, "temperature": 0}
        (fixed,) = post(url, "/v1/completions", **greedy, pe="yarn:4")["choices"]
        for names in ({"pe": "auto"}, {"model": "tiny@auto"}, {"model": "tiny@auto", "pe": "auto"}):
            (found,) = post(url, "/v1/completions", **greedy, **names)["choices"]
            assert found["auto"]["up_to"] == 256
            assert (found["text"], found["pe"]) == (fixed["text"], fixed["pe"])
        chunks = events(url, "/v1/completions", **greedy, model="tiny@auto")
        assert [c["choices"][0]["auto"] for _, c in chunks][:-1] == [None] * (len(chunks) - 1)
        assert chunks[-1][1]["choices"][0]["auto"]["up_to"] == 256
        scored = {"prompt": [prompt(100)], "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}
        (found,) = post(url, "/v1/completions", **scored, model="tiny@auto")["choices"]
        (same,) = post(url, "/v1/completions", **scored, pe=found["pe"])["choices"]
        assert found["pe"]["method"] == "self_extend"
        assert found["logprobs"] == same["logprobs"]
        error = refusal(url, "/v1/completions", **greedy, model="tiny@auto", pe="yarn:4")
        assert error["param"] == "pe"
        assert "auto:4" in refusal(url, "/v1/completions", 404, **greedy, model="tiny@auto:4")["message"]
        assert httpx.get(f"{url}/v1/models/tiny@auto").json()["parent"] == "tiny"

    def test_a_chat_without_a_limit_ends_with_the_last_range(self, served: tuple[str, FastAPI]) -> None:
        url, path = served[0], "/v1/chat/completions"
        body = {"messages": [{"role": "user", "content": "The 3 ropes?"}], "temperature": 0, "ignore_eos": True}
        for names in ({"pe": "auto"}, {"model": "tiny@auto"}):
            answer = post(url, path, **body, **names)
            assert answer["usage"]["total_tokens"] == 256
            (choice,) = answer["choices"]
            assert (choice["pe"]["method"], choice["auto"]["up_to"]) == ("yarn", 256)
        long = body | {"messages": [{"role": "user", "content": "The 3 ropes? " * 100}]}
        assert "ends at 256" in refusal(url, path, **long, pe="auto")["message"]
        assert "ends at 256" in refusal(url, path, **body, pe="auto", max_tokens=256)["message"]
        assert "min_tokens" in refusal(url, path, **body, pe="auto", min_tokens=256)["message"]

    def test_metrics_name_the_encoding_in_effect(self, served: tuple[str, FastAPI]) -> None:
        url = served[0]
        result(url, 200, "auto")
        text = httpx.get(f"{url}/metrics").text
        assert 'pe_method="yarn"' in text
        assert 'pe_method="auto"' not in text

    def test_cached_prefixes_are_those_of_the_encoding(self, served: tuple[str, FastAPI]) -> None:
        url = served[0]

        def hits() -> float:
            lines = httpx.get(f"{url}/metrics").text.splitlines()
            return sum(float(line.split()[-1]) for line in lines if "prefix_cache_hits_total{" in line)

        result(url, 200, "yarn:4", prompt=prompt(200, seed=3))
        before = hits()
        result(url, 200, "auto", prompt=prompt(200, seed=3))
        assert hits() > before

    def test_models_show_the_ranges(self, served: tuple[str, FastAPI], fingerprint: str) -> None:
        tiny, variant = httpx.get(f"{served[0]}/models").json()["models"]
        assert tiny["auto"]["source"] == "file"
        assert tiny["auto"]["ranges"] == RANGES
        assert tiny["fingerprint"] == fingerprint
        assert variant["auto"]["source"] == "rule"


class TestRangesInTheRequest:
    def test_any_encoding_of_any_range_is_that_of_its_echo(self, served: tuple[str, FastAPI]) -> None:
        """Random ranges over the requests of every rotary method, at random reserved lengths."""
        drawn = random.Random(0)
        encodings = [fields for row in rows(pairs=8, trained_length=64, heads=4) for fields in row.requests]
        for _ in range(12):
            ends = sorted(drawn.sample(range(16, 300), 2))
            pes = drawn.sample(encodings, 3)
            pes = [pe | ({"use_variant": False} if pe["method"] == "alibi" else {}) for pe in pes]
            ranges = [{"up_to": up_to, "pe": pe} for up_to, pe in zip([*ends, None], pes, strict=True)]
            auto = {"method": "auto", "ranges": ranges}
            reserved = drawn.randrange(NEW + 1, 330)
            found = result(served[0], reserved, auto)
            expected = 0 if reserved <= ends[0] else 1 if reserved <= ends[1] else 2
            fixed = result(served[0], reserved, pes[expected])
            again = result(served[0], reserved, found["pe"])
            assert found["pe"] == fixed["pe"], auto
            assert found["token_ids"] == fixed["token_ids"] == again["token_ids"], auto
            assert found["auto"]["source"] == "request"
            assert found["auto"]["up_to"] == [*ends, None][expected]

    def test_bad_ranges_are_refused_by_name(self, served: tuple[str, FastAPI]) -> None:
        def message(*ranges: dict[str, Any]) -> str:
            error = refusal(served[0], prompt=prompt(20), pe={"method": "auto", "ranges": ranges})
            return str(error["message"])

        default = {"method": "default"}
        assert "at least 1 entry" in message()
        assert "range 0 must have up_to" in message({"up_to": None, "pe": default}, {"up_to": 9, "pe": default})
        assert "range 1 must have up_to above 9" in message({"up_to": 9, "pe": default}, {"up_to": 9, "pe": default})
        assert "pe.ranges.0.pe.factor: must be at least 1" in message({"up_to": 9, "pe": "yarn:0.5"})
        assert "pe: 'tiny-alibi' answers under alibi: add use_variant" in message({"up_to": None, "pe": "alibi"})
        assert "pe: method: learned is for models" in message({"up_to": None, "pe": "learned"})
        echo = result(served[0], 20, "yarn:4")["pe"]
        assert "leave out requested" in message({"up_to": None, "pe": echo})
        numbers = {"method": "auto", "frequency_hash": "0"}
        assert "needs its ranges" in refusal(served[0], prompt=prompt(20), pe=numbers)["message"]
        error = refusal(served[0], prompt=prompt(20), pe="auto:4")
        assert (error["param"], error["message"]) == (
            "pe",
            "pe: auto takes no parameters: it chooses by the reserved length",
        )
        error = refusal(served[0], prompt=prompt(20), pe={"method": "auto", "factor": 4})
        assert (error["param"], error["message"]) == (
            "pe.factor",
            "pe.factor: unknown field: auto takes ranges or nothing, and chooses by the reserved length",
        )
