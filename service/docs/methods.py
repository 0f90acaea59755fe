"""The documentation of the methods, generated from the registry: a page and its pictures."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import plotly.graph_objects as go

from patches import METHODS, describe_method, parse, to_shorthand
from service.figures.drawing.raster import svg
from service.figures.encodings.methods import method_figure
from service.figures.encodings.positions import multipliers_figure
from service.figures.encodings.samples import (
    GEOMETRY,
    GROUPS,
    HEADS,
    PAIRS,
    TIMES_LONGER,
    TRAINED,
    Group,
    Sample,
    samples,
)
from service.reports.schema import choices, default_text, type_text

PAGE, PICTURES = "methods.md", "methods"
TEMPERATURES = "attention-temperatures"
TEMPERED = {"multiplier": 1.5, "factor": float(TIMES_LONGER)}
"""Parameters of the attention temperatures in the picture."""

SECTIONS: dict[Group, tuple[str, str]] = {
    "frequency schedule": (
        "Frequency schedules",
        "A schedule sets the frequency of each rotary pair. Keys are rotated once, when they are written to the cache, "
        "and attention is ordinary. Pictures: the wavelength of every pair before and after, and its stretch.",
    ),
    "position map": (
        "Position maps",
        "A map changes the positions of a query and a key by their distance. Every token is still attended, except "
        "beyond a layer's own window. If all layers have one, defaults go by it where it is smaller than the trained "
        "length. A map that begins beyond it is refused. "
        "Pictures: the effective distance of every pair of tokens, and that of the last token.",
    ),
    "mask": (
        "Masks",
        "A mask limits the tokens that are attended. Other tokens are lost, however low the perplexity. Beyond a "
        "layer's own window the first tokens are lost, too. Pictures: the effective distance of every pair of tokens, "
        "white where not attended, and that of the last token.",
    ),
    "bias": (
        "Biases",
        "No rotation; each score gets a term for the distance. Pictures: this term, per head.",
    ),
    "relative vectors": (
        "Relative vectors",
        "No rotation; the query is multiplied by learned vectors for the distance, which are weights of the model. "
        "Pictures: the terms of one query, with random weights.",
    ),
    "absolute": (
        "Absolute positions",
        "No rotation; the model adds a vector for the position to each token. Pictures: the positions of the model's "
        "embedding that each token reads.",
    ),
    "none": (
        "No positions",
        "Neither rotation nor bias: only the causal mask gives the order. Pictures: the multiplier of the scores.",
    ),
}
NEXT_SENTENCE = re.compile(r"(?<=[\w)]\.) (?=[A-Z])")
"""Place between a formula and a sentence on its symbols, which has a line for itself."""
FACTS = {
    "use": "Use",
    "avoid": "Not for",
    "reach": "Reach",
    "training_free": "Without tuning",
    "evidence": "Evidence",
    "paper": "Paper",
    "cost": "Cost",
}


def files() -> Iterator[tuple[str, str]]:
    """(path, text) of the page and of every picture."""
    yield PAGE, methods_page()
    for name, picture in pictures():
        yield f"{PICTURES}/{name}.svg", picture


def pictures() -> Iterator[tuple[str, str]]:
    """(name, SVG) of every picture."""
    for drawn in samples():
        yield drawn.name, svg(method_figure(drawn, drawn.name))
    yield TEMPERATURES, svg(temperatures_figure())


def overview() -> str:
    """A Markdown table with one line per method."""
    rows = []
    for group, members in _grouped():
        for drawn in members:
            info = describe_method(drawn.name)
            rows.append([group, f"[`{drawn.name}`](#{drawn.name})", info["summary"], info["training_free"]])
    return markdown_table(["kind", "method", "what it does", "without tuning"], rows)


def methods_page() -> str:
    """One section per method, by kind, then the parameters that methods share."""
    blocks = [_introduction(), overview()]
    for group, members in _grouped():
        title, about = SECTIONS[group]
        blocks += [
            f"## {title}",
            about,
            *(block for drawn in members for block in _section(describe_method(drawn.name), drawn)),
        ]
    return "\n\n".join([*blocks, *_temperatures(), *_bases()]) + "\n"


def _introduction() -> str:
    contents = [title for group, _ in _grouped() for title in [SECTIONS[group][0]]]
    contents += ["Attention temperatures", "Schedules underneath: base"]
    links = ", ".join(f"[{title}](#{_anchor(title)})" for title in contents)
    return f"""# Methods

<!-- Written by `ropeway methods --docs docs`. A test compares. -->

Every positional encoding that a request can choose with `pe`, from the same registry that serves it.
`GET /methods` lists them, `GET /methods/NAME` has one with its JSON schema, `ropeway methods NAME` prints it.

{links}.

