"""One plot of a report: a description for plotly.js, with what those who can't see it are told.

Colours are names after "@" (`@run0`, `@ink`); the page puts a theme's own in their place. Texts that stand in
a plot go through `plain`, since plotly takes them for a small kind of HTML.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from offbeat.report.verdict import Table

Trace = dict[str, Any]
LONG = 90
"""Characters of a name in a plot."""
COLOURS = 7
DASHES = ("solid", "dash", "dot", "dashdot")
SYMBOLS = ("circle", "square", "triangle-up", "x", "star", "hexagon", "triangle-down")
LEGEND = {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "xanchor": "left"}
PROTOCOLS = ("bsp", "local", "dasgd", "ssp", "asp")


@dataclass(frozen=True)
class Figure:
    """name: of the element, unique in the page. alt: what is to be seen, in a sentence. note: how to read it.

    axes: for plots whose x may be one of several: for each choice a `title`, `x`, a list of values per trace,
    and `shapes` and `annotations` of the layout. log: whether the y axis may be logarithmic."""

    name: str
    title: str
    alt: str
    data: list[Trace]
    layout: dict[str, Any]
    note: str = ""
    axes: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    table: Table | None = None
    log: bool = False

    def as_json(self) -> dict[str, Any]:
        return {
            "data": self.data,
            "layout": {**base(), **self.layout},
            "axes": dict(self.axes),
            "log": self.log,
        }


def base() -> dict[str, Any]:
    """The layout that all plots share."""
    return {
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": "@ink", "size": 13, "family": "system-ui, sans-serif"},
        "margin": {"l": 62, "r": 14, "t": 30, "b": 46},
        "hoverlabel": {"bgcolor": "@card", "bordercolor": "@line", "font": {"color": "@ink"}},
        "legend": LEGEND,
        "dragmode": "zoom",
    }


def axis(title: str = "", **settings: Any) -> dict[str, Any]:
    return {
        "title": {"text": title, "standoff": 8},
        "gridcolor": "@grid",
        "linecolor": "@line",
        "zeroline": False,
        "automargin": True,
        **settings,
    }


def hatched(shape: str, tone: str) -> dict[str, Any]:
    """A bar's pattern: in the card's colour over its own."""
    return {"shape": shape, "fgcolor": "@card", "bgcolor": tone, "solidity": 0.25}


def plain(value: Any, long: int = LONG) -> str:
    """A text for a plot."""
    text = " ".join(str(value).split())
    text = text if len(text) <= long else text[: long - 1] + "…"
    return html.escape(text, quote=False)


def numbers(values: Iterable[float], digits: int = 6) -> list[float | None]:
    """For JSON: six digits that matter, and null for what is no number."""
    return [float(f"{v:.{digits}g}") if math.isfinite(v) else None for v in values]


def colour(group: int) -> str:
    return f"@run{group % COLOURS}"


def word(protocol: str) -> str:
    """Which of the five a protocol's text names; other for none of them."""
    found = protocol.split("(", 1)[0].strip().lower()
    return found if found in PROTOCOLS else "other"
