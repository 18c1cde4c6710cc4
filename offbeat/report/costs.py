"""What switches cost, how stale pushes were, and where the runs' time went."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from offbeat.live import clock, finite
from offbeat.report.field import Entry
from offbeat.report.figure import LEGEND, Figure, Trace, axis, hatched, plain, word
from offbeat.report.history import listed
from offbeat.report.series import intervals
from offbeat.report.verdict import COSTS, Table

BARS = 80
"""Bars of a histogram, at most."""
SWITCHES = 40
"""Switches that are drawn, at most."""
PARTS = (
    ("drain", "what was in flight lands", "@run0"),
    ("settle", "all come to hold the same", "@run2"),
    ("transfer", "to the next protocol's home", "@run3"),
    ("meet", "waiting for the slowest member", "@wait"),
)


def staleness(entry: Entry) -> Figure | None:
    """How often each staleness occurred, phase by phase."""
    data: list[Trace] = []
    rows = []
    widest = 1
    found = []
    for record in entry.history.all("pushes"):
        table = record.get("staleness")
        counts = {
            int(stale): count
            for key, value in (table.items() if isinstance(table, dict) else ())
            if (stale := finite(key)) is not None and stale >= 0 and (count := finite(value)) and count > 0
        }
        if counts:
            found.append((record, counts))
            widest = max(widest, math.ceil((max(counts) + 1) / BARS))
    for number, (record, counts) in enumerate(found[:12]):
        bins: dict[int, float] = {}
        for stale, count in counts.items():
            bins[stale // widest * widest] = bins.get(stale // widest * widest, 0.0) + count
        total = sum(counts.values())
        protocol = str(record.get("protocol") or "?")
        name = f"phase {number + 1}: {protocol}" if len(found) > 1 else protocol
        data.append(
            {
                "type": "bar",
                "name": plain(name),
                "x": [low + (widest - 1) / 2 for low in sorted(bins)],
                "y": [round(100 * bins[low] / total, 4) for low in sorted(bins)],
                "width": 0.9 * widest,
                "marker": {
                    "color": f"@{word(protocol)}",
                    "opacity": 0.9 if len(found) == 1 else 0.6,
                    "pattern": hatched(["", "/", "x", "."][number % 4], f"@{word(protocol)}"),
                },
                "customdata": [
                    f"{low}" if widest == 1 else f"{low} to {low + widest - 1}" for low in sorted(bins)
                ],
                "hovertemplate": "staleness %{customdata}: %{y:.3g}% of the pushes<extra></extra>",
            }
        )
        waits = sum(finite(row.get("bound_waits")) or 0.0 for row in listed(record.get("workers")))
        stales = np.repeat(list(counts), np.array(list(counts.values())).astype(int))
        mean = sum(stale * count for stale, count in counts.items()) / total
        middle = f"{np.median(stales):.0f}" if 0 < stales.size < 10**7 else "–"
        rows.append([name, f"{total:,.0f}", f"{mean:.2f}", middle, str(max(counts)), f"{waits:,.0f}"])
    if not data:
        return None
    return Figure(
        name=f"staleness-{entry.number}",
        title="Staleness of the pushes",
        alt="How many of the pushes had which staleness; mean and largest are in the table.",
        data=data,
        layout={
            "barmode": "overlay",
            "xaxis": axis("staleness, updates"),
            "yaxis": axis("% of the phase's pushes"),
            "showlegend": True,
        },
        note="How many updates others had made since the worker took the parameters that its gradient "
        "belongs to. All workers' pushes, counted exactly.",
        table=Table(
            ("phase", "pushes", "mean", "median", "largest", "waits at SSP's bound"),
            rows,
            caption="Staleness per phase",
        ),
    )


def switches(entry: Entry) -> Figure | None:
    """What each switch cost, in parts."""
    records = list(entry.history.all("switch"))
    if not records:
        return None
    shown = records[:SWITCHES]
    names = [plain(f"{i + 1}. {r.get('from')} → {r.get('to')}", 60) for i, r in enumerate(shown)]
    parts = {part: [max(finite(r.get(f"{part}_ms")) or 0.0, 0.0) for r in shown] for part, _, _ in PARTS}
    data: list[Trace] = [
        {
            "type": "bar",
            "orientation": "h",
            "name": f"{part}: {what}",
            "y": names,
            "x": parts[part],
            "marker": {"color": tone},
            "hovertemplate": f"{part} %{{x:.4g}} ms<extra></extra>",
        }
        for part, what, tone in PARTS
    ]
    rows = [
        [
            f"{r.get('from')} → {r.get('to')}",
            clock(max(entry.history.time(r), 0.0), precise=True),
            *(f"{parts[part][i]:,.1f}" for part in COSTS),
            f"{sum(parts[part][i] for part in COSTS):,.1f}",
            f"{parts['meet'][i]:,.1f}",
        ]
        for i, r in enumerate(shown)
    ]
    more = f" The first {SWITCHES} of {len(records)}." if len(records) > SWITCHES else ""
    return Figure(
        name=f"switches-{entry.number}",
        title="What the switches cost",
        alt=f"Milliseconds of {len(shown)} switches, in four parts; the figures are in the table.",
        data=data,
        layout={
            "barmode": "stack",
            "height": 190 + 30 * len(shown),
            "xaxis": axis("milliseconds", rangemode="tozero"),
            "yaxis": axis(autorange="reversed", showgrid=False),
            "legend": {**LEGEND, "traceorder": "normal"},
        },
        note="Waiting for the slowest member to come to the switch is not counted as its cost." + more,
        table=Table(
            ("switch", "at", *(f"{part}, ms" for part in COSTS), "cost, ms", "waiting before it, ms"),
            rows,
            caption="Switches",
        ),
    )


def shares(field: Sequence[Entry]) -> Figure | None:
    """Of several runs: what all workers together did with their time, repetitions together."""
    sums: dict[str, list[float]] = {}
    for entry in field:
        what = intervals(entry.history)
        if what is None or not what.begin.size:
            continue
        spans = (what.end - what.begin)[:, None] * np.isfinite(what.computing)
        states = (what.computing, what.exchanging, what.waiting)
        own = [float(np.nansum(one * spans)) for one in states]
        sums[entry.label] = [a + b for a, b in zip(sums.get(entry.label, [0.0, 0.0, 0.0]), own, strict=True)]
    told = [label for label, column in sums.items() if sum(column) > 0]
    columns = [sums[label] for label in told]
    names = [plain(label, 48) + ("\u200b" * i if len(label) > 48 else "") for i, label in enumerate(told)]
    if not names:
        return None
    data: list[Trace] = []
    for i, (state, tone) in enumerate(
        (("computing", "@compute"), ("exchange", "@exchange"), ("waiting", "@wait"))
    ):
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": state,
                "y": names,
                "x": [round(100 * column[i] / sum(column), 2) for column in columns],
                "marker": {"color": tone},
                "texttemplate": "%{x:.0f}%",
                "textposition": "inside",
                "insidetextanchor": "middle",
                "hovertemplate": f"{state} %{{x:.1f}}%<extra></extra>",
            }
        )
    rows = [
        [name, *(f"{100 * part / sum(column):.1f}%" for part in column)]
        for name, column in zip(told, columns, strict=True)
    ]
    return Figure(
        name="shares",
        title="Where the workers' time went",
        alt="For every plan the shares of the workers' time spent computing, exchanging and waiting.",
        data=data,
        layout={
            "barmode": "stack",
            "height": 130 + 34 * len(names),
            "xaxis": axis("% of the workers' time", range=[0, 100]),
            "yaxis": axis(autorange="reversed", showgrid=False),
            "legend": {**LEGEND, "traceorder": "normal"},
        },
        note="Waiting is split by a rule: what even the member that waited least has is the exchange itself, "
        "the rest is waiting for slower workers.",
        table=Table(("plan", "computing", "exchange", "waiting"), rows, caption="Shares of time"),
    )
