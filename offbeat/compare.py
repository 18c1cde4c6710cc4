"""Several plans of one job beside each other: a function of their journals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

from offbeat.journal import Record
from offbeat.live import amount, clock, number, pushed

if TYPE_CHECKING:
    from rich.table import Table

ACCURACY = ("accuracy", "acc", "test_accuracy", "val_accuracy")
"""Names under which a script's `sync.log` may give an accuracy; the first that is there counts."""


@dataclass(frozen=True)
class Row:
    """One plan. Times in seconds, from the first step on; `waiting` and `relative` are shares (`relative`:
    of the first plan's time). `staleness` is the mean over the plan's pushes. `to_target` is when the plan
    first reached `Comparison.target`. None where the journal doesn't say; `error` where the run failed.

    Of several runs of a plan, `runs` that finished and `failed` ones, all figures are means, and `accuracies`
    holds each run's."""

    plan: str
    out: str = ""
    seconds: float | None = None
    samples_per_s: float | None = None
    waiting: float | None = None
    staleness: float | None = None
    loss: float | None = None
    accuracy: float | None = None
    to_target: float | None = None
    relative: float | None = None
    error: str | None = None
    runs: int = 1
    failed: int = 0
    accuracies: tuple[float, ...] = ()

    @property
    def spread(self) -> float | None:
        """Standard deviation of the runs' accuracies."""
        return stdev(self.accuracies) if len(self.accuracies) > 1 else None


@dataclass(frozen=True)
class Comparison:
    """`target` is the worst plan's best accuracy: the least that every finished plan has reached."""

    rows: tuple[Row, ...]
    target: float | None

    def as_json(self) -> dict[str, Any]:
        rows = [asdict(row) for row in self.rows]
        return {"target": self.target, "plans": [{k: _finite(v) for k, v in row.items()} for row in rows]}


@dataclass(frozen=True)
class Run:
    """What `compare` needs of one run: the plan as it was asked for, its journal, and why it failed."""

    plan: str
    records: Sequence[Record]
    out: str = ""
    error: str | None = None


def compare(runs: Sequence[Run]) -> Comparison:
    """Compares finished runs; one without an `end` record counts as failed. Runs of the same plan, in a row,
    are one row."""
    failed = [run.error or (None if _last(run.records, "end") else "it did not end") for run in runs]
    curves = [_curve(run.records) for run in runs]
    bests = [max(a for _, a in curve) for curve, why in zip(curves, failed, strict=True) if curve and not why]
    target = min(bests) if bests else None
    rows: list[Row] = []
    for run, curve, why in zip(runs, curves, failed, strict=True):
        end = _last(run.records, "end") or {}
        if why:
            rows.append(Row(run.plan, run.out, error=why))
            continue
        reached = [t for t, accuracy in curve if target is not None and accuracy >= target]
        rows.append(
            Row(
                plan=run.plan,
                out=run.out,
                seconds=number(end.get("seconds")),
                samples_per_s=number(end.get("samples_per_s")),
                waiting=number(end.get("waiting")),
                staleness=_staleness(run.records),
                loss=number(end.get("loss")),
                accuracy=curve[-1][1] if curve else None,
                to_target=reached[0] if reached else None,
            )
        )
    merged = [_mean(list(same)) for _, same in groupby(rows, lambda row: row.plan)]
    base = merged[0].seconds if merged else None
    related = [
        replace(row, relative=row.seconds / base) if base and row.seconds is not None else row
        for row in merged
    ]
    return Comparison(tuple(related), target)


def _mean(rows: list[Row]) -> Row:
    """One plan's runs as one row."""
    ended = [row for row in rows if row.error is None]
    if len(rows) == 1 or not ended:
        return replace(rows[0], runs=len(ended), failed=len(rows) - len(ended))
    means: dict[str, Any] = {}
    for name in ("seconds", "samples_per_s", "waiting", "staleness", "loss", "accuracy", "to_target"):
        values = [value for row in ended if (value := getattr(row, name)) is not None]
        means[name] = mean(values) if values else None
    return replace(
        ended[0],
        **means,
        runs=len(ended),
        failed=len(rows) - len(ended),
        accuracies=tuple(row.accuracy for row in ended if row.accuracy is not None),
    )


def table(comparison: Comparison) -> Table:
    """The comparison for a terminal. Staleness has a column where some plan has pushed."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    target = "the target" if comparison.target is None else f"{100 * comparison.target:.1f}%"
    made = Table(box=box.SIMPLE_HEAD)
    made.add_column("plan", overflow="fold")
    stale = any(row.staleness is not None for row in comparison.rows)
    columns = ["time", "vs first", "samples/s", "waiting", *(["staleness"] if stale else [])]
    columns += ["final loss", "accuracy", f"time to {target}"]
    repeated = any(row.runs + row.failed > 1 for row in comparison.rows)
    columns += ["runs"] if repeated else []
    for name in columns:
        made.add_column(name, justify="right")
    for row in comparison.rows:
        if row.error is not None:
            made.add_row(escape(row.plan), "failed", *[""] * (len(columns) - 1))
        else:
            made.add_row(escape(row.plan), *_cells(row, stale), *([_runs(row)] if repeated else []))
    return made


def _runs(row: Row) -> str:
    return f"{row.runs} of {row.runs + row.failed}" if row.failed else str(row.runs)


def _cells(row: Row, stale: bool) -> list[str]:
    def cell(value: float | None, form: str = "", scale: float = 1.0, after: str = "") -> str:
        return "–" if value is None else f"{scale * value:{form}}{after}"

    return [
        "–" if row.seconds is None else clock(row.seconds, precise=True),
        cell(row.relative, ".2f", after="×"),
        "–" if not row.samples_per_s else amount(row.samples_per_s),
        cell(row.waiting, ".1f", 100, "%"),
        *([cell(row.staleness, ".1f")] if stale else []),
        cell(row.loss, ".4g"),
        cell(row.accuracy, ".2f", 100, "%") + ("" if row.spread is None else f" ± {100 * row.spread:.2f}"),
        "–" if row.to_target is None else clock(row.to_target, precise=True),
    ]


def _staleness(records: Sequence[Record]) -> float | None:
    """Mean over all pushes of the run."""
    sums = [pushed(record) for record in records if record.get("type") == "pushes"]
    count, stale = sum(pushes for pushes, _ in sums), sum(stale for _, stale in sums)
    return stale / count if count else None


def _curve(records: Sequence[Record]) -> list[tuple[float, float]]:
    """(seconds since the first step, accuracy) of every evaluation."""
    began = next((number(r.get("t")) or 0.0 for r in records if r.get("type") == "phase"), 0.0)
    curve = []
    for record in records:
        if record.get("type") == "evaluation":
            values = record.get("values") or {}
            accuracy = next((number(values[name]) for name in ACCURACY if name in values), None)
            if accuracy is not None and math.isfinite(accuracy):
                curve.append(((number(record.get("t")) or 0.0) - began, accuracy))
    return curve


def _last(records: Sequence[Record], kind: str) -> Record | None:
    return next((record for record in reversed(records) if record.get("type") == kind), None)


def _finite(value: Any) -> Any:
    """JSON has no NaN or infinity: they become their names, as in a journal."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
