"""The documentation of the methods, made from the registry: a page, its pictures, and the table of the README."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from patches import METHODS, describe_method, parse, to_shorthand
from service.figures.methods import method_figure, multipliers_figure, svg
from service.figures.samples import GEOMETRY, GROUPS, HEADS, PAIRS, TIMES_LONGER, TRAINED, Group, Sample, samples
from service.reports.schema import choices, default_text, type_text

PAGE, PICTURES = "methods.md", "methods"
TEMPERATURES = "attention-temperatures"
TEMPERED = {"multiplier": 1.5, "factor": float(TIMES_LONGER)}
"""Parameters of attention temperatures as they are drawn."""

SECTIONS: dict[Group, tuple[str, str]] = {
    "frequency schedule": (
        "Frequency schedules",
        "How fast each rotary pair turns. Keys are rotated once, when they are written to the cache, and attention is "
        "ordinary. Pictures: the wavelength of every pair before and after, and by how much it was stretched.",
    ),
    "position map": (
        "Position maps",
        "Which positions a query and a key stand at, depending on how far they are apart. Every token is still "
        "attended. Pictures: the effective distance of every pair of tokens, and that of the last token.",
    ),
    "mask": (
        "Masks",
        "Which tokens are attended at all. What is left out is lost, however low the perplexity. Pictures: the "
        "effective distance of every pair of tokens, white where not attended, and that of the last token.",
    ),
    "bias": (
        "Biases",
        "No rotation; a number for the distance is added to each score. Pictures: that number, per head.",
    ),
    "relative vectors": (
        "Relative vectors",
        "No rotation; learned vectors for the distance meet the query. They are weights of the model. Pictures: what "
        "they add for one query, with random weights.",
    ),
    "absolute": (
        "Absolute positions",
        "No rotation; the model adds a vector for the position to each token. Pictures: which positions of its own "
        "embedding it reads.",
    ),
    "none": (
        "No positions",
        "Neither rotation nor bias: order is known only through the causal mask. Pictures: the multiplier of scores.",
    ),
}
FACTS = {
    "use": "Use",
    "avoid": "Not for",
    "reach": "Reach",
    "training_free": "Without tuning",
    "evidence": "Evidence",
    "paper": "Paper",
    "cost": "Cost",
}


def write_docs(folder: Path) -> list[Path]:
    """Write the page and every picture below ``folder``; returns what was written."""
    (folder / PICTURES).mkdir(parents=True, exist_ok=True)
    texts = {PAGE: methods_page()} | {f"{PICTURES}/{name}.svg": picture for name, picture in pictures()}
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in texts]


def pictures() -> Iterator[tuple[str, str]]:
    """(name, SVG) of every picture."""
    for drawn in samples():
        yield drawn.name, svg(method_figure(drawn, drawn.name))
    yield TEMPERATURES, svg(temperatures_figure())


def readme_table() -> str:
    """Every method in one line; the README holds the table and a test compares."""
    rows = ["| kind | method | what it does | without tuning |", "|---|---|---|---|"]
    for group, members in _grouped():
        for drawn in members:
            link = f"[`{drawn.name}`](docs/{PAGE}#{drawn.name})"
            info = describe_method(drawn.name)
            rows.append(_row([group, link, info["summary"], info["training_free"]]))
    return "\n".join(rows)


def methods_page() -> str:
    """One section per method, by kind, and what several methods share."""
    blocks = [_introduction()]
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

L0 is the trained length, n the length a request reserves (prompt and new tokens), p the position of a query, j that of
a key, s the factor, d the rotated width, b the base of the frequencies. Pictures are of a model like the demo models:
{PAIRS} rotary pairs, {HEADS} heads, b = {GEOMETRY.rope_theta:,.0f}, L0 = {TRAINED}, and \
{TIMES_LONGER * TRAINED:,} reserved tokens. Parameters not named below a picture have their defaults."""