L0 is the trained length, n the reserved length of a request (prompt and new tokens). The position of a query is p,
that of a key j. The factor is s, the rotated width d, the base of the frequencies b. Pair i has the frequency
theta_i, and theta_i' under the method. A query is q, a key is k, and d_h is the width of a head h. T is a table of
positions. Windows w and W, chunks S and groups G are parameters.
Pictures are of a model like the demo models: {PAIRS} rotary pairs, {HEADS} heads, \
b = {GEOMETRY.rope_theta:,.0f}, L0 = {TRAINED}, and \
{TIMES_LONGER * TRAINED:,} reserved tokens. Parameters not named below a picture have their defaults."""


def _section(info: dict[str, Any], drawn: Sample) -> Iterator[str]:
    name, schema = info["method"], info["parameters"]
    yield f"### `{name}`"
    yield linked(info["summary"])
    yield f"```\n{NEXT_SENTENCE.sub(chr(10), info['formula'])}\n```"
    yield f"![{name}]({PICTURES}/{name}.svg)"
    yield _drawn(drawn)
    fields = {key: field for key, field in schema["properties"].items() if key != "method" and not choices(field)}
    if fields:
        rows = [
            [f"`{key}`", type_text(field), default_text(key, schema), field.get("description", "")]
            for key, field in fields.items()
        ]
        yield markdown_table(["parameter", "type", "default", "meaning"], rows)
    shared = {"attention_temperature": "Attention temperatures", "base": "Schedules underneath: base"}
    also = [f"[`{key}`](#{_anchor(title)})" for key, title in shared.items() if key in schema["properties"]]
    yield f"{'Also' if fields else 'Parameters'}: {', '.join(also)}."
    yield "\n".join(f"- **{label}:** {linked(info[key])}" for key, label in FACTS.items())


def _temperatures() -> Iterator[str]:
    field, definitions = _temperature_schema()
    yield "## Attention temperatures"
    yield (
        "`attention_temperature` multiplies the scaled products q . k / sqrt(d) of a query. A bias such as ALiBi's is "
        "added to them unchanged, after any soft limit on scores (Gemma 2). Every method takes a temperature; a factor "
        "of `drope` is one. It is a number, an object with `kind`, or the name of a kind whose parameters all have "
        "defaults. An example of an object is `"
        + '{"kind": "yarn", "factor": 4}'
        + "`. It multiplies beside a factor on cos and sin, such as YaRN's. It also multiplies beside a temperature in "
        "the model's own layers (Llama 4, Ministral 3). So 1.0 leaves both as they are. It replaces only a temperature "
        "on whole scores that belongs to the encoding itself (DeepSeek's YaRN)."
    )
    yield f"![attention temperatures]({PICTURES}/{TEMPERATURES}.svg)"
    rows = []
    for kind, definition in definitions.items():
        # A kind of one number has its formula in the description of its required parameter.
        fields = {key: inner for key, inner in definition["properties"].items() if key != "kind"}
        formula = definition.get("description") or fields[definition["required"][0]]["description"]
        parameters = []
        for key, inner in fields.items():
            about = inner.get("description", "")
            what = f"`{key}`: {type_text(inner)}, {_default(key, definition)}."
            parameters.append(what if about == formula else f"{what} {about}")
        rows.append([f"`{kind}`", formula, "<br>".join(parameters)])
    yield markdown_table(["kind", "multiplier", "parameters"], rows)
    yield f"Type: {type_text(field)}."


def _bases() -> Iterator[str]:
    wrapping = {name: method.model_json_schema()["properties"] for name, method in METHODS.items()}
    wrapping = {name: fields for name, fields in wrapping.items() if "base" in fields}
    underneath = choices(next(iter(wrapping.values()))["base"])
    yield "## Schedules underneath: base"
    yield (
        "Position maps, masks and methods that change another schedule take `base`: the name of that schedule, with "
        "its parameters. The default is the checkpoint's schedule. In the short form: `NAME:base=yarn:4`, or, with "
        "several parameters, `NAME:base=(yarn:4,beta_fast=16)`.".replace("NAME", next(iter(wrapping)))
    )
    yield f"Taken by {_names(wrapping)}."
    yield f"`base` is one of {_names(underneath)}."


def temperatures_figure() -> go.Figure:
    """Every kind of attention temperature, one line each."""
    recipes = {}
    for kind, definition in _temperature_schema()[1].items():
        fields = {key: TEMPERED[key] for key in definition.get("required", []) if key in TEMPERED}
        method = parse({"method": "default", "attention_temperature": {"kind": kind, **fields}})
        values = "".join(f" {key} {value:g}" for key, value in fields.items())
        recipes[kind + values] = method.recipe(GEOMETRY).resolve(GEOMETRY, TIMES_LONGER * TRAINED).recipe
    return multipliers_figure(recipes, TIMES_LONGER * TRAINED, TRAINED, "attention temperatures")


def _temperature_schema() -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The field's schema, and that of every kind by its name."""
    schema = METHODS["default"].model_json_schema()
    field = schema["properties"]["attention_temperature"]
    definitions = {
        definition["properties"]["kind"]["const"]: definition
        for definition in schema["$defs"].values()
        if "kind" in definition["properties"]
    }
    return field, {kind: definitions[kind] for kind in choices(field)}


def _grouped() -> Iterator[tuple[Group, list[Sample]]]:
    every = samples()
    for group in GROUPS:
        members = [drawn for drawn in every if drawn.group == group]
        if members:
            yield group, members


def _drawn(drawn: Sample) -> str:
    """The request of the picture in the short form, without its long made-up lists."""
    long = {key for key, value in drawn.fields.items() if isinstance(value, list) and len(value) >= PAIRS}
    short = to_shorthand({key: "LIST" if key in long else value for key, value in drawn.fields.items()})
    note = "; `[...]` are made-up values" if long else ""
    return f"Drawn: `{short.replace('LIST', '[...]')}`{note}."


def _default(key: str, schema: dict[str, Any]) -> str:
    text = default_text(key, schema)
    return text if text == "required" else f"default {text}"


def _names(names: Any) -> str:
    return ", ".join(f"[`{name}`](#{name})" for name in names)


def _anchor(title: str) -> str:
    """GitHub's anchor of a heading."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def linked(text: str) -> str:
    """``text`` with a Markdown link at every arXiv number."""
    return re.sub(r"arXiv:(\d{4}\.\d{4,5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", text)


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |" for cells in (header, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(header), *lines[1:]])
