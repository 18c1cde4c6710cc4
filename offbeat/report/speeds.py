"""How fast each worker was, and all together."""

from __future__ import annotations

import math

import numpy as np

from offbeat.live import finite
from offbeat.report.axes import bands
from offbeat.report.field import Entry
from offbeat.report.figure import DASHES, Figure, Trace, axis, colour, numbers, plain
from offbeat.report.history import History, Numbers
from offbeat.report.series import Intervals, intervals
from offbeat.report.timeline import seconds, symbols
from offbeat.report.verdict import Table

NAMED = 7
"""Workers with a line of their own: all of so few; of more, those that were flagged."""


def speeds(entry: Entry) -> Figure | None:
    """Each worker's speed in its own time, and what all did together. None where the journal doesn't tell."""
    run = entry.history
    what = intervals(run, 200, steps=10)
    if what is None or not np.isfinite(what.own).any():
        return None
    middle = numbers((what.begin + what.end) / 2)
    few = len(what.ranks) <= NAMED
    flagged = [int(rank) for r in run.all("straggler") if (rank := finite(r.get("rank"))) is not None]
    flagged = list(dict.fromkeys(rank for rank in flagged if rank in what.ranks))
    data: list[Trace] = [] if few else _spread(what, middle)
    for index, rank in enumerate(what.ranks if few else flagged[:NAMED]):
        column = what.own[:, what.ranks.index(rank)]
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers" if len(middle) < 40 else "lines",
                "name": f"worker {rank}",
                "x": middle,
                "y": numbers(column),
                "line": {"color": colour(index), "dash": DASHES[index % len(DASHES)], "width": 2},
                "marker": {"size": 5},
                "hovertemplate": f"%{{y:.4g}}<extra>worker {rank}</extra>",
            }
        )
    data += _flags(run, what)
    sized = bool(np.nansum(what.samples))
    rate = np.nansum(what.samples if sized else what.units, axis=1)
    unit = "samples" if sized else "units"
    data.append(
        {
            "type": "scatter",
            "mode": "lines",
            "name": "all together",
            "x": middle,
            "y": numbers(rate),
            "yaxis": "y2",
            "line": {"color": "@ink", "width": 2, "shape": "hvh"},
            "fill": "tozeroy",
            "fillcolor": "@ink/0.08",
            "hovertemplate": f"%{{y:,.4g}} {unit}/s<extra>all</extra>",
        }
    )
    shapes, notes = bands([(p.protocol, p.begin, p.end) for p in run.phases])
    rows = [
        [str(rank), *_range(what.own[:, i]), _mean(what.units[:, i])]
        for i, rank in enumerate(what.ranks)
        if bool(np.isfinite(what.own[:, i]).any())
    ]
    return Figure(
        name=f"speeds-{entry.number}",
        title="How fast they were",
        alt=f"Above, the speed of {len(rows)} workers in their own time; below, {unit} per second of all.",
        data=data,
        layout={
            "height": 520,
            "xaxis": axis(seconds(run), anchor="y2", range=[0, max(run.last - run.origin, 1e-3)]),
            "yaxis": axis("units per second<br>of computing", domain=[0.42, 1], rangemode="tozero"),
            "yaxis2": axis(f"{unit} per second,<br>all workers", domain=[0, 0.32], rangemode="tozero"),
            "hovermode": "closest",
            "shapes": shapes,
            "annotations": notes,
            "margin": {"l": 62, "r": 14, "t": 44, "b": 46},
            "legend": {"orientation": "h", "x": 0, "y": -0.16, "yanchor": "top"},
        },
        note="Above: what a worker does in a second of its own computing, waiting left out; under BSP all do "
        "the same number of steps, so only this tells who is slow. Below: what all do in a second "
        "of the clock.",
        table=Table(
            ("rank", "slowest", "median", "fastest", "units per second of the clock"),
            rows,
            caption="Units per second of each worker's computing",
        ),
    )


def _spread(what: Intervals, middle: list[float | None]) -> list[Trace]:
    """Of many workers: their median, and where nine of ten are."""
    empty = np.isfinite(what.own).sum(axis=1) == 0
    own = np.where(empty[:, None], 0.0, what.own)
    low, mid, high = (np.where(empty, math.nan, v) for v in np.nanpercentile(own, (5, 50, 95), axis=1))
    edge = {"type": "scatter", "mode": "lines", "x": middle, "line": {"width": 0}, "showlegend": False}
    return [
        {**edge, "y": numbers(low), "hoverinfo": "skip"},
        {
            **edge,
            "y": numbers(high),
            "fill": "tonexty",
            "fillcolor": "@run0/0.25",
            "name": "nine of ten workers",
            "showlegend": True,
            "hoverinfo": "skip",
        },
        {
            "type": "scatter",
            "mode": "lines",
            "name": "median worker",
            "x": middle,
            "y": numbers(mid),
            "line": {"color": "@run0", "width": 2.5},
            "hovertemplate": "%{y:.4g}<extra>median</extra>",
        },
    ]


def _flags(run: History, what: Intervals) -> list[Trace]:
    """Where the detector flagged and cleared somebody, at the speed that it saw."""
    made: list[Trace] = []
    for action, symbol, tone in (("flagged", "triangle-down", "@flag"), ("cleared", "triangle-up", "@clear")):
        marks = []
        for record in run.all("straggler"):
            table = record.get("speeds")
            speed = finite(table.get(str(record.get("rank")))) if isinstance(table, dict) else None
            if record.get("action") == action and speed is not None:
                limit = finite(record.get("limit"))
                told = f"worker {record.get('rank')} {action} at {speed:.4g} units/s"
                told += "" if limit is None else f" (limit {limit:.4g})"
                marks.append((run.time(record), speed, plain(told)))
        if marks:
            made.append(symbols(f"straggler {action}", symbol, tone, marks[:500]))
    return made


def _range(column: Numbers) -> list[str]:
    known = column[np.isfinite(column)]
    return [f"{value:.4g}" for value in (known.min(), np.median(known), known.max())]


def _mean(column: Numbers) -> str:
    known = column[np.isfinite(column)]
    return f"{known.mean():.4g}" if known.size else "–"
