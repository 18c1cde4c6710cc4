"""Which plan is best on which cluster, by time to BSP's accuracy: real CIFAR-10 on virtual workers.

    python benchmarks choice --data DIR                  an hour on two cores; not among `make bench`'s own

Eight workers on four clusters (`benchmarks/clusters/`), `reproduce/train.py`'s smallest network, three seeds.
Plans in which all wait for each other compute the same on every cluster, to the bit (`tests/test_choice.py`):
they train once, and a timing-only run on each cluster says when they came to what. Those without such waits
train on each. Trainings are kept in build/choice, so a command that was interrupted goes on.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from record import ROOT, Record, Row, Setup, compared

sys.path.insert(0, str(ROOT))

from offbeat import journal
from reproduce.runs import TRAIN, Result, Run, Store

TITLE = "Which plan on which cluster, by time to BSP's accuracy"
MINUTES = 60.0
CLUSTERS = ("fast", "slow", "straggler", "regions")
WAITING = ("bsp", "local(4)", "dasgd(4,2)", "dasgd(4,2,merge=delta)", "bsp:25% dasgd(4,2)")
"""Plans whose gradients don't depend on times."""
RACING = ("asp", "ssp(3)", "bsp:50% asp", "auto")
WORKERS, UNITS, SEEDS = 8, 3130, 3
TOLERANCE = 0.01
"""Below BSP's mean accuracy, and an evaluation counts as having reached it: Sync-Switch's."""
SCRIPT = (
    *("--model", "resnet8", "--width", "0.5", "--subset", "10000", "--bf16", "--batch-size", "32"),
    *("--lr-reference", "worker", "--lr", "0.03", "--schedule", "step"),
    *("--evaluate", "5%", "--test-subset", "4000", "--last-subset", "4000"),
)
SETTINGS = {
    "workers": WORKERS,
    "units": UNITS,
    "model": "ResNet-8, 16 channels",
    "train": 10_000,
    "test": 4000,
    "batch": 32,
    "lr": "0.03 of a worker, a tenth after half",
    "momentum": 0.9,
    "seeds": SEEDS,
}
Curve = list[tuple[float, float]]
"""Seconds and accuracy of each evaluation."""


def run(plan: str, cluster: str, seed: int, units: int) -> Run:
    launch = ("--virtual", str(WORKERS), "--cluster", f"benchmarks/clusters/{cluster}.toml")
    return Run(plan, seed, (*launch, "--total", str(units)), SCRIPT, minutes=1.9)


def clock(one: Run, store: Store) -> list[tuple[float, float]]:
    """Progress and seconds of the steps of a timing-only run."""
    out = store.folder / f"timing-{one.name}"
    if not (out / "virtual.json").exists():  # written at the end
        shutil.rmtree(out, ignore_errors=True)
        words = [sys.executable, "-m", "offbeat", "run", "-q", *one.launch, "--timing-only", "--out", out]
        words += ["--plan", one.plan, "--seed", one.seed, TRAIN, *one.script]
        words += ["--data", os.path.abspath(store.data["cifar10"])]
        place = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [str(word) for word in words], cwd=ROOT, env=place, capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(f"a timing-only run of {one.plan} failed:\n{done.stderr[-2000:]}")
    rows = journal.read(out)
    steps = sorted((row["progress"], row["t"]) for row in rows if row["type"] == "step")
    return [*steps, (1.0, next(row["seconds"] for row in rows if row["type"] == "end"))]


def when(steps: Sequence[tuple[float, float]], progress: float) -> float:
    """Seconds at which a job had come so far: of the first step that had."""
    return steps[min(bisect_left(steps, (progress, 0.0)), len(steps) - 1)][1]


def curve_of(result: Result, steps: Sequence[tuple[float, float]] | None) -> Curve:
    """On the training's own clock, or on another one's."""
    points = [(progress, seconds, accuracy) for progress, seconds, accuracy, _ in result.curve]
    if steps is None:
        return [(seconds, accuracy) for _, seconds, accuracy in points]
    return [(when(steps, progress), accuracy) for progress, _, accuracy in points]


def reached(curve: Curve, target: float) -> float | None:
    return next((seconds for seconds, accuracy in curve if accuracy >= target), None)


