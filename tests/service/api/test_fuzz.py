"""Malformed bodies against every route, drawn from the OpenAPI document: no 5xx, alive, memory flat."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import httpx
import psutil
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from service.settings import Settings

BODIES = 80
FEWER = 30
"""Per route that takes a body: many for the two that everything else is made of."""

CHEAP: dict[str, dict[str, Any]] = {
    "/generate": {"prompt": [5, 6, 7], "max_new_tokens": 2, "timeout_s": 60},
    "/perplexity": {"input": [5, 6, 7] * 4, "lengths": [8], "timeout_s": 60},
    "/v1/completions": {"prompt": [5, 6, 7], "max_tokens": 2, "n": 1, "timeout_s": 60},
    "/v1/chat/completions": {"max_tokens": 2, "n": 1, "timeout_s": 60},
    "/tokenize": {},
    "/detokenize": {},
}
"""Laid over every drawn body, so that one that turns out valid costs little."""

JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


Strategies = dict[str, st.SearchStrategy[Any]]


def values(schema: Any, components: dict[str, Any], known: Strategies | None = None) -> st.SearchStrategy[Any]:
    """Values of a schema as FastAPI writes them. hypothesis-jsonschema takes seconds per value on ours.

    ``known`` are the strategies of components: each is made once, when first drawn from, so a component may contain
    itself.
    """
    known = {} if known is None else known
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        if name not in known:
            known[name] = st.deferred(lambda: values(components[name], components, known))
        return known[name]
    if "const" in schema or "enum" in schema:
        return st.sampled_from(schema.get("enum", [schema.get("const")]))
    if "anyOf" in schema or "oneOf" in schema:
        return st.one_of([values(option, components, known) for option in schema.get("anyOf", schema.get("oneOf"))])
    kind = schema.get("type")
    if kind == "object":
        required = set(schema.get("required", []))
        fields = {name: values(field, components, known) for name, field in schema.get("properties", {}).items()}
        optional = {name: field for name, field in fields.items() if name not in required}
        return st.fixed_dictionaries({name: fields[name] for name in required}, optional=optional)
    if kind == "array":
        return st.lists(values(schema["items"], components, known), min_size=schema.get("minItems", 0), max_size=3)
    if kind in ("integer", "number"):
        low = schema.get("minimum", schema.get("exclusiveMinimum"))
        high = schema.get("maximum", schema.get("exclusiveMaximum"))
        return st.integers(low, high) if kind == "integer" else st.floats(low, high)
    return {"boolean": st.booleans(), "string": st.text(max_size=12), "null": st.none()}.get(kind, JUNK)


def test_values_of_a_component_that_contains_itself() -> None:
    node = {"type": "object", "properties": {"base": {"anyOf": [{"$ref": "#/x/Node"}, {"type": "null"}]}}}
    depths: Counter[int] = Counter()

    def depth(value: dict[str, Any] | None) -> int:
        return 0 if value is None else 1 + depth(value.get("base"))

    @settings(max_examples=50, deadline=None, database=None, phases=[Phase.generate])
    @given(values({"$ref": "#/x/Node"}, {"Node": node}))
    def draw(value: dict[str, Any]) -> None:
        depths[depth(value)] += 1

    draw()
    assert len(depths) > 1


def spoiled(body: dict[str, Any], chance: random.Random, junk: Any) -> Any:
    """One field replaced, dropped, added, or the whole body exchanged."""
    kind = chance.randrange(5)
    if kind == 0 or not body:
        return junk
    name = chance.choice(sorted(body))
    if kind == 1:
        return {**body, name: junk}
    if kind == 2:
        return {key: value for key, value in body.items() if key != name}
    if kind == 3:
        return {**body, "unheard_of": junk}
    return {**body, name: [body[name], junk]}


@pytest.mark.slow
@pytest.mark.parametrize("route", CHEAP)
def test_malformed_bodies_never_break_the_server(client: httpx.Client, route: str) -> None:
    bodies = BODIES if route in ("/generate", "/perplexity") else FEWER
    document = client.get("/openapi.json").json()
    schema = document["paths"][route]["post"]["requestBody"]["content"]["application/json"]["schema"]
    process = psutil.Process()  # the server of these tests lives in this process
    statuses: Counter[int] = Counter()
    memory: list[int] = []

    @settings(
        max_examples=bodies,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
        phases=[Phase.generate],  # a body that breaks the server is worth seeing as it is
    )
    @given(
        body=values(schema, document["components"]["schemas"]),
        junk=JUNK,
        chance=st.randoms(use_true_random=False),
    )
    def send(body: dict[str, Any], junk: Any, chance: random.Random) -> None:
        content = json.dumps(spoiled({**body, **CHEAP[route]}, chance, junk))
        answer = client.post(route, content=content, headers={"Content-Type": "application/json"})
        statuses[answer.status_code] += 1
        memory.append(process.memory_info().rss)
        assert answer.status_code < 500, (content, answer.text)
        if answer.status_code >= 400:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
            assert len(answer.content) < 5000

    send()
    assert statuses[400] > bodies / 2
    assert client.get("/health/ready").status_code == 200
    settled = memory[len(memory) // 2]
    assert memory[-1] < settled + (64 << 20), "memory must not grow with refused requests"


@pytest.mark.parametrize(
    "path",
    [
        "/methods/yarn/frequencies?factor=x",
        "/methods/yarn/frequencies?factor=4&length=0",
        "/methods/yarn/frequencies?factor=NaN",
        "/methods/nope/frequencies",
        "/methods/%00/frequencies",
        "/perplexity/..%2f..%2fetc/plot.png",
    ],
)
def test_malformed_paths_and_queries(client: httpx.Client, path: str) -> None:
    answer = client.get(path)
    assert 400 <= answer.status_code < 500
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_wrong_method_and_unknown_route_have_the_same_shape(client: httpx.Client) -> None:
    for answer in (client.get("/generate"), client.post("/nowhere"), client.delete("/models")):
        assert answer.status_code in (404, 405)
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_a_body_over_the_limit_is_refused_before_it_is_parsed(client: httpx.Client, settings: Settings) -> None:
    for content in (b" " * (settings.max_body_bytes + 1), (b" " * (1 << 20) for _ in range(40))):
        answer = client.post("/generate", content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "body_too_large"
