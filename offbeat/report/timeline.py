"""What each worker did with its time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from offbeat.live import clock, finite
from offbeat.report.axes import bands
from offbeat.report.field import Entry
from offbeat.report.figure import Figure, Trace, axis, numbers, plain
from offbeat.report.history import History, Numbers
from offbeat.report.series import Intervals, intervals
from offbeat.report.verdict import COSTS, Table

LANES = 16
"""So many workers have a lane each; of more, each has a row of colour."""
CELLS = 2400
"""Intervals of all workers that are drawn in lanes, at most."""
MOST = 400
"""Intervals of a worker that are drawn, at most."""
HOW = (
    "The journal holds each worker's computing and waiting about once a second, so the order within an "
    "interval is not known: a bar's height is a share. Of the waiting, what even the member that waited "
    "least has counts as the exchange itself; the rest is waiting for slower workers."
)
MANY = "Below, each worker's row is blue where it computed and grey where it did not."
STATES = (
    ("computing", "@compute"),
    ("exchanging", "@exchange"),
    ("waiting", "@wait"),
)


def timeline(entry: Entry) -> Figure | None:
    """What the workers did, over time. None where the journal doesn't tell."""
    run = entry.history
    ranks = run.pace.ranks
    lanes = len(set(ranks) | set(run.absences)) <= LANES
    what = intervals(run, max(12, min(MOST, CELLS // max(len(ranks), 1))) if lanes else MOST)
    if what is None or not what.begin.size:
        return None
    data, layout = _lanes(run, what) if lanes else _rows(run, what)
    shapes, notes = bands([(p.protocol, p.begin, p.end) for p in run.phases])
    for shape in shapes:  # the colours are the states'; the protocols have a strip above
        shape |= {"y0": 1, "y1": 1.035, "fillcolor": shape["fillcolor"].split("/")[0], "layer": "above"}
    for note in notes:
        note["y"] = 1.035
    if lanes:
        notes += _reasons(run)
    layout |= {"shapes": shapes + _switch_bands(run), "annotations": notes}
    spans = what.end - what.begin
    shares = {name: _total(getattr(what, name), spans) for name, _ in STATES}
    seen = np.isfinite(what.computing)
    rows = [
        [
            str(rank),
            *(f"{100 * _total(getattr(what, name)[:, [i]], spans):.1f}%" for name, _ in STATES),
            clock(sum(until - since for since, until, _ in run.absences.get(rank, [])), precise=True),
            "; ".join(dict.fromkeys(why for _, _, why in run.absences.get(rank, []))) or "–",
        ]
        for i, rank in enumerate(what.ranks)
        if seen[:, i].any()
    ]
    return Figure(
        name=f"timeline-{entry.number}",
        title="What the workers did",
        alt=f"Over time, for {len(rows)} workers, the shares of time spent computing "
        f"({100 * shares['computing']:.0f}% in all), in the exchange itself "
        f"({100 * shares['exchanging']:.0f}%) and waiting for others ({100 * shares['waiting']:.0f}%). "
        "The same per worker is in the table.",
        data=data,
        layout=layout,
        note=HOW if lanes else f"{HOW} {MANY}",
        table=Table(
            ("rank", "computing", "exchange", "waiting", "absent for", "why"),
            rows,
            caption="Shares of each worker's time while it was a member",
        ),
    )


def _total(shares: Numbers, spans: Numbers) -> float:
    known = np.isfinite(shares)
    weights = known * spans[:, None]
    total = float(weights.sum())
    return float((np.where(known, shares, 0.0) * weights).sum() / total) if total else 0.0


def _switch_bands(run: History) -> list[dict[str, Any]]:
    shapes = []
    for record in list(run.all("switch"))[:200]:
        end = run.time(record)
        cost = sum(max(finite(record.get(f"{part}_ms")) or 0.0, 0.0) for part in (*COSTS, "meet")) / 1e3
        shapes.append(
            {
                "type": "rect",
                "xref": "x",
                "yref": "paper",
                "x0": end - cost,
                "x1": end,
                "y0": 0,
                "y1": 1,
                "fillcolor": "@switch/0.5",
                "line": {"color": "@switch", "width": 2},
                "layer": "above",
            }
        )
    return shapes


def _lanes(run: History, what: Intervals) -> tuple[list[Trace], dict[str, Any]]:
    """A lane for every worker, filled to the share that it computed."""
    every = sorted(set(what.ranks) | set(run.absences))
    place = {rank: i for i, rank in enumerate(every)}
    where = np.array([place[rank] for rank in what.ranks], dtype=float)
    bottom = np.broadcast_to(where + 0.42, what.computing.shape)
    data: list[Trace] = []
    known = np.isfinite(what.computing)
    middle = np.broadcast_to(((what.begin + what.end) / 2)[:, None], known.shape)[known]
    width = np.broadcast_to((what.end - what.begin)[:, None], known.shape)[known]
    base = bottom[known]
    texts = _hover(what, known)
    for name, tone in STATES:
        height = 0.84 * getattr(what, name)[known]
        data.append(
            {
                "type": "bar",
                "name": {"exchanging": "exchange"}.get(name, name),
                "x": numbers(middle),
                "width": numbers(width),
                "y": numbers(-height, 4),
                "base": numbers(base, 5),
                "marker": {"color": tone, "line": {"width": 0}},
                "customdata": texts,
                "hovertemplate": "%{customdata}<extra></extra>",
            }
        )
        base = base - height
    away = [(rank, one) for rank, gone in run.absences.items() for one in gone]
    if away:
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": "absent",
                "y": [place[rank] for rank, _ in away],
                "base": numbers(since for _, (since, _, _) in away),
                "x": numbers(until - since for _, (since, until, _) in away),
                "width": 0.84,
                "marker": {
                    "color": "@card",
                    "line": {"width": 1, "color": "@line"},
                    "pattern": {"shape": "/", "fgcolor": "@muted", "size": 7, "solidity": 0.25},
                },
                "customdata": [plain(why) for _, (_, _, why) in away],
                "hovertemplate": "%{customdata}<extra>absent</extra>",
            }
        )
    data += _marks(run, place)
    height = max(260, 110 + 46 * len(every))
    return data, {
        "barmode": "overlay",
        "bargap": 0,
        "height": height,
        "xaxis": axis(seconds(run), range=[0, max(run.last - run.origin, 1e-3)], showgrid=False),
        "yaxis": axis(
            "worker",
            range=[len(every) - 0.5, -0.5],
            tickvals=list(range(len(every))),
            ticktext=[str(rank) for rank in every],
            showgrid=False,
        ),
        "hovermode": "closest",
        "margin": {"l": 50, "r": 14, "t": 44, "b": 46},
        "legend": {"orientation": "h", "x": 0, "y": -0.2, "yanchor": "top"},
    }


def _reasons(run: History) -> list[dict[str, Any]]:
    """Why somebody is absent, where there is room to say it."""
    whole = max(run.last - run.origin, 1e-3)
    every = sorted(set(run.pace.ranks) | set(run.absences))
    return [
        {
            "text": plain(why, 40),
            "short": "absent",
            "part": (until - since) / whole,
            "x": (since + until) / 2,
            "y": every.index(rank),
            "xref": "x",
            "yref": "y",
            "showarrow": False,
            "bgcolor": "@card",
            "borderpad": 2,
            "font": {"size": 12, "color": "@ink"},
        }
        for rank, gone in list(run.absences.items())[:LANES]
        for since, until, why in gone[:20]
    ]


def _hover(what: Intervals, known: Any) -> list[str]:
    texts = []
    for i, j in zip(*np.nonzero(known), strict=True):
        rate = what.units[i, j]
        speed = f"<br>{rate:.3g} units/s" if math.isfinite(rate) else ""
        texts.append(
            f"worker {what.ranks[j]}, {what.begin[i]:.4g} to {what.end[i]:.4g} s<br>"
            f"computing {100 * what.computing[i, j]:.0f}%, exchange {100 * what.exchanging[i, j]:.0f}%, "
            f"waiting {100 * what.waiting[i, j]:.0f}%{speed}"
        )
    return texts


def _marks(run: History, place: dict[int, int]) -> list[Trace]:
    """Flags of stragglers, and switches, each with a symbol of its own."""
    found: dict[str, list[tuple[float, int, str]]] = {"flagged": [], "cleared": []}
    for record in run.all("straggler"):
        rank, action = finite(record.get("rank")), str(record.get("action"))
        if rank is not None and int(rank) in place and action in found:
            told = f"worker {int(rank)} {action} as a straggler ({plain(record.get('rule'), 20)} rule)"
            found[action].append((run.time(record), place[int(rank)], told))
    data: list[Trace] = []
    for action, symbol, tone in (("flagged", "triangle-down", "@flag"), ("cleared", "triangle-up", "@clear")):
        if marks := found[action][:500]:
            data.append(symbols(f"straggler {action}", symbol, tone, marks))
    switches = [
        (run.time(r), -0.5, plain(f"switch {r.get('from')} → {r.get('to')}"))
        for r in list(run.all("switch"))[:200]
    ]
    if switches:
        data.append(symbols("switching", "diamond", "@switch", switches))
    return data


def symbols(name: str, symbol: str, tone: str, marks: list[tuple[float, Any, str]]) -> Trace:
    """Marks in a plot; of each its time, its height and what it says."""
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": numbers(t for t, _, _ in marks),
        "y": [y for _, y, _ in marks],
        "text": [text for _, _, text in marks],
        "hovertemplate": "%{text}, %{x:.4g} s<extra></extra>",
        "cliponaxis": False,
        "marker": {"symbol": symbol, "size": 13, "color": tone, "line": {"width": 1.5, "color": "@card"}},
    }


