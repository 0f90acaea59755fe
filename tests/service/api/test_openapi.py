"""Every route against the OpenAPI document: schemathesis draws requests, the live server answers as documented.

Its coverage phase is left out: with an encoding as the base of another it enumerated nothing in two minutes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from service.api.response_models.failures import WHAT_FAILS, ErrorResponse
from service.app import create_app
from service.cli.server import local_server
from service.evaluation.catalogue import EVALUATIONS
from service.settings import Settings
from tests.service.conftest import TEXT, tiny_checkpoint, tiny_tokenizer
from tests.service.serving import SMALL

REQUESTS = 2
"""Per route: an easy one, and one as it is drawn."""

VIOLATION = [[{}]]
"""No field of these bodies allows it."""

PARTS = 6
"""Of the routes, for the workers of a run."""

ERROR = "#/components/schemas/ErrorResponse"
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
DRAWN: dict[str, Any] = {
    **{"model": "tiny", "pe": {"method": "default"}, "top_k": 0, "timeout_s": 60.0},
    **{"logit_bias": {"5": 1.0}, "stop_token_ids": [9], "min_tokens": 0, "allowed_token_ids": None, "bad_words": []},
}
ONE_PROMPT: dict[str, Any] = {**DRAWN, "prompt": [5, 6, 7]}
TEMPLATED: dict[str, Any] = {"chat_template_kwargs": {}, "add_generation_prompt": None, "continue_final_message": False}
TURNS: dict[str, Any] = {
    **{"messages": [{"role": "user", "content": "The"}], "tools": None, "tool_choice": None, "thinking": None},
    **{"output_config": None},
}
EVALUATED: dict[str, Any] = {
    **{"model": "tiny", "input": [list(range(5, 45))], "methods": [{"method": "default"}], "lengths": [16, 32]},
    **{"stream": False, "background": False, "timeout_s": 60.0},
}
ANY = {"evaluation": "perplexity", **EVALUATED, "timeout_s": None}
"""A body of the routes that take any evaluation."""
GRID: dict[str, Any] = {"lengths": [256], "depths": [0.5], "samples": 1, "max_new_tokens": 2}
EASY: dict[str, dict[str, Any]] = {
    "PUT /generate": {"model": "tiny", "pe": None},
    "POST /generate": {**ONE_PROMPT, "max_new_tokens": 2},
    "POST /perplexity": EVALUATED | {"protocol": "disjoint", "stride": None, "tail": None},
    "POST /long_perplexity": {
        **EVALUATED,
        **{"protocol": "disjoint", "bos": "auto", "evaluator": {}, "long_context": 32, "short_context": 8, "stride": 4},
    },
    "POST /passkey": EVALUATED | GRID | {"input": None, "digits": 1},
    "POST /needle": {
        **EVALUATED,
        **GRID,
        **{"input": TEXT[:2000], "needle": "It is Q.", "question": "It is", "expected": ["Q"], "answer": None},
    },
    "POST /ruler": EVALUATED
    | {"input": TEXT[:2000], "lengths": [512], "samples": 1, "max_new_tokens": 2, "tasks": ["niah_single_2"]},
    "POST /probe": {
        **EVALUATED,
        **{"lengths": [32], "distances": [8], "queries": 4, "samples": 1, "segment": 4, "bos": "auto"},
    },
    "POST /recommend": {
        **EVALUATED,
        **{"input": TEXT[:4000], "lengths": [64], "length": 64, "windows": 2, "budget": None, "rounds": None},
        **{"bos": "auto", "target": "vllm"},
    },
    "POST /search": {
        **EVALUATED,
        **{"input": TEXT[:4000], "lengths": None, "length": 128, "windows": 1, "held_out": 3, "population": 4},
        **{"generations": 1, "stop_after": None, "bos": "auto"},
    },
    "POST /sweep": {
        **{name: value for name, value in EVALUATED.items() if name != "input"},
        **{"evaluations": [{"evaluation": "perplexity", "input": EVALUATED["input"]}], "factors": None, "target": {}},
    },
    "POST /figures": {"model": "tiny", "pe": [{"method": "default"}], "length": None},
    "POST /export": {"model": "tiny", "pe": {"method": "default"}, "target": "vllm", "length": None},
    "POST /tokenize": {"model": "tiny", "prompt": "The", "messages": None, **TEMPLATED},
    "POST /v1/completions": {
        **ONE_PROMPT,
        "max_tokens": 2,
        "n": 1,
        "stream_options": None,
        "truncate_prompt_tokens": -1,
    },
    "POST /v1/responses": {**DRAWN, **TEMPLATED, "input": "The", "max_output_tokens": 2},
    "POST /v1/responses/input_tokens": {**DRAWN, **TEMPLATED, "input": "The", "max_output_tokens": 2},
    "POST /v1/messages": {**DRAWN, **TEMPLATED, **TURNS, "max_tokens": 2},
    "POST /v1/messages/count_tokens": {**TEMPLATED, **TURNS, "model": "tiny"},
    "POST /v1/chat/completions": {
        **DRAWN,
        **TEMPLATED,
        **{"messages": [{"role": "user", "content": "The"}], "max_tokens": 2, "max_completion_tokens": 2},
        **{"n": 1, "logprobs": True, "stream_options": None, "truncate_prompt_tokens": -1},
    },
}
"""Laid over every other drawn body: what a schema allows and no server has, such as any number of tokens."""

REST: dict[str, dict[str, Any]] = {
    "PUT /generate": {"prompt": "The"},
    "POST /tokenize": {"add_special_tokens": False, "return_token_strs": False},
    "POST /detokenize": {"tokens": [5], "model": "tiny"},
    "POST /policies": {"result": "0" * 32},
}
"""Fields that make these bodies complete."""

BY_CHANCE = {
    *(f"/{name}/{{result_id}}" for name in EVALUATIONS),
    "/jobs/{job_id}",
    "/comparisons/{jobs}",
    *("/methods/{name}", "/policies", "/v1/models/{model_id}", "/tokenizer_info", "/detokenize"),
}
"""Starts of paths where a drawn name, id or token hardly ever is one that exists."""


@cache
def operations() -> list[Any]:
    """Every route. The document takes seconds, which collecting the tests does without."""
    document = create_app(Settings(_env_file=None)).openapi()
    return [result.ok() for result in schemathesis.openapi.from_dict(document).get_all_operations()]  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server on which no valid request is long, of a model with a chat template."""
    folder = tiny_checkpoint(tmp_path_factory.mktemp("documented") / "tiny")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    limits = {"max_new_tokens": 40, "max_prompts": 8, "max_scored_tokens": 4000, "max_lengths": 4, "max_methods": 4}
    with local_server(Settings(_env_file=None, **SMALL | {"model": str(folder)} | limits)) as url:
        yield url


