"""Predicted against measured: virtual runs beside real ones of the same plan."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from offbeat.live import amount, clock, finite
from offbeat.report.field import Entry
from offbeat.report.figure import Figure, axis, plain
from offbeat.report.history import History
from offbeat.report.verdict import Table

FIGURES = ("seconds", "samples_per_s", "waiting")


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
                "marker": {"color": tone, "pattern": {"shape": shape, "fgcolor": "@card", "solidity": 0.25}},
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


def _mean(runs: Sequence[History], name: str) -> float | None:
    values = [value for run in runs if (value := finite(run.one("end").get(name))) is not None]
    return mean(values) if values else None


def _cell(value: float | None) -> str:
    return amount(value) if value else "–"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}%"
