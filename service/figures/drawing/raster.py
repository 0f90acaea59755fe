"""A Plotly figure drawn by Matplotlib: PNG, SVG and PDF without a browser.

Traces: scatter lines, markers and closed shapes, bars, heat maps with one colour axis; others are refused.
Around them: linear and logarithmic axes, subplots, shapes, annotations, the legend.
Matplotlib's object interface is used, never pyplot: its global state is not safe in a server.
"""

from __future__ import annotations

import io
import warnings
from typing import Any

import matplotlib
import plotly.graph_objects as go
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.transforms import ScaledTranslation

from service.figures.drawing.raster_text import POINTS, extra_width, families, label_texts, text
from service.figures.drawing.raster_traces import Colours, draw_bars, draw_heat_map, draw_scatter, legend_line
from service.figures.drawing.style import FAINT, GRID, INK, RULE

WIDTH, HEIGHT = 1000, 480
"""Size of a figure without a width or a height, pixels."""
DPI, PIXELS_PER_INCH = 150, 100
"""The PNG has 1.5 pixels for each pixel of the page."""
BAR_WIDTH = 16
MARGINS = {"l": 80, "r": 80, "t": 100, "b": 80}
Box = tuple[float, float, float, float]


def png(figure: go.Figure) -> bytes:
    """``figure`` as PNG, through Agg, which needs no display. Not thread-safe: it sets Matplotlib's settings."""
    out = io.BytesIO()
    with matplotlib.rc_context({"font.family": families()}):
        FigureCanvasAgg(raster(figure)).print_png(out)  # type: ignore[no-untyped-call]
    return out.getvalue()


def svg(figure: go.Figure) -> str:
    """``figure`` as SVG, the same text for the same figure. Not thread-safe, as ``png``."""
    out = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "ropeway", "svg.fonttype": "none"}), warnings.catch_warnings():
        # Only the place of a text depends on Matplotlib's fonts here.
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        FigureCanvasSVG(raster(figure)).print_svg(out, metadata={"Date": None})  # type: ignore[no-untyped-call]
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


def pdf(figure: go.Figure) -> bytes:
    """``figure`` as PDF with its fonts, the same bytes for the same figure. Not thread-safe, as ``png``."""
    from matplotlib.backends.backend_pdf import FigureCanvasPdf

    out = io.BytesIO()
    with matplotlib.rc_context({"pdf.fonttype": 42, "font.family": families()}):
        FigureCanvasPdf(raster(figure)).print_pdf(out, metadata={"CreationDate": None})  # type: ignore[no-untyped-call]
    return out.getvalue()


def raster(figure: go.Figure) -> Figure:
    """``figure`` as a Matplotlib figure of the same proportions.

    Raises:
        ValueError: for a type of trace without a drawing here.
    """
    drawn = figure.to_plotly_json()
    layout: dict[str, Any] = drawn["layout"]
    width, height = layout.get("width") or WIDTH, layout.get("height") or HEIGHT
    size = width / PIXELS_PER_INCH, height / PIXELS_PER_INCH
    out = Figure(figsize=size, dpi=DPI, facecolor="white")
    named = [trace for trace in drawn["data"] if trace["type"] == "scatter" and _in_legend(trace)]
    box = _box(layout, [trace["name"] for trace in named], width, height)
    colours = _colours(layout)
    panels: dict[tuple[str, str], Axes] = {}
    for order, trace in enumerate(drawn["data"]):
        key = trace.get("xaxis", "x"), trace.get("yaxis", "y")
        if key not in panels:
            panels[key] = _panel(out, layout, key, box)
        _draw(panels[key], trace, order, colours)
    for shape in layout.get("shapes", ()):
        _shape(panels, shape)
    for note in layout.get("annotations", ()):
        _annotation(out, panels, note, box)
    _titles(out, layout.get("title", {}), width, height)
    if named and layout.get("showlegend", len(named) > 1):
        _legend(out, named, box, width, layout.get("legend", {}))
    if colours is not None and any(trace["type"] == "heatmap" for trace in drawn["data"]):
        _colour_bar(out, layout["coloraxis"], colours, box, width)
    return out


def _box(layout: dict[str, Any], named: list[str], width: float, height: float) -> Box:
    """Place of the axes, parts of the figure: left, bottom, width, height. Labels that grow take room from it."""
    margin = {**MARGINS, **layout.get("margin", {})}
    ticks = [tick for key, axis in layout.items() if key.startswith("yaxis") for tick in axis.get("ticktext") or ()]
    left, right = margin["l"] + extra_width(ticks), margin["r"] + extra_width(named)
    return (
        left / width,
        margin["b"] / height,
        1 - (left + right) / width,
        1 - (margin["t"] + margin["b"]) / height,
    )


