"""Pictures of one encoding: its frequencies, distances and biases, and what rotation does to a vector.

Rotation by m * theta: Su et al. 2021 (arXiv:2104.09864), equation 34. Sine and cosine by position and dimension:
Vaswani et al. 2017 (arXiv:1706.03762), section 3.5.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
import torch
from matplotlib import colormaps
from matplotlib.colors import to_hex
from plotly.subplots import make_subplots

from patches import Recipe, ResolvedRecipe, RopeGeometry, effective_distance, parse, resolve
from service.evaluation.results import Row
from service.figures.drawing.axes import linear_axis, log_axis
from service.figures.drawing.charts import TOP, new_figure, write_layout
from service.figures.drawing.curves import Curve, add_curves
from service.figures.drawing.panels import SEQUENTIAL, Panel, grid, heat_maps
from service.figures.drawing.style import FAINT, INK, line_style
from service.figures.encodings.frequencies import MOST_TOKENS, TIMES_LONGER, frequency_png, wavelength
from service.figures.encodings.positions import PLAIN, different_columns
from service.figures.picture import Picture, rows_of

LEAST_BIAS = -16.0
"""Where the colours of biases end: a weight of exp(-16) of the largest is nothing."""
CELLS = 128
"""Most cells of a matrix each way."""
HEADS = 6
"""Most heads whose biases are drawn: the ends and what is between them at equal steps."""
POSITIONS, TURNED = 128, 8
"""Positions of the heat map of sines, and positions that a vector is rotated to."""


def pictures_of_encoding(resolved: ResolvedRecipe, geometry: RopeGeometry, length: int, name: str) -> list[Picture]:
    """Every picture that shows something of an encoding, for ``length`` tokens; ``name`` is what titles call it."""
    trained, recipe = geometry.original_max_position_embeddings, resolved.recipe
    at_length = f"{name} at {length:,} tokens"
    found = []
    if resolved.rotates:
        found += [
            frequencies_picture(resolved, geometry, at_length),
            rotation_picture(resolved.inv_freq, at_length),
            sinusoid_picture(resolved.inv_freq, at_length),
        ]
    if recipe.bands != Recipe(None).bands:
        found.append(distance_picture(recipe, length, trained, name))
    if recipe.score_bias is not None:
        found.append(bias_picture(recipe, length, name))
    return found


def encoding_png(
    pairs: Sequence[Mapping[str, Any]], trained_length: int, name: str, recipe: Recipe, length: int
) -> bytes:
    """What an encoding changes, as PNG: where it only moves positions, its distances; otherwise ``frequency_png``.

    ``pairs`` are as for ``frequency_png``; distances are drawn for ``length`` tokens, but at least for 4 times the
    trained length.
    """
    moved = recipe.bands != Recipe(None).bands and recipe.score_bias is None
    if moved and all(pair["wavelength_before"] == pair["wavelength_after"] for pair in pairs):
        drawn = min(max(length, TIMES_LONGER * trained_length), MOST_TOKENS)
        return distance_picture(recipe, drawn, trained_length, name).png()
    return frequency_png(pairs, trained_length, f"{name} at {length:,} tokens", recipe, length)


def frequencies_picture(resolved: ResolvedRecipe, geometry: RopeGeometry, name: str) -> Picture:
    """Wavelength in tokens of each rotary pair before and after, before being the checkpoint's own encoding."""
    trained = geometry.original_max_position_embeddings
    before = _wavelengths(resolve(parse({"method": "default"}), geometry, trained), len(resolved.inv_freq))
    after = _wavelengths(resolved, len(before))
    pairs = list(range(len(before)))
    known = [value for value in (*before, *after, float(trained)) if value is not None]
    title = f"Wavelengths: {name}"
    figure = new_figure(title, "tokens in which each rotary pair turns once")
    x = linear_axis("rotary pair, fastest first", -0.5, len(pairs) - 0.5)
    figure.update_layout(xaxis=x, yaxis=log_axis("wavelength, tokens", min(known) / 1.5, max(known) * 1.5), margin_l=96)
    add_curves(figure, [Curve("before", pairs, before), Curve("after", pairs, after)])
    figure.add_hline(y=trained, line={"color": FAINT, "dash": "dash", "width": 1.2})
    note = f"trained length {trained:,}"
    figure.add_annotation(
        x=0, xref="x domain", xanchor="left", xshift=4, y=math.log10(trained), yref="y", yanchor="bottom",
        text=note, showarrow=False, font={"size": 11, "color": FAINT},
    )  # fmt: skip
    rows = rows_of(pair=pairs, wavelength_before=before, wavelength_after=after)
    caption = (
        "Pairs above the dashed line did not turn once in training: at longer distances they reach angles that the "
        "model never saw. An encoding stretches wavelengths so that they stay within what was seen."
    )
    return Picture("frequencies", title, figure, rows, caption)