def measure(setup: Setup) -> Iterator[Row]:
    data = setup.data or str(ROOT / "data" / "cifar10")
    if not Path(data).is_dir():
        print(f"  no CIFAR-10 in {data}: give --data or CIFAR10_DIR")
        return
    units, seeds = (64, 1) if setup.quick else (UNITS, SEEDS)
    store = Store(ROOT / "build" / ("choice-quick" if setup.quick else "choice"), {"cifar10": data})
    clusters = CLUSTERS[:2] if setup.quick else CLUSTERS
    trained = {
        (plan, cluster): [
            run(plan, clusters[0] if plan in WAITING else cluster, seed, units) for seed in range(seeds)
        ]
        for plan in (*WAITING, *RACING)
        for cluster in clusters
    }
    store.complete([one for runs in trained.values() for one in runs], 2)
    best = [store.finished(one).accuracy for one in trained["bsp", clusters[0]]]
    target = statistics.mean(best) - TOLERANCE
    for cluster in clusters:
        curves = {}
        for plan in (*WAITING, *RACING):
            found = [store.finished(one) for one in trained[plan, cluster]]
            clocks: list[Any] = [None] * seeds
            if plan in WAITING:
                clocks = [clock(run(plan, cluster, seed, units), store) for seed in range(seeds)]
            curves[plan] = [curve_of(*both) for both in zip(found, clocks, strict=True)]
        yield from rows_of(cluster, curves, target)


def rows_of(cluster: str, curves: dict[str, list[Curve]], target: float) -> Iterator[Row]:
    """Of one cluster. A plan's time to the target is the mean over seeds, if all have reached it."""

    def times(plan: str) -> list[float] | None:
        found = [reached(curve, target) for curve in curves[plan]]
        return None if None in found else [one for one in found if one is not None]

    first = times("bsp")
    for plan, own in curves.items():
        ends = [100 * curve[-1][1] for curve in own]
        there = times(plan)
        values: dict[str, Any] = {
            "accuracy, %": [round(statistics.mean(ends), 2), round(deviation(ends), 2)],
            "seconds": round(statistics.mean(curve[-1][0] for curve in own), 1),
            "seconds to the target": None if there is None else round(statistics.mean(there), 1),
            "target, %": round(100 * target, 2),
        }
        ratio = spread = None
        if first and there:
            ratio, spread = compared(there, first)
        yield Row(plan, {"cluster": cluster}, values, ratio, "bsp", spread)


def deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def name_of(cluster: str) -> str:
    import tomllib

    return str(tomllib.loads((ROOT / "benchmarks" / "clusters" / f"{cluster}.toml").read_text())["name"])


def page(record: Record) -> list[str]:
    from page import paragraph, spread, table

    target = record.rows[0].values["target, %"]
    lines = [
        paragraph(
            f"""Real gradients, virtual time. The target is {target:.1f} %, a point below what `bsp` ends
            with. In a cell: BSP's time to the target over the plan's (with its spread over the seeds), or
            that a seed ended below it; then the accuracy at the end, mean ± standard deviation, and the
            whole job's virtual time. Clusters are in `benchmarks/clusters/`. Hyper-parameters are the same
            for all plans (Sync-Switch's policy carries them over): none was tuned for its own sake."""
        )
    ]
    clusters = list(dict.fromkeys(row.settings["cluster"] for row in record.rows))
    rows = []
    for plan in dict.fromkeys(row.name for row in record.rows):
        cells = []
        for cluster in clusters:
            row = next(row for row in record.rows if (row.name, row.settings["cluster"]) == (plan, cluster))
            middle, deviates = row.values["accuracy, %"]
            there = "below it"
            if row.ratio is not None and row.spread is not None:
                there = f"**{row.ratio:.2f}×** ({spread(*row.spread)})"
            cells.append(f"{there}; {middle:.1f} ± {deviates:.1f} %, {row.values['seconds']:.0f} s")
        rows.append([f"`{plan}`", *cells])
    lines += [*table(["plan", *map(name_of, clusters)], rows), ""]
    best = []
    for cluster in clusters:
        there = [row for row in record.rows if row.settings["cluster"] == cluster and row.ratio is not None]
        if there:
            first = max(there, key=lambda row: row.ratio or 0.0)
            best.append(f"{name_of(cluster)}: `{first.name}`, {first.ratio:.2f} times as fast as `bsp`")
    return [*lines, f"First to the target: {'; '.join(best)}."]