def _draw(axes: Axes, trace: dict[str, Any], order: int, colours: Colours | None) -> None:
    kind = trace["type"]
    if kind == "scatter":
        draw_scatter(axes, trace, order)
    elif kind == "bar":
        draw_bars(axes, trace)
    elif kind == "heatmap" and colours is not None:
        draw_heat_map(axes, trace, colours)
    else:
        raise ValueError(f"traces of type {kind} are not drawn")


def _colours(layout: dict[str, Any]) -> Colours | None:
    axis = layout.get("coloraxis")
    if axis is None:
        return None
    ramp = LinearSegmentedColormap.from_list("ramp", [(float(at), colour) for at, colour in axis["colorscale"]])
    if axis.get("reversescale"):
        ramp = ramp.reversed()
    return Colours(ramp, Normalize(axis["cmin"], axis["cmax"]))


def _panel(figure: Figure, layout: dict[str, Any], key: tuple[str, str], box: Box) -> Axes:
    """Empty axes for one subplot, with its scales and ticks."""
    x, y = (layout.get(f"{name[0]}axis{name[1:]}", {}) for name in key)
    (left, right), (low, high) = x.get("domain", (0, 1)), y.get("domain", (0, 1))
    at = (box[0] + left * box[2], box[1] + low * box[3], (right - left) * box[2], (high - low) * box[3])
    axes = figure.add_axes(at)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(RULE)
    axes.tick_params(which="both", labelsize=12 * POINTS, color=RULE, labelcolor=INK)
    for name, axis in (("x", x), ("y", y)):
        _scale(axes, name, axis)
    if y.get("scaleanchor"):
        axes.set_aspect("equal", adjustable="box")
    return axes


def _scale(axes: Axes, name: str, axis: dict[str, Any]) -> None:
    """Scale, ends, ticks, grid and title of one axis."""
    logarithmic = axis.get("type") == "log"
    side = axes.xaxis if name == "x" else axes.yaxis
    if logarithmic:
        (axes.set_xscale if name == "x" else axes.set_yscale)("log")
    if axis.get("range") is not None:
        ends = [10.0**end if logarithmic else end for end in axis["range"]]
        (axes.set_xlim if name == "x" else axes.set_ylim)(*ends)
    if axis.get("tickvals") is not None:
        side.set_major_locator(ticker.FixedLocator(list(axis["tickvals"])))
        side.set_major_formatter(ticker.FixedFormatter(label_texts(axis["ticktext"])))
        side.set_minor_locator(ticker.NullLocator())
    if axis.get("showgrid", True):
        axes.grid(axis=name, color=axis.get("gridcolor", GRID), lw=0.7)  # type: ignore[arg-type]
    if axis.get("showticklabels") is False:
        side.set_tick_params(labelbottom=False, labelleft=False)
    if axis.get("tickangle"):
        axes.tick_params(axis=name, rotation=-axis["tickangle"])  # type: ignore[arg-type]
    if axis.get("visible") is False:
        side.set_visible(False)
        axes.spines["bottom" if name == "x" else "left"].set_visible(False)
    side.set_label_text(text((axis.get("title") or {}).get("text", "")), size=13 * POINTS, color=INK)


def _place(panels: dict[tuple[str, str], Axes], ref: dict[str, Any]) -> tuple[Axes | None, str, str]:
    """The axes that a shape or an annotation refers to (None: the paper), and the units of x and y."""
    x, y = ref.get("xref", "x"), ref.get("yref", "y")
    x_name, y_name = x.removesuffix(" domain"), y.removesuffix(" domain")
    found = next((axes for (a, b), axes in panels.items() if x_name in (a, "paper") and y_name in (b, "paper")), None)
    if x_name == "paper" and y_name == "paper":
        found = None
    return found, "data" if x == x_name != "paper" else "part", "data" if y == y_name != "paper" else "part"


def _shape(panels: dict[tuple[str, str], Axes], shape: dict[str, Any]) -> None:
    axes, x_kind, y_kind = _place(panels, shape)
    if axes is None:
        raise ValueError("shapes are drawn in axes only")
    across = {("data", "part"): axes.get_xaxis_transform(), ("part", "data"): axes.get_yaxis_transform()}
    transform = across.get((x_kind, y_kind), axes.transData)
    ends = [shape["x0"], shape["x1"]], [shape["y0"], shape["y1"]]
    line = shape.get("line", {})
    if shape["type"] == "line":
        dashes = {"dash": (0, (5, 3)), "dot": (0, (1, 2))}.get(line.get("dash", ""), "-")
        drawn = Line2D(*ends, color=line.get("color", INK), lw=line.get("width", 1.2), ls=dashes, transform=transform)
        axes.add_line(drawn)
        drawn.set_zorder(1)
        return
    (left, right), (low, high) = ends
    filled = {"color": shape.get("fillcolor", "black"), "alpha": shape.get("opacity", 1.0), "lw": 0, "zorder": 0}
    axes.add_patch(Rectangle((left, low), right - left, high - low, transform=transform, **filled))


