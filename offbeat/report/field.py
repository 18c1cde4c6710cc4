"""The runs of a report beside each other: what each is called, and which are repetitions of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from offbeat.report.history import History

SETTINGS = (
    *("script", "argv", "workers", "total", "batch_size", "micro_batches", "samples", "parameters"),
    *("lr_reference", "momentum", "wire", "stragglers", "on_diverge", "backend", "device"),
)
"""What two runs may differ in, besides plan and seed: fields of the records `run` and `data`."""
SILENT = {"stragglers": "off", "micro_batches": 1, "argv": []}
"""What goes without saying in a label."""


@dataclass(frozen=True)
class Entry:
    """One run. label: its plan, and what else tells it apart. group: of the runs with this label, which are
    each other's repetitions; the number of its colour. number: its own, for anchors."""

    history: History
    label: str
    group: int
    number: int

    @property
    def title(self) -> str:
        seed = self.history.about.get("seed")
        return self.label if seed is None else f"{self.label}, seed {seed}"


def setting(history: History, name: str) -> Any:
    """A setting of a run; None where its journal doesn't say."""
    if name in ("batch_size", "micro_batches", "samples"):
        return history.one("data").get(name)
    if name == "backend" and history.virtual:
        return "virtual"  # with gradients or without: the same seconds
    return history.about.get(name)


def differing(runs: Sequence[History]) -> list[str]:
    """The settings in which the runs differ, where their journals tell them."""
    found = []
    for name in SETTINGS:
        values = {told(value) for run in runs if (value := setting(run, name)) is not None}
        if len(values) > 1:
            found.append(name)
    return found


def entries(runs: Sequence[History]) -> list[Entry]:
    """In the order of the runs, repetitions side by side."""
    differ = differing(runs)
    labels = []
    for run in runs:
        parts = [
            _short(name, value)
            for name in differ
            if (value := setting(run, name)) is not None and value != SILENT.get(name)
        ]
        labels.append(run.plan + (f" [{', '.join(parts)}]" if parts else ""))
    order = list(dict.fromkeys(labels))
    chosen = sorted(range(len(runs)), key=lambda i: order.index(labels[i]))
    return [Entry(runs[i], labels[i], order.index(labels[i]), number) for number, i in enumerate(chosen)]


def _short(name: str, value: Any) -> str:
    match name:
        case "stragglers" | "script" | "argv":
            return told(value)
        case "workers":
            return f"{told(value)} workers"
        case "backend":
            return "virtual" if value == "virtual" else f"real, {told(value)}"
    return f"{name}={told(value)}"


def told(value: Any) -> str:
    """A setting's value for a person."""
    if value is None:
        return "–"
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)
