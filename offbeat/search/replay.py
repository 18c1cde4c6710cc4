"""Searches played a thousand times over runs that were logged: the paper's Table II.

A trial is a logged run, drawn with replacement among those of its share. Where no run was logged at just the
share that the search asks for, the largest logged share below it stands in, as long as every share so far has
passed (so setup 1 of the paper's, which logged 10, 5 and 2 %, answers for 12.5, 6.25 and 3.125 %); after a
share has failed only runs of the share itself count, and where there are none the search ends with what it
has."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from offbeat.search.core import BSP, SearchError, Settings, midpoint

NAMES = {
    "share": ("share", "bsp_frac"),
    "accuracy": ("accuracy", "acc_final"),
    "seconds": ("seconds", "time_net_s"),
}
"""Columns of a file of runs, by their names here and in the Sync-Switch authors' logs."""
SAME = 0.01
"""Shares that differ by less than this part are one: BSP's steps don't divide every job."""

Pool = Mapping[float, "np.ndarray[Any, np.dtype[np.float64]]"]
"""By share: one row a run, accuracy and seconds."""

SETTINGS = tuple(
    [(True, target_runs, runs) for target_runs in (5, 3, 2, 1) for runs in (5, 3, 1)]
    + [(False, 0, runs) for runs in (5, 3, 1)]
)
"""The rows of Table II: a new job or a recurring one, whose target is known; BSP runs; runs a share."""


@dataclass(frozen=True)
class Row:
    """Means over the searches. trainings: cost in trainings with BSP alone. success: share of the searches
    that found what the search over all logged runs' means finds. amortized: over those that found a faster
    plan than BSP."""

    new: bool
    target_runs: int
    runs: int
    trainings: float
    success: float
    amortized: float
    effective: float


def read_runs(path: Path | str, where: Mapping[str, str] | None = None) -> Pool:
    """The runs of a CSV file with the columns share, accuracy and seconds, or those of the authors' logs.
    Only rows whose columns are as `where` says. Raises SearchError with the line's number, or OSError."""
    where = dict(where or {})
    rows: list[tuple[float, float, float]] = []
    with Path(path).open(newline="") as file:
        reader = csv.DictReader(file)
        names = reader.fieldnames or []
        columns = {}
        for name, known in NAMES.items():
            column = next((one for one in known if one in names), None)
            if column is None:
                raise SearchError(f"{path} has no column {' or '.join(known)}; it has {', '.join(names)}")
            columns[name] = column
        for column in where:
            if column not in names:
                raise SearchError(
                    f"--where {column}={where[column]}: {path} has the columns {', '.join(names)}"
                )
        for number, row in enumerate(reader, 2):
            if any(row[column] != value for column, value in where.items()):
                continue
            try:
                share, accuracy, seconds = (float(row[columns[name]]) for name in NAMES)
            except (TypeError, ValueError):
                raise SearchError(f"{path}, line {number}: share, accuracy and seconds are numbers") from None
            if not (0 <= share <= 1 and 0 <= accuracy <= 1 and seconds > 0):
                raise SearchError(
                    f"{path}, line {number}: share {share:g} and accuracy {accuracy:g} lie between 0 and 1, "
                    f"seconds {seconds:g} above 0"
                )
            rows.append((share, accuracy, seconds))
    if not rows:
        raise SearchError(f"{path} has no run" + ("" if not where else f" with {_text(where)}"))
    return pool_of(rows)


def pool_of(rows: Iterable[tuple[float, float, float]]) -> Pool:
    """(share, accuracy, seconds) of runs, gathered by share. Raises SearchError without runs of BSP alone."""
    gathered: dict[float, list[tuple[float, float]]] = {}
    for share, accuracy, seconds in sorted(rows):
        near = next((one for one in gathered if abs(one - share) <= SAME * one), share)
        gathered.setdefault(near, []).append((accuracy, seconds))
    if BSP not in gathered:
        raise SearchError("no run is BSP alone (share 1), so there is nothing to aim at or to count in")
    return {share: np.array(runs) for share, runs in gathered.items()}