def rotation_picture(inv_freq: Sequence[float], name: str, positions: Sequence[int] = tuple(range(TURNED))) -> Picture:
    """The unit vector (1, 0) rotated by m * theta for every position m, for a fast, a middle and a slow pair."""
    turning = [index for index, theta in enumerate(inv_freq) if theta]
    chosen = sorted({turning[0], turning[len(turning) // 4], turning[-1]})
    title = f"Rotation: {name}"
    figure = make_subplots(
        rows=1, cols=len(chosen), subplot_titles=[_turn_text(inv_freq[pair], pair) for pair in chosen]
    )
    write_layout(figure, title, "the vector (1, 0) at position m, rotated by m·θ", height=440, right=120)
    figure.update_annotations(font={"size": 12, "color": INK})
    figure.update_layout(margin_t=TOP + 24)
    ramp = colormaps[SEQUENTIAL.lower()]
    shades = [to_hex(ramp(0.9 * at / max(len(positions) - 1, 1))) for at in range(len(positions))]
    rows: list[Row] = []
    for column, pair in enumerate(chosen, 1):
        circle = [math.tau * step / 96 for step in range(97)]
        figure.add_scatter(
            x=[math.cos(angle) for angle in circle], y=[math.sin(angle) for angle in circle], mode="lines",
            line={"color": "#cccccc", "width": 1}, hoverinfo="skip", showlegend=False, row=1, col=column,
        )  # fmt: skip
        for position, shade in zip(positions, shades, strict=True):
            angle = position * inv_freq[pair]
            x, y = math.cos(angle), math.sin(angle)
            rows.append({"pair": pair, "theta": inv_freq[pair], "position": position, "x": x, "y": y})
            shown = {"name": f"m = {position}", "legendgroup": str(position), "row": 1, "col": column}
            hover = f"m = {position}: {math.degrees(angle):.4g}°<extra></extra>"
            figure.add_scatter(
                x=[0, x], y=[0, y], mode="lines", line={"color": shade, "width": 2.4}, hoverinfo="skip",
                showlegend=column == 1, **shown,
            )  # fmt: skip
            figure.add_scatter(
                x=[x], y=[y], mode="markers", marker={"color": shade, "size": 10}, hovertemplate=hover,
                showlegend=False, **shown,
            )  # fmt: skip
        axis = {**linear_axis("", -1.15, 1.15, ticks=[-1, 0, 1]), "constrain": "domain"}
        figure.update_xaxes(**axis, row=1, col=column)
        figure.update_yaxes(**axis, scaleanchor=f"x{column if column > 1 else ''}", row=1, col=column)
    caption = (
        "Two neighbouring dimensions of a query or key, as RoPE turns them. The fast pair tells neighbours apart; "
        "the slow pair hardly moves and tells only how far away something is on the whole."
    )
    return Picture("rotation", title, figure, rows, caption)


def sinusoid_picture(inv_freq: Sequence[float], name: str, positions: int = POSITIONS) -> Picture:
    """sin and cos of m * theta_i by position m and dimension: dimension 2i is the sine, 2i + 1 the cosine."""
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * torch.tensor(inv_freq, dtype=torch.float64)
    values = torch.stack((angles.sin(), angles.cos()), -1).flatten(1)
    title = f"Sine and cosine by position and dimension: {name}"
    dimensions = list(range(values.shape[1]))
    figure = heat_maps(
        [Panel("", dimensions, list(range(positions)), values.tolist())],
        (title, "dimension 2i: sin(m·θᵢ), dimension 2i+1: cos(m·θᵢ)"),
        (linear_axis("dimension", -0.5, len(dimensions) - 0.5), linear_axis("position m", positions - 0.5, -0.5)),
        {"cmin": -1, "cmax": 1, "colorbar": {"title": {"text": "value"}}},
        panel_height=360,
    )
    rows: list[Row] = [
        {"position": position, "dimension": dimension, "value": value}
        for position, line in enumerate(values.tolist())
        for dimension, value in enumerate(line)
    ]
    caption = (
        "Each row is what tells one position from the others. Left, dimensions change with every token; right, so "
        "slowly that many positions look alike."
    )
    return Picture("sinusoid", title, figure, rows, caption)


def distance_picture(recipe: Recipe, length: int, trained_length: int, name: str) -> Picture:
    """Effective distance of every query and key, empty where a key is not attended, the slowest pair's; and that of the
    last token to each key, one line per group of pairs that differ."""
    every = -(-length // CELLS)
    keys = torch.arange(0, length, every)  # the first ones among them: masks keep those
    queries = (keys + every - 1).clamp(max=length - 1)
    distance = effective_distance(recipe, queries, keys)
    title = f"Effective distance at {length:,} tokens: {name}"
    subtitle = f"{trained_length:,} trained; empty: not attended; right: from the last token, grey: plain RoPE"
    panels = ["every query and key", "the last token"]
    figure = grid(panels, (title, subtitle), columns=2, panel_height=400, right=120, spacing=0.14)
    z = [[_or_none(value) for value in row] for row in distance[..., -1].tolist()]
    places = queries.tolist(), keys.tolist()
    figure.add_trace(go.Heatmap(x=places[1], y=places[0], z=z, coloraxis="coloraxis", hoverongaps=False), row=1, col=1)
    figure.update_xaxes(**linear_axis("key", -every / 2, length + every / 2), row=1, col=1)
    figure.update_yaxes(**linear_axis("query", length + every / 2, -every / 2), row=1, col=1)
    real = [length - 1 - key for key in places[1]]
    figure.add_scatter(x=real, y=real, mode="lines", line={"color": PLAIN, "width": 4}, name="plain RoPE",
                       showlegend=False, row=1, col=2)  # fmt: skip
    for index, column in enumerate(different_columns(distance[-1])):
        style = line_style(index)
        alone = column.isnan().any()  # a few keys between gaps make no line
        figure.add_scatter(
            x=real, y=[_or_none(value) for value in column.tolist()], mode="lines+markers" if alone else "lines",
            line={"color": style.colour, "dash": style.dash[1], "width": 2}, marker={"size": 4, "color": style.colour},
            name=name, showlegend=False, row=1, col=2,
        )  # fmt: skip
    top = 1.05 * max(1.2 * trained_length, float(distance[-1].nan_to_num(0.0).max()))
    figure.update_xaxes(**linear_axis("distance between tokens", 0, 1.03 * length), row=1, col=2)
    figure.update_yaxes(**linear_axis("effective distance, tokens", 0, top), row=1, col=2)
    figure.add_hline(y=trained_length, line={"color": FAINT, "dash": "dash", "width": 1.2}, row=1, col=2)
    bar = {"cmin": 0, "cmax": trained_length, "colorbar": {"title": {"text": "tokens"}}}
    figure.update_layout(coloraxis={"colorscale": SEQUENTIAL, **bar})
    caption = (
        "By how many positions a key is turned against a query. Colours end at the trained length, the dashed line: "
        "beyond it, distances are new to the model."
    )
    rows = _cells(places, {"": distance[..., -1]})
    return Picture("effective-distance", title, figure, rows, caption)


def bias_picture(recipe: Recipe, length: int, name: str) -> Picture:
    """What is added to the scores of every query and key, one panel per head, at most six."""
    assert recipe.score_bias is not None
    tokens = _sampled(length)
    q_idx, kv_idx = tokens[:, None], tokens[None]
    causal = kv_idx <= q_idx
    bias = torch.where(causal, recipe.score_bias(q_idx, kv_idx).double(), torch.nan)
    heads = torch.linspace(0, len(bias) - 1, min(HEADS, len(bias))).round().int().tolist()
    shown = {f"head {head}": bias[head] for head in heads}
    seen = [value[causal] for value in shown.values()]
    low, high = min(float(v.min()) for v in seen), max(float(v.max()) for v in seen)
    cut = f"; colours end at {LEAST_BIAS:g}" if low < LEAST_BIAS else ""
    return _matrix_picture(
        ("score-bias", f"Score bias at {length:,} tokens: {name}", f"added to the scores, per head{cut}"),
        tokens,
        shown,
        {
            "cmin": max(low, LEAST_BIAS),
            "cmax": high if high > low else low + 1,
            "colorbar": {"title": {"text": "added"}},
        },
        "The darker, the less a query attends to a key at that place. Heads differ in how far they look.",
    )


def _matrix_picture(
    titles: tuple[str, str, str], tokens: torch.Tensor, shown: dict[str, torch.Tensor], colours: dict[str, object],
    caption: str,
) -> Picture:  # fmt: skip
    """Matrices [queries, keys] as panels; ``titles`` are the picture's name, title and subtitle."""
    places, last = tokens.tolist(), int(tokens[-1])
    edge = max(places[1] - places[0], 1) / 2 if len(places) > 1 else 0.5
    figure = heat_maps(
        [
            Panel(title, places, places, [[_or_none(v) for v in row] for row in z.tolist()])
            for title, z in shown.items()
        ],
        titles[1:],
        (linear_axis("key", -edge, last + edge), linear_axis("query", last + edge, -edge)),
        colours,
        panel_height=480 if len(shown) == 1 else 240,
    )
    return Picture(titles[0], titles[1], figure, _cells((places, places), shown), caption)


def _cells(places: tuple[list[int], list[int]], shown: dict[str, torch.Tensor]) -> list[Row]:
    """A row per cell with a value; ``places`` are queries and keys."""
    return [
        {"panel": title, "query": query, "key": key, "value": value}
        for title, z in shown.items()
        for query, line in zip(places[0], z.tolist(), strict=True)
        for key, value in zip(places[1], line, strict=True)
        if not math.isnan(value)
    ]


def _sampled(length: int) -> torch.Tensor:
    """Token indices at equal steps, the last one among them, at most ``CELLS``."""
    every = -(-length // CELLS)
    return torch.arange(length - 1, -1, -every).flip(0)


def _wavelengths(resolved: ResolvedRecipe, pairs: int) -> list[float | None]:
    return [wavelength(value) for value in resolved.inv_freq or (0.0,) * pairs]


def _turn_text(theta: float, pair: int) -> str:
    turn = math.tau / theta
    return (
        f"pair {pair}: θ = {theta:.3g}<br>a turn in {turn:,.0f} tokens"
        if turn >= 100
        else (f"pair {pair}: θ = {theta:.3g}<br>a turn in {turn:.1f} tokens")
    )


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value