def _annotation(figure: Figure, panels: dict[tuple[str, str], Axes], note: dict[str, Any], box: Box) -> None:
    axes, x_kind, y_kind = _place(panels, note)
    font = note.get("font", {})
    size, colour = font.get("size", 12) * POINTS, font.get("color", INK)
    look: dict[str, Any] = {
        "ha": note.get("xanchor", "center"),
        "va": {"middle": "center"}.get(note.get("yanchor", "middle"), note.get("yanchor", "center")),
        "rotation": -note.get("textangle", 0),
    }
    shift = note.get("xshift", 0), note.get("yshift", 0)
    x, y = note["x"], note["y"]
    if axes is None:
        x, y, across = box[0] + x * box[2], box[1] + y * box[3], figure.transFigure
    else:
        # A log axis takes an annotation's place as its exponent.
        x = 10.0**x if x_kind == "data" and axes.get_xscale() == "log" else x
        y = 10.0**y if y_kind == "data" and axes.get_yscale() == "log" else y
        across = {
            ("data", "part"): axes.get_xaxis_transform(),
            ("part", "data"): axes.get_yaxis_transform(),
            ("part", "part"): axes.transAxes,
        }.get((x_kind, y_kind), axes.transData)
    target = figure if axes is None else axes
    written = target.text(x, y, text(note["text"]), transform=across, size=size, color=colour, **look)
    if any(shift):
        right, up = (pixels / PIXELS_PER_INCH for pixels in shift)
        written.set_transform(across + ScaledTranslation(right, up, figure.dpi_scale_trans))


def _titles(figure: Figure, title: dict[str, Any], width: float, height: float) -> None:
    """Title and subtitle at the top left, cut to the figure's width."""
    subtitle = (title.get("subtitle") or {}).get("text", "")
    for shown, top, size, weight, per_char in (
        (title.get("text", ""), 30, 17 * POINTS, "bold", 9.4),
        (subtitle, 56, 12 * POINTS, "normal", 6.4),
    ):
        most = int((width - 20) / per_char)
        cut = text(shown)
        cut = cut if len(cut) <= most else cut[: most - 1] + "…"
        colour = INK if weight == "bold" else FAINT
        figure.text(12 / width, 1 - top / height, cut, size=size, weight=weight, color=colour, va="center")


def _legend(figure: Figure, traces: list[dict[str, Any]], box: Box, width: float, look: dict[str, Any]) -> None:
    ranked = sorted(traces, key=lambda trace: trace.get("legendrank", 1000))
    figure.legend(
        [legend_line(trace) for trace in ranked],
        label_texts([trace["name"] for trace in ranked]),
        loc="upper left",
        bbox_to_anchor=(box[0] + box[2] + 8 / width, box[1] + box[3] + 0.01),
        frameon=False,
        fontsize=12 * POINTS,
        handlelength=3.2,
        title=text((look.get("title") or {}).get("text", "")) or None,
        title_fontsize=12 * POINTS,
        alignment="left",
    )


def _in_legend(trace: dict[str, Any]) -> bool:
    return trace.get("showlegend", True) and bool(trace.get("name")) and trace.get("mode") != "none"


def _colour_bar(figure: Figure, axis: dict[str, Any], colours: Colours, box: Box, width: float) -> None:
    height = min(box[3], 0.8)
    axes = figure.add_axes((box[0] + box[2] + 20 / width, box[1] + box[3] - height, BAR_WIDTH / width, height))
    bar = axes.figure.colorbar(ScalarMappable(colours.norm, colours.ramp), cax=axes)
    bar.outline.set_visible(False)
    look = axis.get("colorbar", {})
    axes.tick_params(labelsize=11 * POINTS, color=RULE, labelcolor=INK)
    if look.get("tickvals") is not None:
        axes.yaxis.set_major_locator(ticker.FixedLocator(list(look["tickvals"])))
        axes.yaxis.set_major_formatter(ticker.FixedFormatter([text(shown) for shown in look["ticktext"]]))
    axes.set_title(text((look.get("title") or {}).get("text", "")), size=11 * POINTS, color=INK, loc="left")
