"""The x axes of curves: time, samples and progress; and what lines have in common."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from offbeat.report.field import Entry
from offbeat.report.figure import DASHES, Trace, colour, numbers, plain, word
from offbeat.report.history import History, Numbers


class Axes:
    """The three x axes of a figure: what each trace has on them, and what is shaded."""

    def __init__(self, field: Sequence[Entry]):
        sizes = [entry.history.batch_size for entry in field]
        self._sized = all(sizes) and bool(sizes)
        self.x: dict[str, list[list[float | None]]] = {"time": [], "samples": [], "progress": []}
        self._field = field
        virtual = all(entry.history.virtual for entry in field)
        self._titles = {
            "time": "seconds since the first step" + (", virtual" if virtual else ""),
            "samples": "samples, all workers" if self._sized else "units, all workers",
            "progress": "progress, % of the job",
        }

    def add(self, history: History, t: Numbers, units: Numbers, progress: Numbers) -> list[float | None]:
        """One trace's; returns those of the time axis."""
        size = (history.batch_size or 1.0) if self._sized else 1.0
        for name, column in (("time", t), ("samples", size * units), ("progress", 100 * progress)):
            self.x[name].append(numbers(column))
        return self.x["time"][-1]

    def done(self, more: Sequence[dict[str, Any]] = ()) -> dict[str, dict[str, Any]]:
        """Phases are shaded where there is one run; else there are `more` shapes."""
        made = {}
        for name, columns in self.x.items():
            shapes, notes = self._phases(name) if len(self._field) == 1 else ([*more], [])
            made[name] = {
                "title": self._titles[name],
                "x": columns,
                "shapes": shapes,
                "annotations": notes,
            }
        return made

    def _phases(self, name: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        run = self._field[0].history
        size = (run.batch_size or 1.0) if self._sized else 1.0
        scale = {"progress": 100.0, "samples": size * (run.total or math.nan)}.get(name, 1.0)
        spans = [
            (phase.protocol, phase.begin, phase.end)
            if name == "time"
            else (phase.protocol, phase.from_progress * scale, phase.to_progress * scale)
            for phase in run.phases
        ]
        return bands([span for span in spans if math.isfinite(span[2])])


def bands(spans: Sequence[tuple[str, float, float]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Shapes that shade the time of each protocol, and their names above. A name has a `short` form, and
    `part`, the share of the plot's width that it may take."""
    shapes, notes = [], []
    whole = max((end for _, _, end in spans), default=0.0)
    for protocol, begin, end in spans[:60]:
        shapes.append(
            {
                "type": "rect",
                "xref": "x",
                "yref": "paper",
                "x0": begin,
                "x1": end,
                "y0": 0,
                "y1": 1,
                "fillcolor": f"@{word(protocol)}/0.13",
                "line": {"width": 0},
                "layer": "below",
            }
        )
        if whole and (end - begin) / whole > 0.04:
            notes.append(
                {
                    "text": plain(protocol),
                    "short": word(protocol),
                    "part": (end - begin) / whole,
                    "x": (begin + end) / 2,
                    "xref": "x",
                    "y": 1,
                    "yref": "paper",
                    "yanchor": "bottom",
                    "showarrow": False,
                    "font": {"size": 12, "color": f"@{word(protocol)}-ink"},
                }
            )
    return shapes, notes


def line(entry: Entry, name: str, first: bool, **settings: Any) -> Trace:
    """A line in the colour of the run's group; the `first` of a group is in the legend."""
    style = {"color": colour(entry.group), "dash": DASHES[entry.group // 7 % len(DASHES)], "width": 2}
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "legendgroup": str(entry.group),
        "showlegend": first,
        "line": style,
        **settings,
    }


def several(rows: Sequence[Any]) -> str:
    """So many runs, in words."""
    return f"{len(rows)} run{'s' if len(rows) > 1 else ''}"


def template(text: str) -> str:
    """A text inside a hover template, where %{…} would be replaced."""
    return plain(text).replace("%{", "%\u200b{")