def stand_in(shares: Iterable[float], share: float, failed: bool) -> float | None:
    """The logged share whose runs answer for `share`; None when none does."""
    logged = [one for one in shares if 0 < one < BSP]
    same = [one for one in logged if abs(one - share) <= SAME * share]
    if same or failed:
        return min(same, key=lambda one: abs(one - share), default=None)
    return max((one for one in logged if share / 2 < one < share), default=None)


def play(
    pool: Pool, settings: Settings, times: int = 1000, new: bool = True, seed: int = 0
) -> dict[str, np.ndarray[Any, np.dtype[np.float64]]]:
    """`times` searches at once. Returns what each found: `share`, `seconds` of a run with it, `cost` in
    seconds, `useful` trials; arrays of `times`. Of a job that is not `new` the target is the mean of all
    logged runs of BSP, and costs nothing."""
    draw = np.random.default_rng(seed)
    bsp = pool[BSP]
    if new:
        runs = bsp[draw.integers(len(bsp), size=(times, settings.target_runs))]
        target, cost, useful = runs[..., 0].mean(1), runs[..., 1].sum(1), np.full(times, settings.target_runs)
    else:
        target, cost, useful = np.full(times, bsp[:, 0].mean()), np.zeros(times), np.zeros(times, int)
    low, high = np.zeros(times), np.ones(times)
    seconds, going = np.full(times, bsp[:, 1].mean()), np.ones(times, bool)
    for _ in range(settings.depth):
        # Few intervals are possible at a depth: all searches that stand at the same one go on together.
        for begin, end in sorted(set(zip(low[going].tolist(), high[going].tolist(), strict=True))):
            here = going & (low == begin) & (high == end)
            share = midpoint(begin, end, settings.grain)
            logged = None if share is None else stand_in(pool, share, failed=begin > 0)
            if share is None or logged is None:
                going &= ~here
                continue
            runs = pool[logged]
            drawn = runs[draw.integers(len(runs), size=(int(here.sum()), settings.runs))]
            passed = drawn[..., 0].mean(1) >= target[here] - settings.tolerance
            cost[here] += drawn[..., 1].sum(1)
            useful[here] += settings.runs * passed
            seconds[here] = np.where(passed, drawn[..., 1].mean(1), seconds[here])
            low[here], high[here] = np.where(passed, begin, share), np.where(passed, share, end)
    return {"share": high, "seconds": seconds, "cost": cost, "useful": useful}


def best(pool: Pool, settings: Settings) -> float:
    """What the search finds when every trial is the mean of all logged runs: the paper's baseline."""
    means = {share: runs.mean(0, keepdims=True) for share, runs in pool.items()}
    return float(play(means, replace(settings, runs=1, target_runs=1), times=1)["share"][0])


def table_ii(
    pool: Pool,
    settings: Settings,
    times: int = 1000,
    seed: int = 0,
    rows: Sequence[tuple[bool, int, int]] = SETTINGS,
) -> list[Row]:
    """The paper's Table II, with `settings`' depth and tolerance."""
    answer, unit = best(pool, settings), float(pool[BSP][:, 1].mean())
    found = []
    for new, target_runs, runs in rows:
        one = replace(settings, runs=runs, target_runs=target_runs or 1)
        got = play(pool, one, times, new, seed)
        cost, saved = got["cost"] / unit, 1 - got["seconds"] / unit
        faster = saved > 0
        amortized = float(np.mean(cost[faster] / saved[faster])) if faster.any() else float("inf")
        effective = float(np.mean(got["useful"] / cost))
        success = float(np.mean(got["share"] == answer))
        found.append(Row(new, target_runs, runs, float(cost.mean()), success, amortized, effective))
    return found


def _text(where: Mapping[str, str]) -> str:
    return " and ".join(f"{name}={value}" for name, value in where.items())
