"""What the script evaluated: one figure for every name that it gave to `sync.log`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from offbeat.compare import ACCURACY
from offbeat.live import clock, finite
from offbeat.report.axes import Axes, line, several, template
from offbeat.report.field import Entry
from offbeat.report.figure import SYMBOLS, Figure, Trace, axis, colour, numbers, plain
from offbeat.report.history import Numbers, share
from offbeat.report.series import extremes
from offbeat.report.verdict import Table, compared

SAME = 0.01
"""Repetitions whose evaluations are so near in progress are averaged."""


@dataclass(frozen=True)
class Curve:
    """One run's evaluations, or the mean of several: seconds, units, share of the job, values."""

    t: Numbers
    units: Numbers
    progress: Numbers
    values: Numbers


def evaluated(field: Sequence[Entry], name: str, index: int) -> Figure:
    """The figure of one name. Repetitions are thin; their mean, where they evaluated at the same points, is a
    line with marks."""
    axes, data = Axes(field), []
    percent = name in ACCURACY
    curves = [(entry, curve) for entry in field if (curve := _curve(entry, name)) is not None]
    groups: dict[int, list[tuple[Entry, Curve]]] = {}
    for entry, curve in curves:
        groups.setdefault(entry.group, []).append((entry, curve))
    marked: list[tuple[list[Entry], Trace]] = []
    for same in groups.values():
        mean = _mean([curve for _, curve in same])
        drawn = same if mean is None else [*same, (same[0][0], mean)]
        for number, (entry, curve) in enumerate(drawn):
            main = mean is None or number == len(same)
            data.append(
                _trace(axes, entry, curve, percent, main, first=number == (0 if mean is None else len(same)))
            )
            if mean is not None and main:
                data[-1]["name"] += f" (mean of {len(same)})"
        marked.append(
            ([entry for entry, _ in same], data[-1]) if mean is not None else ([same[0][0]], data[-len(same)])
        )
    lines = len(data)
    if len(field) > 1:
        data += _switches(marked, axes)
    top = max(float(curve.values.max()) for _, curve in curves)
    scale = percent and top <= 1
    target = compared(field).target if scale and len(field) > 1 else None
    window, note = _window(data[:lines], target)
    title = name[:60].replace("_", " ")
    return Figure(
        name=f"evaluated-{index}",
        title=title[:1].upper() + title[1:] + (", evaluated" if not percent else ""),
        alt=f"{title} of {several(curves)}, as the script evaluated it; the figures are in the table below.",
        data=data,
        layout={
            "xaxis": axis(rangemode="tozero"),
            "yaxis": axis(plain(title), **({"tickformat": ".1~%"} if scale else {}), **window),
            "hovermode": "x unified" if lines <= 8 else "closest",
            "showlegend": len(field) > 1,
        },
        axes=axes.done([] if target is None else [_level(target)]),
        note=note,
        log=not percent,
        table=Table(
            ("run", "evaluations", "last", "highest" if percent else "lowest", "when"),
            [_row(entry, curve, percent) for entry, curve in curves],
            caption=f"{title}, per run",
        ),
    )


def _curve(entry: Entry, name: str) -> Curve | None:
    run = entry.history
    found = [
        (run.time(r), finite(r.get("units")) or math.nan, share(r.get("progress")), value)
        for r in run.all("evaluation")
        if (value := finite(r["values"].get(name))) is not None
    ]
    if not found:
        return None
    curve = Curve(*np.array(found, dtype=float).T)
    keep = extremes(curve.values)
    return Curve(curve.t[keep], curve.units[keep], curve.progress[keep], curve.values[keep])


def _mean(curves: Sequence[Curve]) -> Curve | None:
    """Of repetitions that were evaluated at the same points of the job."""
    first = curves[0].progress
    alike = all(
        one.progress.shape == first.shape and np.allclose(one.progress, first, atol=SAME) for one in curves
    )
    if len(curves) < 2 or not alike:
        return None
    columns = ([getattr(one, name) for one in curves] for name in ("t", "units", "progress", "values"))
    return Curve(*(np.mean(column, axis=0) for column in columns))