def _section(info: dict[str, Any], drawn: Sample) -> Iterator[str]:
    name, schema = info["method"], info["parameters"]
    yield f"### `{name}`"
    yield _linked(info["summary"])
    yield f"```\n{info['formula']}\n```"
    yield f"![{name}]({PICTURES}/{name}.svg)"
    yield _drawn(drawn)
    fields = {key: field for key, field in schema["properties"].items() if key != "method" and not choices(field)}
    if fields:
        rows = ["| parameter | type | default | meaning |", "|---|---|---|---|"]
        for key, field in fields.items():
            cells = [f"`{key}`", type_text(field), default_text(key, schema), field.get("description", "")]
            rows.append(_row(cells))
        yield "\n".join(rows)
    shared = {"attention_temperature": "Attention temperatures", "base": "Schedules underneath: base"}
    also = [f"[`{key}`](#{_anchor(title)})" for key, title in shared.items() if key in schema["properties"]]
    yield f"{'Also' if fields else 'Parameters'}: {', '.join(also)}."
    yield "\n".join(f"- **{label}:** {_linked(info[key])}" for key, label in FACTS.items())


def _temperatures() -> Iterator[str]:
    field, definitions = _temperature_schema()
    yield "## Attention temperatures"
    yield (
        "`attention_temperature` multiplies every score of a query and is independent of where tokens stand, so any "
        "method takes one: a number, the name of a kind whose parameters all have defaults, or an object with `kind`, "
        "as in `" + '{"kind": "yarn", "factor": 4}' + "`. It takes the place of a multiplier that the method has."
    )
    yield f"![attention temperatures]({PICTURES}/{TEMPERATURES}.svg)"
    rows = ["| kind | multiplier | parameters |", "|---|---|---|"]
    for kind, definition in definitions.items():
        # Where a kind is one number, the description of its required parameter has the formula.
        fields = {key: inner for key, inner in definition["properties"].items() if key != "kind"}
        formula = definition.get("description") or fields[definition["required"][0]]["description"]
        parameters = []
        for key, inner in fields.items():
            about = inner.get("description", "")
            what = f"`{key}`: {type_text(inner)}, {_default(key, definition)}."
            parameters.append(what if about == formula else f"{what} {about}")
        rows.append(_row([f"`{kind}`", formula, "<br>".join(parameters)]))
    yield "\n".join(rows)
    yield f"Type: {type_text(field)}."


def _bases() -> Iterator[str]:
    wrapping = {name: method.model_json_schema()["properties"] for name, method in METHODS.items()}
    wrapping = {name: fields for name, fields in wrapping.items() if "base" in fields}
    underneath = choices(next(iter(wrapping.values()))["base"])
    yield "## Schedules underneath: base"
    yield (
        "Position maps, masks and methods that change another schedule stand on one: `base` names it, with its own "
        "parameters. When absent it is the checkpoint's own. In the short form: `NAME:base=yarn:4`, with parentheses "
        "where there are several parameters, `NAME:base=(yarn:4,beta_fast=16)`.".replace("NAME", next(iter(wrapping)))
    )
    yield f"Taken by {_names(wrapping)}."
    yield f"`base` is one of {_names(underneath)}."


def temperatures_figure() -> Figure:
    """Every kind of attention temperature, one line each."""
    recipes = {}
    for kind, definition in _temperature_schema()[1].items():
        fields = {key: TEMPERED[key] for key in definition.get("required", []) if key in TEMPERED}
        method = parse({"method": "default", "attention_temperature": {"kind": kind, **fields}})
        values = "".join(f" {key} {value:g}" for key, value in fields.items())
        recipes[kind + values] = method.recipe(GEOMETRY).resolve(GEOMETRY, TIMES_LONGER * TRAINED).recipe
    return multipliers_figure(recipes, TIMES_LONGER * TRAINED, "attention temperatures")


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
    """The request of the picture in the short form; longer lists, which are made up, are not written out."""
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
    """What GitHub makes of a heading."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def _linked(text: str) -> str:
    return re.sub(r"arXiv:(\d{4}\.\d{4,5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", text)


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
