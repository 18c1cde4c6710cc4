"""Sync-Switch's Table III: what it takes to begin a job and to switch, measured in real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

from offbeat import journal
from offbeat.plan import parse
from offbeat.virtual.cost import Costs
from offbeat.virtual.description import find
from offbeat.virtual.model import Model
from offbeat.virtual.timing import simulate
from reproduce import ROOT
from reproduce.item import Item, row, side_by_side
from reproduce.rule import Claim, average, exact, spread

JOB = ROOT / "benchmarks" / "jobs" / "ours.py"
PARTS = ("drain_ms", "settle_ms", "transfer_ms")
ROUNDS = 3
SWITCHES = 6
"""In each round's job."""


def started(workers: int, switches: int) -> tuple[float, list[float]]:
    """Seconds from the launcher's beginning to the first step of a real job on this host, and of each of
    its switches."""
    step = 40 * workers
    plan = [f"{('bsp', 'asp')[number % 2]}:{(number + 1) * step}u" for number in range(switches)]
    last = ("bsp", "asp")[switches % 2]
    with TemporaryDirectory(prefix="offbeat-table3-") as folder:
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        place = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        place["OFFBEAT_BENCHMARK_STEPS"] = str(Path(folder) / "steps")
        words = ["run", "-q", "-n", str(workers), "--total", str((switches + 1) * step)]
        words += ["--plan", " ".join([*plan, last]), "--out", str(Path(folder) / "run"), str(JOB), "0.3M"]
        subprocess.run([sys.executable, "-m", "offbeat", *words], env=place, check=True, cwd=folder)
        rows = journal.read(Path(folder) / "run")
    begun = next(row["t"] for row in rows if row["type"] == "phase")
    costs = [sum(row[part] for part in PARTS) / 1e3 for row in rows if row["type"] == "switch"]
    return float(begun), costs


class Switches:
    """A journal that keeps what switches cost, in seconds."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def record(self, type: str, **fields: Any) -> None:
        if type == "switch":
            self.seconds.append(sum(fields[part] for part in PARTS) / 1e3)


def alone(workers: int) -> float:
    """Virtual seconds of a switch to ASP and one back, each worker on a host of its own."""
    cluster = replace(find("sync-switch-3").sized(workers), switch=0.0)
    assert cluster.model is not None
    kept = Switches()
    plan = parse("bsp:40% asp:70% bsp")
    simulate(plan, 80 * workers, Costs(cluster, 0), Model.of(cluster.model), journal=kept)
    return sum(kept.seconds)


def table3(mode: str) -> Iterator[Any]:
    sizes = {"quick": (2, 4), "small": (4, 8), "full": (8, 16)}[mode]
    few, many = sizes
    rounds = 1 if mode == "quick" else ROUNDS
    begun: dict[int, list[float]] = {}
    costs: dict[int, list[float]] = {}
    for workers in (1, *sizes):
        found_here = [started(workers, 0 if workers == 1 else SWITCHES) for _ in range(rounds)]
        begun[workers] = [seconds for seconds, _ in found_here]
        costs[workers] = [cost for _, switches in found_here for cost in switches]
    common: dict[str, Any] = {
        "size": f"processes of this host ({os.cpu_count()} cores), 0.3 M parameters",
        "seeds": f"{rounds} rounds",
    }

    def ratio(what: str, over: Sequence[float], under: Sequence[float], least: float, most: float) -> Claim:
        return average(what, [a / b for a, b in zip(over, under, strict=True)], least, most)

    told = {f"{n} workers": begun[n] for n in (1, *sizes)}
    yield row(
        f"initialization, {many} workers over {few}",
        metric="seconds from the launcher's beginning to the first step",
        paper="16 workers take 1.42X the time of 8",
        ours=side_by_side(told),
        claims=[ratio("ratio", begun[many], begun[few], 1, 2)],
        why="Sub-linear: more than once, less than twice. A worker's start is Python importing torch, on "
        "cores that the workers share here.",
        **common,
    )
    yield row(
        f"initialization in parallel, {many} workers",
        metric=f"{many} times the seconds of a single worker's start, over those of {many} at once",
        paper="2X",
        ours=f"{many * mean(begun[1]) / mean(begun[many]):.2f}X",
        claims=[ratio("ratio", [many * one for one in begun[1]], begun[many], 1, float("inf"))],
        why="Sequential starts are reckoned from a single worker's.",
        **common,
    )
    yield row(
        "a switch",
        metric="seconds of draining, settling and transferring",
        paper="36 s at least, 1.7 % of the training (3.1X faster than sequentially)",
        ours=f"{spread([1e3 * cost for cost in costs[many]])} ms with {many} workers",
        claims=[average("a switch", costs[many], most=36, unit="s")],
        why="No process is started again, so nothing is left to propagate in parallel or in sequence.",
        **common,
    )
    halves = [mean(costs[n]) for n in sizes]
    yield row(
        "a switch grows sub-linearly",
        metric=f"seconds of a switch of {many} workers over those of {few}",
        paper="the overhead increases sub-linearly with the cluster",
        ours=f"{1e3 * halves[0]:.1f} and {1e3 * halves[1]:.1f} ms",
        claims=[ratio("ratio", costs[many], costs[few], float("-inf"), 2)],
        why="Less than twice for twice the workers, which share this host's cores; the next row tests that.",
        **common,
    )
    eight, sixteen = alone(8), alone(16)
    yield row(
        "a switch grows sub-linearly: is it the cores?",
        metric="virtual seconds of a switch and one back, 16 workers over 8",
        size="preset sync-switch-3, a host for each worker, without its 36 s",
        seeds="no chance in it",
        paper="the overhead increases sub-linearly with the cluster",
        ours=f"{1e3 * eight:.1f} and {1e3 * sixteen:.1f} ms: {sixteen / eight:.2f}",
        claims=[exact("ratio", sixteen / eight, most=1.99)],
        why="Less than twice for twice the workers.",
    )


ITEM = Item(
    "sync-switch-table3",
    "Sync-Switch, Table III: initialization and switch",
    "Real processes on this host: from the launcher's beginning to the first step; BSP → ASP → BSP.",
    known=table3,
    minutes=4,
)
