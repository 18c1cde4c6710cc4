"""Losses and what the script evaluated, against time, samples and progress."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from offbeat.compare import ACCURACY
from offbeat.live import finite
from offbeat.report.axes import Axes, line, several, template
from offbeat.report.evaluated import evaluated
from offbeat.report.field import Entry
from offbeat.report.figure import LEGEND, Figure, axis, numbers, plain
from offbeat.report.series import POINTS, extremes, smooth
from offbeat.report.verdict import Table

METRICS = 6
"""Figures of what a script evaluated, at most."""
WIDE = 30.0
"""A loss that spans more than this factor is shown on a logarithmic axis at first."""


def curves(field: Sequence[Entry]) -> list[Figure]:
    """A figure for every evaluated value, and one of the training loss and of the learning rate."""
    made = [evaluated(field, name, index) for index, name in enumerate(_metrics(field))]
    return [*made, *_losses(field), *_rates(field)]


def _metrics(field: Sequence[Entry]) -> list[str]:
    names: dict[str, None] = {}
    for entry in field:
        for record in entry.history.all("evaluation"):
            names.update(dict.fromkeys(str(n) for n, v in record["values"].items() if finite(v) is not None))
    first = [name for name in (*ACCURACY, "loss") if name in names]
    return [*first, *(name for name in names if name not in first)][:METRICS]


def _losses(field: Sequence[Entry]) -> list[Figure]:
    axes, data, rows, values_seen = Axes(field), [], [], []
    seen: set[int] = set()
    for entry in field:
        run, steps = entry.history, entry.history.steps
        losses = steps["loss"]
        known = np.isfinite(losses)
        if not known.any():
            continue
        columns = {name: steps[name] for name in ("t", "units", "progress")}
        even = smooth(losses, columns)
        if even is None or len(field) == 1:
            keep = extremes(losses, POINTS)
            x = axes.add(run, *(columns[name][keep] for name in columns))
            trace = line(entry, plain(entry.label), entry.group not in seen, x=x, y=numbers(losses[keep]))
            trace["hovertemplate"] = f"%{{y:.4g}}<extra>{template(entry.title)}</extra>"
            if even is not None:
                trace |= {"name": "a step of rank 0", "opacity": 0.35, "line": {"color": "@run0", "width": 1}}
            data.append(trace)
        if even is not None:
            x = axes.add(run, *(even.at[name] for name in columns))
            name = f"mean of {even.size} samples" if len(field) == 1 else plain(entry.label)
            shown = len(field) == 1 or entry.group not in seen
            trace = line(entry, name, shown, x=x, y=numbers(even.mean))
            trace["hovertemplate"] = f"%{{y:.4g}}<extra>{template(entry.title)}</extra>"
            trace["line"]["width"] = 2.5 if len({e.group for e in field}) == len(field) else 1.2
            data.append(trace)
        seen.add(entry.group)
        values_seen.append(losses[known])
        bad = int(losses.size - known.sum())
        rows.append(
            [
                entry.title,
                f"{losses.size:,}",
                str(bad),
                f"{losses[known][0]:.4g}",
                f"{losses[known].min():.4g}",
                f"{losses[known][-1]:.4g}",
            ]
        )
    if not data:
        return []
    everything = np.concatenate(values_seen)
    wide = everything.min() > 0 and everything.max() / everything.min() > WIDE
    lacking = sum(int(row[2]) for row in rows)
    note = "Rank 0's loss, at most five samples a second. " + (
        "Of long runs each bucket's lowest and highest are drawn, so no peak is lost. "
        if len(field) == 1
        else ""
    )
    note += f"{lacking:,} sampled steps had no finite loss and leave gaps." if lacking else ""
    return [
        Figure(
            name="training-loss",
            title="Training loss",
            alt=f"Training loss of {several(rows)}; the figures are in the table below.",
            data=data,
            layout={
                "xaxis": axis(rangemode="tozero"),
                "yaxis": axis("training loss", type="log" if wide else "linear"),
                "hovermode": "x unified" if len(field) <= 8 else "closest",
                "legend": LEGEND if len(field) > 1 else {**LEGEND, "y": 1.08},
                "margin": {"l": 62, "r": 14, "t": 30 if len(field) > 1 else 60, "b": 46},
            },
            note=note.strip(),
            axes=axes.done(),
            log=True,
            table=Table(
                ("run", "sampled steps", "without a loss", "first", "lowest", "last"),
                rows,
                caption="loss, per run",
            ),
        )
    ]


def _rates(field: Sequence[Entry]) -> list[Figure]:
    """The learning rate as it was applied."""
    axes, data, rows = Axes(field), [], []
    seen: set[int] = set()
    for entry in field:
        steps = entry.history.steps
        keep = extremes(steps["lr"], 600)
        if not keep.size:
            continue
        x = axes.add(entry.history, *(steps[name][keep] for name in ("t", "units", "progress")))
        trace = line(entry, plain(entry.label), entry.group not in seen, x=x, y=numbers(steps["lr"][keep]))
        trace["hovertemplate"] = f"%{{y:.4g}}<extra>{template(entry.title)}</extra>"
        data.append(trace)
        seen.add(entry.group)
        lr = steps["lr"][np.isfinite(steps["lr"])]
        rows.append([entry.title, f"{lr[0]:.4g}", f"{lr.max():.4g}", f"{lr[-1]:.4g}"])
    if not data:
        return []
    return [
        Figure(
            name="learning-rate",
            title="Learning rate",
            alt="The learning rate of the first parameter group, as it was applied.",
            data=data,
            layout={
                "xaxis": axis(rangemode="tozero"),
                "yaxis": axis("learning rate", rangemode="tozero"),
                "hovermode": "x unified" if len(field) <= 8 else "closest",
                "showlegend": len(field) > 1,
            },
            note="As applied to the first parameter group: shards apply each gradient alone, so asynchronous "
            "protocols take a smaller one than BSP does for a mean.",
            axes=axes.done(),
            table=Table(("run", "first", "highest", "last"), rows, caption="learning rate, per run"),
        )
    ]