def drawn(operation: Any, url: str) -> Counter[int]:
    """Statuses of answers to drawn requests, each checked against the document."""
    statuses: Counter[int] = Counter()

    @settings(
        max_examples=REQUESTS,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],  # a request that breaks the server is worth seeing as it is
    )
    @given(operation.as_strategy(generation_mode=GenerationMode.POSITIVE))
    def send(case: schemathesis.Case[Any]) -> None:
        easy = statuses.total() % 2 == 0
        if easy and isinstance(case.body, dict):
            if operation.path in ("/jobs", "/jobs/plan"):
                case.body = dict(ANY)
            case.body |= EASY.get(operation.label, {})
        response = case.call(base_url=url, timeout=60)
        statuses[response.status_code] += 1
        case.validate_response(response, checks=CHECKS)

    send()
    return statuses


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_answers_are_as_documented(part: int, url: str) -> None:
    for operation in operations()[part::PARTS]:
        statuses = drawn(operation, url)
        if not operation.path.startswith(tuple(BY_CHANCE)):
            assert statuses[200] or statuses[202], (operation.label, statuses)


def mistyped(value: Any) -> Iterator[Any]:
    """``value`` with one of its numbers as a text and as a truth value."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield from (str(value), True)
    elif isinstance(value, dict):
        yield from ({**value, key: wrong} for key in value for wrong in mistyped(value[key]))
    elif isinstance(value, list) and value:
        yield from ([wrong, *value[1:]] for wrong in mistyped(value[0]))


def test_each_violated_field_is_refused_as_documented(url: str) -> None:
    for operation in operations():
        if "requestBody" not in operation.definition.raw:
            continue
        body = (
            ANY if operation.path.startswith("/jobs") else EASY.get(operation.label, {}) | REST.get(operation.label, {})
        )
        assert body, operation.label
        for field in body:
            for wrong in (VIOLATION, *mistyped(body[field])):
                case = operation.Case(body=body | {field: wrong}, media_type="application/json")
                response = case.call(base_url=url, timeout=60)
                assert response.status_code == 400, (operation.label, field, wrong)
                assert response.json()["error"]["param"].partition(".")[0] == field, operation.label
                case.validate_response(response, checks=CHECKS)


def test_a_field_with_the_name_of_its_evaluation_is_named(url: str) -> None:
    body = EASY["POST /needle"] | {"needle": VIOLATION}
    wrong = {"evaluation": "needle", **body}
    for path, sent, param in (
        ("/needle", body, "needle"),
        ("/jobs", wrong, "needle"),
        ("/sweep", EASY["POST /sweep"] | {"evaluations": [wrong]}, "evaluations.0.needle"),
    ):
        assert httpx.post(f"{url}{path}", json=sent).json()["error"]["param"] == param


def test_failures_are_documented_in_the_one_shape() -> None:
    for operation in operations():
        responses = operation.definition.raw["responses"]
        assert "422" not in responses, operation.label
        assert responses["default"]["content"]["application/json"]["schema"] == {"$ref": ERROR}, operation.label
        if operation.tags[0] in ("health", "operations"):
            continue
        for status in WHAT_FAILS:
            assert responses[str(status)]["content"]["application/json"]["schema"] == {"$ref": ERROR}, operation.label
            waits = "Retry-After" in responses[str(status)].get("headers", {})
            assert waits == (status in (429, 503)), operation.label


def test_the_documented_shape_is_the_answered_one(url: str) -> None:

    for answer in (
        httpx.post(f"{url}/generate", json={"prompt": [5] * 3000}),
        httpx.post(f"{url}/generate", json={"prompt": ""}),
        httpx.get(f"{url}/nowhere"),
    ):
        assert ErrorResponse.model_validate_json(answer.content, strict=True).model_dump() == answer.json()