def _rows(run: History, what: Intervals) -> tuple[list[Trace], dict[str, Any]]:
    """Of many workers: above, how many did what; below, a row of colour for each."""
    known = np.isfinite(what.computing)
    data: list[Trace] = []
    spans = what.end - what.begin
    middle = (what.begin + what.end) / 2
    base = np.zeros(len(spans))
    for name, tone in STATES:
        height = np.where(known, getattr(what, name), 0.0).sum(axis=1)
        data.append(
            {
                "type": "bar",
                "name": {"exchanging": "exchange"}.get(name, name),
                "x": numbers(middle),
                "width": numbers(spans),
                "y": numbers(height, 5),
                "base": numbers(base, 6),
                "yaxis": "y2",
                "marker": {"color": tone, "line": {"width": 0}},
                "customdata": numbers(height, 4),
                "hovertemplate": "%{customdata:.4g} workers' time " + name + "<extra></extra>",
            }
        )
        base = base + height
    data.append(
        {
            "type": "heatmap",
            "x": numbers([*what.begin, what.end[-1]]),
            "y": what.ranks,
            "z": [
                [None if not ok else round(100 * v) for v, ok in zip(row, oks, strict=True)]
                for row, oks in zip(what.computing.T, known.T, strict=True)
            ],
            "zmin": 0,
            "zmax": 100,
            "colorscale": [[0, "@wait"], [1, "@compute"]],
            "showscale": False,
            "hoverongaps": False,
            "hovertemplate": "worker %{y}, %{x:.4g} s: computing %{z}%<extra></extra>",
        }
    )
    place = {rank: rank for rank in what.ranks}
    data += _marks(run, place)
    low, high = min(what.ranks), max(what.ranks)
    return data, {
        "barmode": "overlay",
        "bargap": 0,
        "height": 640,
        "xaxis": axis(seconds(run), range=[0, max(run.last - run.origin, 1e-3)], showgrid=False, anchor="y"),
        "yaxis": axis("worker (rank)", range=[high + 0.5, low - 0.5], domain=[0, 0.6], showgrid=False),
        "yaxis2": axis("workers", domain=[0.68, 1], anchor="x", rangemode="tozero"),
        "hovermode": "closest",
        "margin": {"l": 62, "r": 14, "t": 44, "b": 46},
        "legend": {"orientation": "h", "x": 0, "y": -0.12, "yanchor": "top"},
    }


def seconds(run: History) -> str:
    """What the time axis is called."""
    return "seconds since the first step" + (", virtual" if run.virtual else "")
