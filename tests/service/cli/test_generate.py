"""``ropeway generate`` against fake answers: the request, and what is printed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from tests.service.cli.answers import Answer, events
from tests.service.cli.shell import ropeway


def end_of(index: int, method: str) -> tuple[str, dict[str, Any]]:
    pe = {
        "method": method,
        "factor": 4.0,
        "attention_factor": 1.139,
        "effective_rope_theta": 10000.0,
        "rotates_at": "cache_write",
        "frequency_hash": f"hash-of-{method}",
    }
    usage, timings = {"prompt_tokens": 3, "completion_tokens": 5}, {"queue_s": 0, "prefill_s": 0.1, "decode_s": 0.5}
    asked = {"index": index, "prompt_index": 0, "model": "tiny", "pe": pe, "auto": None}
    return "", {**asked, "finish_reason": "length", "logprobs": None, "usage": usage, "timings": timings}


def text(index: int, delta: str) -> tuple[str, dict[str, Any]]:
    return "", {"index": index, "text": delta, "token_ids": [1]}


class TestGenerate:
    def test_prints_the_text_alone_on_stdout(self, fake: Callable[[Answer], list[httpx.Request]]) -> None:
        requests = fake(lambda _: events(text(0, "a\u2028b"), text(0, " [red]ü\x85"), end_of(0, "yarn")))
        flags = ("--pe", "yarn:4", "-n", "5", "--seed", "7", "--stop", "x")
        result = ropeway("generate", "Once", *flags, "--server", "host:1")
        assert (result.exit_code, result.stdout) == (0, "a\u2028b [red]ü\x85\n")
        facts = ("yarn on tiny", "cache write", "theta 10,000", "1.139", "hash-of-yarn", "3 + 5 tokens", "8 tokens/s")
        for fact in facts:
            assert fact in " ".join(result.stderr.split())
        assert str(requests[0].url) == "http://host:1/generate"
        assert json.loads(requests[0].content) == {
            "prompt": "Once",
            "pe": [{"method": "yarn", "factor": 4}],
            "max_new_tokens": 5,
            "seed": 7,
            "stop": ["x"],
            "stream": True,
        }

    def test_shows_several_encodings_side_by_side(self, fake: Callable[[Answer], list[httpx.Request]]) -> None:
        fake(lambda _: events(text(1, "right\x1b[31m"), text(0, "left"), end_of(1, "yarn"), end_of(0, "default")))
        flags = ("--pe", "default", "--pe", '{"method": "yarn", "factor": 4}')
        result = ropeway("generate", "Once", *flags, "--server", "host:1")
        assert result.exit_code == 0
        (row,) = [line for line in result.stdout.splitlines() if "left" in line]
        assert row.index("left") < row.index("right")
        assert "\x1b" not in result.stdout
        assert "hash-of-default" in result.stdout
        assert '{"method": "yarn", "factor": 4}' in result.stdout

    def test_reads_the_prompt_from_stdin(self, fake: Callable[[Answer], list[httpx.Request]]) -> None:
        requests = fake(lambda _: events(text(0, "."), end_of(0, "default")))
        assert ropeway("generate", "-", "--server", "host:1", stdin="two\nlines\n").exit_code == 0
        assert json.loads(requests[0].content)["prompt"] == "two\nlines"

    def test_json_is_the_servers_answer(self, fake: Callable[[Answer], list[httpx.Request]]) -> None:
        end = end_of(0, "default")[1]
        answer = {"model": "tiny", "results": [{**end, "text": "ü", "token_ids": [1]}], "usage": end["usage"]}
        requests = fake(lambda _: httpx.Response(200, json=answer))
        result = ropeway("generate", "Once", "--json", "--model", "tiny", "--server", "host:1")
        assert json.loads(result.stdout) == answer
        assert json.loads(requests[0].content) == {"prompt": "Once", "model": "tiny"}

    def test_refuses_text_that_is_no_utf_8(self, tmp_path: Path) -> None:
        """As a byte of another encoding reaches a program: the shell's arguments have surrogates."""
        schema = tmp_path / "schema.json"
        schema.write_bytes(b'{"title": "caf\xe9"}')
        for arguments, told in {
            ("-",): "error: stdin: must be UTF-8 text, and byte 4 is not: convert it",
            ("Once", "--schema", str(schema)): f"error: {schema}: must be UTF-8 text, and byte 15 is not",
            ("caf\udce9",): "error: prompt: character 4 is half a surrogate pair: it must be UTF-8 text: convert it",
            ("Once", "--stop", "a\udce9"): "error: stop.0: character 2 is half a surrogate pair",
        }.items():
            result = ropeway("generate", *arguments, "--server", "127.0.0.1:9", stdin=b"caf\xe9")
            assert result.exit_code == 1
            assert told in result.stderr

    def test_arguments_are_utf_8_in_any_locale(self, fake: Callable[[Answer], list[httpx.Request]]) -> None:
        """A shell whose locale is C gives the bytes of letters as surrogates."""
        requests = fake(lambda _: events(text(0, "."), end_of(0, "default")))
        prompt, choice = (text.encode().decode("ascii", "surrogateescape") for text in ("机器", "日本"))
        assert ropeway("generate", prompt, "--choice", choice, "--server", "host:1").exit_code == 0
        sent = json.loads(requests[0].content)
        assert (sent["prompt"], sent["structured_outputs"]) == ("机器", {"choice": ["日本"]})

    def test_refuses_numbers_that_json_has_not(self) -> None:
        pe = '{"method": "yarn", "factor": NaN}'
        result = ropeway("generate", "Once", "--pe", pe, "--server", "127.0.0.1:9")
        assert result.exit_code == 1
        assert result.stderr.startswith("error: the request cannot be written")
