"""The primer of positional encoding for students: its template's numbers and pictures."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files as resources
from typing import Any

import plotly.graph_objects as go
import torch
from jinja2 import Environment, StrictUndefined

from patches import METHODS, ResolvedRecipe, effective_distance, from_text, parse
from service.docs.methods import linked
from service.evaluation.formatting import percent
from service.figures.drawing.raster import svg
from service.figures.encodings.frequencies import wavelengths_figure
from service.figures.encodings.positions import bias_matrices_figure
from service.figures.encodings.samples import (
    HEADS,
    PAIRS,
    TIMES_LONGER,
    TRAINED,
    Sample,
    plain,
    resolved_sample,
    sample,
)
from service.figures.encodings.similarity import (
    attention_figure,
    focus,
    focus_figure,
    similarity,
    similarity_figure,
    weights,
    word_vectors,
)
from service.figures.encodings.waves import rotation_figure, sinusoids_figure

PAGE, PICTURES = "primer.md", "primer"
WORDS = ["the", "cat", "saw", "the", "dog", "and", "the", "dog", "saw", "the", "cat"]
HEAD = 2
"""Head of the pictures of biases."""
LEAD = 6
"""Lead of the key in the picture of attention that thins out."""
LONGER = TIMES_LONGER * TRAINED

Encodings = Mapping[str, ResolvedRecipe]
FIGURES: dict[str, Callable[[Encodings], go.Figure]] = {
    "attention": lambda given: attention_figure(given, WORDS, 2 * PAIRS, HEAD),
    "sinusoids": lambda _: sinusoids_figure(plain().inv_freq, length=128, pairs=(0, 4, 8, 12)),
    "biases": lambda given: bias_matrices_figure(
        {name: resolved.recipe for name, resolved in given.items()}, HEAD, length=64, floor=-4.0
    ),
    "rotation": lambda _: rotation_figure(plain().inv_freq, tokens=8, pairs=(0, 4, 8)),
    "similarity": lambda given: similarity_figure(given, near=32, far=LONGER, trained_length=TRAINED),
    "wavelengths": lambda given: wavelengths_figure(
        plain().inv_freq, {name: resolved.inv_freq for name, resolved in given.items()}, TRAINED
    ),
    "focus": lambda given: focus_figure(given, LEAD, LONGER, TRAINED),
}


def files() -> Iterator[tuple[str, str]]:
    """(path, text) of the page and of every picture."""
    page, figures = primer()
    yield PAGE, page
    for name, figure in figures.items():
        yield f"{PICTURES}/{name}.svg", svg(figure)


@cache
def primer() -> tuple[str, dict[str, go.Figure]]:
    """The page and its figures by name."""
    figures: dict[str, go.Figure] = {}

    def picture(name: str, about: str, encodings: Mapping[str, str] | None = None) -> str:
        figures[name] = FIGURES[name]({label: facts(text).resolved for label, text in (encodings or {}).items()})
        return f"![{about}]({PICTURES}/{name}.svg)"

    source = resources("service.docs").joinpath("primer.md.jinja").read_text(encoding="utf-8")
    # The result is Markdown: nothing in it is escaped.
    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False)
    environment.filters["percent"] = percent
    environment.filters["count"] = "{:,.0f}".format
    environment.filters["short"] = "{:.4g}".format
    page = environment.from_string(source).render(
        **{"pe": facts, "picture": picture, "methods": len(METHODS), "L0": TRAINED, "longer": LONGER},
        **{"pairs": PAIRS, "heads": HEADS, "head": HEAD, "lead": LEAD},
    )
    return page, figures


@dataclass(frozen=True)
class Facts:
    """Numbers of one encoding, on the model of the pictures at four times its trained length."""

    drawn: Sample

    @property
    def resolved(self) -> ResolvedRecipe:
        return self.drawn.resolved

    @property
    def formula(self) -> str:
        return METHODS[self.drawn.name].formula

    @property
    def paper(self) -> str:
        return linked(METHODS[self.drawn.name].paper)

    @property
    def reach(self) -> str:
        return METHODS[self.drawn.name].reach

    @property
    def parameters(self) -> Mapping[str, Any]:
        """Every parameter in effect."""
        return parse(self.drawn.fields).parameters(self.drawn.geometry)

    @property
    def wavelengths(self) -> list[float]:
        """Tokens of one turn of each rotary pair, fastest first."""
        return [math.tau / inv_freq for inv_freq in self.resolved.inv_freq]

    @property
    def unfinished(self) -> int:
        """Rotary pairs without a full turn within the trained length."""
        return sum(wavelength > TRAINED for wavelength in self.wavelengths)

    def stretched(self, times: float) -> int:
        """Rotary pairs with exactly ``times`` the wavelength of plain RoPE."""
        both = zip(self.wavelengths, facts("default").wavelengths, strict=True)
        return sum(math.isclose(now, times * before, rel_tol=1e-6) for now, before in both)

    @property
    def multiplier(self) -> float:
        """Attention temperature of the last token."""
        temperature = self.resolved.recipe.attention_temperature
        return 1.0 if temperature is None else float(temperature(torch.tensor([LONGER - 1])))

    def bias(self, head: int, distance: int) -> float:
        """The bias on the score of one head at one distance."""
        bias = self.resolved.recipe.score_bias
        assert bias is not None
        return float(bias(torch.tensor([[distance]]), torch.tensor([[0]]))[head])

    def distance(self, apart: int) -> float:
        """Effective distance of the last token to the one ``apart`` tokens before it."""
        last = torch.tensor([LONGER])
        return float(effective_distance(self.resolved.recipe, last, last - apart)[..., 0])

    def weight(self, query: int, key: int) -> float:
        """Attention weight in the picture of the sentence."""
        states = word_vectors(WORDS, 2 * PAIRS)
        return float(weights(self.resolved, states, states, HEAD)[query, key])

    def similarity(self, distance: int) -> float:
        """Score of a query with an equal key, as a share of that without rotation."""
        return float(similarity(self.resolved, torch.tensor([distance]), LONGER))

    def focus(self, keys: int) -> float:
        """Weight of one key whose score leads by ``LEAD`` among ``keys``."""
        return float(focus(self.resolved, LEAD, torch.tensor([keys])))


@cache
def facts(text: str) -> Facts:
    """The facts of an encoding in its short form. A name alone is the method as its own page draws it."""
    fields = from_text(text)
    return Facts(sample(text) if len(fields) == 1 else resolved_sample(fields))