def _trace(axes: Axes, entry: Entry, curve: Curve, percent: bool, main: bool, first: bool) -> Trace:
    x = axes.add(entry.history, curve.t, curve.units, curve.progress)
    trace = line(entry, plain(entry.label), first, x=x, y=numbers(curve.values))
    form = ".2%" if percent else ".4g"
    if main:
        trace["mode"] = "lines+markers" if curve.t.size <= 100 else "lines"
        trace["marker"] = {"symbol": SYMBOLS[entry.group % len(SYMBOLS)], "size": 7}
        trace["hovertemplate"] = f"%{{y:{form}}}<extra>{template(entry.label)}</extra>"
    else:
        trace["line"] |= {"width": 1}
        trace |= {"opacity": 0.4, "hovertemplate": f"%{{y:{form}}}<extra>{template(entry.title)}</extra>"}
    return trace


def _row(entry: Entry, curve: Curve, percent: bool) -> list[str]:
    best = int(curve.values.argmax() if percent else curve.values.argmin())
    return [
        entry.title,
        str(curve.values.size),
        _told(curve.values[-1], percent),
        _told(curve.values[best], percent),
        clock(max(float(curve.t[best]), 0.0), precise=True),
    ]


def _level(target: float) -> dict[str, Any]:
    return {
        "type": "line",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "y0": target,
        "y1": target,
        "line": {"color": "@muted", "width": 1.5, "dash": "dash"},
        "layer": "below",
    }


def _window(lines: Sequence[Trace], target: float | None) -> tuple[dict[str, Any], str]:
    """The part of the y axis to show at first: where plans differ in the end, not how all of them began."""
    known = [[value for value in one["y"] if value is not None] for one in lines]
    known = [values for values in known if values]
    if target is None or not known:
        return {}, ""
    best, worst = max(map(max, known)), min(map(min, known))
    last = min([target, *(values[-1] for values in known)])
    floor = last - max(0.3 * (best - last), 0.005)
    note = f"Dashed: {100 * target:.1f}%, the target of the verdict."
    if worst >= floor:
        return {}, note
    space = 0.06 * (best - floor)
    note += f" The axis begins at {100 * floor:.1f}%; “all” shows the beginnings too."
    return {"range": [floor, best + space]}, note


def _told(value: float, percent: bool) -> str:
    return f"{100 * value:.2f}%" if percent else f"{value:.4g}"


def _switches(lines: Sequence[tuple[list[Entry], Trace]], axes: Axes) -> list[Trace]:
    """Marks for the switches on the lines; on a mean's, at the means of its runs' switches."""
    made: list[Trace] = []
    for same, trace in lines:
        known = [
            (x, y) for x, y in zip(trace["x"], trace["y"], strict=True) if x is not None and y is not None
        ]
        found = [list(entry.history.all("switch"))[:20] for entry in same]
        if len(known) < 2 or not found[0] or len({len(records) for records in found}) > 1:
            continue
        table = [
            [
                (e.history.time(r), finite(r.get("units")) or math.nan, share(r.get("progress")))
                for r in records
            ]
            for e, records in zip(same, found, strict=True)
        ]
        t, units, progress = np.mean(np.array(table), axis=0).T
        xs, ys = np.array(known, dtype=float).T
        made.append(
            {
                "type": "scatter",
                "mode": "markers",
                "x": axes.add(same[0].history, t, units, progress),
                "y": numbers(np.interp(t, xs, ys)),
                "name": "switch",
                "legendgroup": str(same[0].group),
                "showlegend": False,
                "marker": {
                    "symbol": "diamond-wide",
                    "size": 13,
                    "color": "@card",
                    "line": {"color": colour(same[0].group), "width": 2.5},
                },
                "text": [plain(f"{r.get('from')} → {r.get('to')}") for r in found[0]],
                "hovertemplate": "switch %{text}<extra></extra>",
            }
        )
    return made
