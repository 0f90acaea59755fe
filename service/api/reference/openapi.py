"""The OpenAPI document as people read it: titles, an order, and the parameters that belong to a method."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from pydantic import TypeAdapter

from patches import METHODS, describe_methods, examples, to_shorthand
from service.evaluation.catalogue import EVALUATIONS

SAMPLE = examples()[1]
"""An encoding to show."""

TAGS: list[dict[str, Any]] = [
    {"name": "generate", "description": "Continue prompts, each under one or several positional encodings."},
    {"name": "openai", "description": "Routes for clients of OpenAI, vLLM and RULER; the tokenizer."},
    {"name": "anthropic", "description": "Routes for clients of Anthropic's API."},
    {"name": "methods", "description": "The positional encodings and the models that there are."},
    *({"name": name, "description": evaluation.summary} for name, evaluation in EVALUATIONS.items()),
    {"name": "jobs", "description": "Evaluations that outlive their request."},
    {"name": "health", "description": "Liveness and readiness of the server."},
    {"name": "operations", "description": "Metrics for Prometheus."},
]
"""Groups of routes, in the order of the page."""

ABOUT = f"""Begin with `POST /generate`: a prompt, and in `pe` the positional encodings to answer it under.

An encoding is a short form such as `{to_shorthand(SAMPLE)}`, an object with `method` and its parameters, or the `pe` of
an answer. `GET /methods` lists the methods. A refusal names the field and what is allowed."""

ORDER = ("post", "get", "put", "delete")
OF_A_METHOD = ("/methods/{name}/frequencies", "/methods/{name}/frequencies.png")
"""Routes whose further query parameters are those of the method."""

TEXT: dict[str, Any] = TypeAdapter(str).json_schema()
SCALARS = {"number", "integer", "boolean", TEXT["type"]}

IN_BRIEF: dict[str, Any] = {
    "type": "object",
    "title": "A method and its parameters",
    "description": "`GET /methods` lists the methods, `GET /methods/{name}` has the schema of the parameters.",
    "properties": {"method": {**TEXT, "enum": list(METHODS)}},
    "required": ["method"],
    "examples": [SAMPLE],
}
"""Any encoding as an object."""


def arranged(document: dict[str, Any], *, keys_asked_for: bool) -> dict[str, Any]:
    """``document`` itself, as FastAPI makes it, changed in place."""
    for path, operations in document["paths"].items():
        document["paths"][path] = {verb: operations[verb] for verb in ORDER if verb in operations}
        for operation in operations.values():
            _title(operation)
            if "security" in operation and not keys_asked_for:
                operation["security"].append({})  # it may be left out
    for path in OF_A_METHOD:
        given: list[dict[str, Any]] = document["paths"][path]["get"]["parameters"]
        for parameter in given:
            if parameter["name"] == "name":
                parameter |= {"schema": {**TEXT, "enum": list(METHODS)}, "example": SAMPLE["method"]}
        given += _parameters_of_methods()
    return document


SERVER = {"url": "..", "description": "This server, behind any prefix of a proxy: from the place of this document"}


def in_brief(document: dict[str, Any]) -> dict[str, Any]:
    """A copy of ``document`` that names the methods without their schemas, for Swagger UI.

    It expands every schema of an open operation, which took minutes: methods are parts of methods.
    """
    components = document["components"]
    encoding = components["schemas"]["PositionEncoding"]
    forms = [IN_BRIEF if "discriminator" in form else form for form in encoding["anyOf"]]
    schemas = {**components["schemas"], "PositionEncoding": {**encoding, "anyOf": forms}}
    whole = "Encodings are in brief here; [openapi.json](openapi.json) has the schemas of all methods."
    about = {**document["info"], "description": f"{document['info']['description']}\n\n{whole}"}
    shown = {"info": about, "components": {**components, "schemas": schemas}}
    return {**document, **shown, "servers": [SERVER]}


def _title(operation: dict[str, Any]) -> None:
    """A route's summary is the beginning of its description, which is left out where there is no more of it."""
    text = " ".join(operation.pop("description", "").split())
    if text:
        operation["summary"] = re.split(r"[.:;](?: |$)", text, maxsplit=1)[0]
    operation["summary"] = operation["summary"].removesuffix(".")
    if len(text) > len(operation["summary"]) + 1:
        operation["description"] = text


def _parameters_of_methods() -> list[dict[str, Any]]:
    """Every parameter of every method as a query parameter: those of the sample first, then the most common."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for info in describe_methods():
        for name, field in info["parameters"]["properties"].items():
            if name != "method":
                found.setdefault(name, {})[info["method"]] = field
    names = sorted(found, key=lambda name: (name not in SAMPLE, -len(found[name])))
    return [_parameter(name, found[name]) for name in names]


def _parameter(name: str, fields: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """One query parameter; ``fields`` are its schemas by the methods that take it."""
    schema = _common(fields.values())
    about = [next((field["description"] for field in fields.values() if "description" in field), "")]
    about += [] if schema != TEXT else ["As JSON, or an encoding in its short form."]
    about += [f"Taken by {', '.join(fields)}." if len(fields) < len(METHODS) else "Taken by every method."]
    described = {"name": name, "in": "query", "required": False, "schema": schema, "description": " ".join(about)}
    return described | ({"example": SAMPLE[name]} if name in SAMPLE else {})


def _common(fields: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Schema shared by all ``fields`` of one plain kind, text otherwise."""
    kinds = []
    for field in fields:
        several = [kind for kind in field.get("anyOf", [field]) if kind.get("type") != "null"]
        if not several:
            continue  # refused whatever it is
        if len(several) != 1 or several[0].get("type") not in SCALARS:
            return TEXT
        kinds.append(
            {key: value for key, value in several[0].items() if key not in ("title", "description", "default")}
        )
    first, *others = kinds or [TEXT]
    same = {key: value for key, value in first.items() if all(kind.get(key) == value for kind in others)}
    return same if "type" in same else TEXT
