"""Predicted against measured: virtual runs beside real ones of the same plan, and what a profile predicts
beside what the run that was given it did."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import Any

from offbeat.live import amount, clock, finite, number
from offbeat.report.field import Entry
from offbeat.report.figure import LEGEND, Figure, axis, hatched, plain
from offbeat.report.history import History
from offbeat.report.verdict import Table

FIGURES = ("seconds", "samples_per_s", "waiting")
PARTS = {
    "forward": ("forward", "@run0", ""),
    "backward": ("backward", "@run1", "/"),
    "update": ("local update", "@run2", "x"),
    "exposed": ("exposed communication", "@run3", "."),
    "waiting": ("waiting for others", "@run4", "-"),
}
"""Of a predicted iteration: name, colour, pattern."""


def predicted(field: Sequence[Entry]) -> Figure | None:
    """The times of virtual runs beside those of ended real runs with the same plan, policy and number of
    workers, means over repetitions; None where there is no such pair."""
    groups: dict[tuple[str, str, int], tuple[list[History], list[History]]] = {}
    for entry in field:
        run = entry.history
        key = (run.plan, str(run.about.get("stragglers") or "off"), run.workers)
        if run.ended:
            groups.setdefault(key, ([], []))[run.virtual].append(run)
    pairs = {key: pair for key, pair in groups.items() if pair[0] and pair[1]}
    if not pairs:
        return None
    names, rows, measured, simulated = [], [], [], []
    for (plan, policy, workers), (real, virtual) in pairs.items():
        name = f"{plan}, {workers} workers" + ("" if policy == "off" else f" [{policy}]")
        mine, other = ({one: _mean(runs, one) for one in FIGURES} for runs in (real, virtual))
        seconds, told = mine["seconds"], other["seconds"]
        if not seconds or not told:
            continue
        names.append(plain(name, 48))
        measured.append(round(seconds, 4))
        simulated.append(round(told, 4))
        rows.append(
            [
                name,
                clock(told, precise=True),
                clock(seconds, precise=True),
                f"{100 * (told / seconds - 1):+.1f}%".replace("-", "−"),
                _cell(other["samples_per_s"]),
                _cell(mine["samples_per_s"]),
                _share(other["waiting"]),
                _share(mine["waiting"]),
            ]
        )
    if not rows:
        return None
    return Figure(
        name="predicted",
        title="Predicted against measured",
        alt="For each plan the time of the virtual run beside that of the real one, as in the table below.",
        data=[
            {
                "type": "bar",
                "orientation": "h",
                "name": name,
                "y": names,
                "x": values,
                "marker": {"color": tone, "pattern": hatched(shape, tone)},
                "hovertemplate": name + " %{x:.4g} s<extra></extra>",
            }
            for name, values, tone, shape in (
                ("measured", measured, "@run0", ""),
                ("predicted, virtual", simulated, "@run1", "/"),
            )
        ],
        layout={
            "barmode": "group",
            "height": 150 + 60 * len(names),
            "xaxis": axis("seconds", rangemode="tozero"),
            "yaxis": axis(autorange="reversed", showgrid=False),
        },
        note="A virtual run's seconds are those of its cluster's description.",
        table=Table(
            (
                *("plan", "predicted", "measured", "off by"),
                *("samples/s, predicted", "measured", "waiting, predicted", "measured"),
            ),
            rows,
            caption="Predicted (virtual) and measured",
        ),
    )


def forecast(entry: Entry) -> Figure | None:
    """An iteration of each protocol (and number of members) by the profile that the run was given, beside the
    measured one: the last record of each; None without a profile."""
    last: dict[tuple[str, int], dict[str, Any]] = {}
    for record in entry.history.all("forecast"):
        told, took = number(record.get("predicted_ms")), number(record.get("actual_ms"))
        if told and took and isinstance(record.get("parts"), dict):
            last[str(record.get("protocol")), int(number(record.get("members")) or 0)] = record
    if not last:
        return None
    names = [plain(f"{protocol}, {members} members", 48) for protocol, members in last]
    data: list[dict[str, Any]] = [
        {
            "type": "bar",
            "orientation": "h",
            "name": f"predicted: {name}",
            "y": [names, ["predicted"] * len(names)],
            "x": [round(number(record["parts"].get(part)) or 0.0, 4) for record in last.values()],
            "marker": {"color": tone, "pattern": hatched(shape, tone)},
            "hovertemplate": name + " %{x:.4g} ms<extra></extra>",
        }
        for part, (name, tone, shape) in PARTS.items()
    ]
    data.append(
        {
            "type": "bar",
            "orientation": "h",
            "name": "measured",
            "y": [names, ["measured"] * len(names)],
            "x": [round(float(record["actual_ms"]), 4) for record in last.values()],
            "marker": {"color": "@run5"},
            "hovertemplate": "measured %{x:.4g} ms<extra></extra>",
        }
    )
    rows = []
    for (protocol, members), record in last.items():
        told, took = float(record["predicted_ms"]), float(record["actual_ms"])
        own = number(record.get("own_ms"))
        part = sum(number(record["parts"].get(name)) or 0.0 for name in ("forward", "backward", "update"))
        rows.append(
            [
                *(protocol, str(members), f"{told:.4g} ms", f"{took:.4g} ms"),
                f"{100 * (took / told - 1):+.1f}%".replace("-", "−"),
                *(f"{part:.4g} ms", "–" if own is None else f"{own:.4g} ms"),
            ]
        )
    return Figure(
        name=f"forecast-{entry.number}",
        title="An iteration, predicted by the profile and measured",
        alt="For each protocol an iteration's predicted parts, and the measured one, as in the table below.",
        data=data,
        layout={
            "barmode": "stack",
            "height": 150 + 70 * len(names),
            "legend": {**LEGEND, "traceorder": "normal"},
            "xaxis": axis("milliseconds", rangemode="tozero"),
            "yaxis": axis(autorange="reversed", showgrid=False),
        },
        note="Where they part by more than 10 % the journal has a warning that says which part it is.",
        table=Table(
            (
                *("protocol", "members", "predicted", "measured", "longer by"),
                *("own part, predicted", "measured"),
            ),
            rows,
            caption="All workers do one unit each",
        ),
    )


def _mean(runs: Sequence[History], name: str) -> float | None:
    values = [value for run in runs if (value := finite(run.one("end").get(name))) is not None]
    return mean(values) if values else None


def _cell(value: float | None) -> str:
    return amount(value) if value else "–"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}%"
