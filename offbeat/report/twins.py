"""Predicted against measured: virtual runs beside real ones of the same plan, and what a profile predicts
beside what the run that was given it did."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import Any

from offbeat.live import amount, clock, finite
from offbeat.report.field import Entry
from offbeat.report.figure import LEGEND, Figure, Trace, axis, hatched, plain
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
        measured.append(seconds)
        simulated.append(told)
        rows.append(
            [
                name,
                clock(told, precise=True),
                clock(seconds, precise=True),
                _apart(told, seconds),
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
            _bars("measured", names, measured, "s", "@run0"),
            _bars("predicted, virtual", names, simulated, "s", "@run1", "/"),
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
    last: dict[tuple[str, int], tuple[float, float, dict[str, float], float | None]] = {}
    for record in entry.history.all("forecast"):
        told, took, parts = (
            finite(record.get("predicted_ms")),
            finite(record.get("actual_ms")),
            record.get("parts"),
        )
        if told and took and isinstance(parts, dict):
            key = str(record.get("protocol")), int(finite(record.get("members")) or 0)
            last[key] = (
                told,
                took,
                {part: finite(parts.get(part)) or 0.0 for part in PARTS},
                finite(record.get("own_ms")),
            )
    if not last:
        return None
    names = [plain(f"{protocol}, {members} members", 48) for protocol, members in last]
    predicted, measured = [names, ["predicted"] * len(names)], [names, ["measured"] * len(names)]
    data = [
        _bars(f"predicted: {name}", predicted, [row[2][part] for row in last.values()], "ms", tone, shape)
        for part, (name, tone, shape) in PARTS.items()
    ]
    data.append(_bars("measured", measured, [row[1] for row in last.values()], "ms", "@run5"))
    rows = []
    for (protocol, members), (told, took, parts, own) in last.items():
        mine = parts["forward"] + parts["backward"] + parts["update"]
        rows.append(
            [
                *(protocol, str(members), f"{told:.4g} ms", f"{took:.4g} ms", _apart(took, told)),
                *(f"{mine:.4g} ms", "–" if own is None else f"{own:.4g} ms"),
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


def _bars(name: str, y: Sequence[Any], x: Sequence[float], unit: str, tone: str, shape: str = "") -> Trace:
    """Horizontal ones. y: their names. x: how long, in `unit`."""
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": y,
        "x": [round(value, 4) for value in x],
        "marker": {"color": tone, "pattern": hatched(shape, tone)},
        "hovertemplate": f"{name} %{{x:.4g}} {unit}<extra></extra>",
    }


def _apart(one: float, other: float) -> str:
    """By how much `one` is more."""
    return f"{100 * (one / other - 1):+.1f}%".replace("-", "−")


def _mean(runs: Sequence[History], name: str) -> float | None:
    values = [value for run in runs if (value := finite(run.one("end").get(name))) is not None]
    return mean(values) if values else None


def _cell(value: float | None) -> str:
    return amount(value) if value else "–"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}%"
