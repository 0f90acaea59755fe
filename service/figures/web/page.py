"""Pages with figures, made of Plotly's script, one script of ours and the figures as JSON."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from typing import Any

import plotly.graph_objects as go
from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup
from plotly.io.json import to_json_plotly
from plotly.offline import get_plotlyjs, get_plotlyjs_version

from service.figures.drawing.style import DARK
from service.figures.picture import Picture
from service.figures.web.layouts import narrow, wide

PLOTLY_PATH = f"/static/plotly-{get_plotlyjs_version()}.min.js"
"""The server's path of Plotly's script. Each version has its path, so clients may cache it for ever."""
PLOTLY_FROM_A_PAGE = f"../..{PLOTLY_PATH}"
"""The relative path from a page two levels deep: it works behind any prefix of a proxy."""
CODE = re.compile(r"`([^`]+)`")
"""As on the page of the server: `prose.tsx`."""


def plot_page(picture: Picture, plotly: str | None = None) -> str:
    """One page, which loads Plotly's script from the address ``plotly``.

    Without an address the script is in the page, which then works offline.
    """
    return template("service.figures.web", "plot.html").render(
        picture=picture,
        css=css(),
        plotly=plotly_script(plotly),
        figure=embedded(picture, picture.name),
        drawing=drawing(),
    )


def embedded(picture: Picture, div_id: str) -> Markup:
    """The element of a figure and its JSON, for the script of ``drawing``."""
    # Plotly's JSON has no "<" and no "/" in it: nothing in it can end the script.
    return Markup(
        '<div id="{0}" class="alive"></div>\n<script type="application/json" data-figure="{0}">{1}</script>'
    ).format(div_id, Markup(to_json_plotly(described(picture.figure))))


def described(figure: go.Figure) -> dict[str, Any]:
    """Traces and both layouts of a figure."""
    return {"data": figure.to_plotly_json()["data"], "wide": wide(figure), "narrow": narrow(figure)}


def as_json(pictures: Iterable[Picture], **about: Any) -> str:
    """``about`` and the pictures, for pages that draw them: texts, figures, colours of dark pages, Plotly's path."""
    figures = [
        {"name": one.name, "title": html.unescape(one.title), "subtitle": one.subtitle, "caption": one.caption}
        | described(one.figure)
        for one in pictures
    ]
    text: str = to_json_plotly({**about, "figures": figures, "dark": DARK, "script": PLOTLY_PATH})
    return text


def plotly_script(address: str | None) -> Markup:
    """Plotly's script: from its address, or in the page."""
    if address is None:
        return Markup("<script>{0}</script>").format(Markup(get_plotlyjs()))
    return Markup('<script src="{0}"></script>').format(address)


def drawing() -> Markup:
    """The end of a page with figures: the script that draws them all."""
    return Markup('<script type="application/json" id="dark-colours">{0}</script>\n<script>{1}</script>').format(
        Markup(to_json_plotly(DARK)), Markup(_file("figures.js"))
    )


def scripts(standalone: bool) -> list[str]:
    """Inline scripts of a page with figures; a ``standalone`` page includes Plotly's."""
    return [_file("figures.js"), *([get_plotlyjs()] if standalone else [])]


def css() -> Markup:
    """The style sheet of every page."""
    return Markup(_file("page.css"))


@cache
def template(package: str, name: str) -> Template:
    """A page of ``package``; values are escaped unless they are markup."""
    text = files(package).joinpath(name).read_text(encoding="utf-8")
    pages = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    pages.filters["with_code"] = with_code
    return pages.from_string(text)


def with_code(text: str) -> Markup:
    """A sentence with its parts between backticks as code; everything in it is escaped."""
    parts = CODE.split(text)
    return Markup("").join(
        Markup("<code>{0}</code>" if at % 2 else "{0}").format(part) for at, part in enumerate(parts)
    )


@cache
def _file(name: str) -> str:
    return files("service.figures.web").joinpath(name).read_text(encoding="utf-8")
