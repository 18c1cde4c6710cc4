"""What changing the protocol, or the workers, costs a job: a switch inside Offbeat's job, a worker that is
dropped, killed or let in, against what users do today: save, start again under torchrun, and restore.

    python benchmarks switching

Every worker writes down when it has done a step of some 20 ms. What is measured is the pause: the longest
time between two steps of the first worker around the change, less its usual step (0.1 ms where that leaves
nothing). For torchrun it is the time from the last step of the first job to the first step of the second,
which begins as soon as the first has ended and has one worker less.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from record import ROOT, Record, Row, Setup
from recovery import JOBS, Job, read

from offbeat import journal

TITLE = "Switching and membership, against restarting from a checkpoint"
MINUTES = 4.0
SETTINGS = {"workers": 3, "network": "loopback"}
RESTART = "torchrun: save, restart, restore"
SIZES = ("0.3M", "9.9M")


Steps = list[tuple[float, int, int, int]]


def pause(rows: Steps, moment: float) -> float:
    """The longest time between two of a worker's steps half a second around a moment, less its usual one."""
    near = [row for row in rows if moment - 0.5 <= row[0] <= moment + 0.5]
    between = [b[0] - a[0] for a, b in pairwise(rows)]
    around = [b[0] - a[0] for a, b in pairwise(near)] or [b - a for a, b in [gap_over(rows, moment)]]
    return max(max(around) - statistics.median(between), 1e-4)


def gap_over(rows: Steps, moment: float) -> tuple[float, float]:
    before = [row[0] for row in rows if row[0] <= moment]
    after = [row[0] for row in rows if row[0] > moment]
    return before[-1], after[0]


def told(out: Path, kind: str) -> list[tuple[float, dict[str, Any]]]:
    """The journal's records of a kind, each with its time in seconds since the epoch."""
    rows = journal.read(out)
    started = next((row["started"] for row in rows if row["type"] == "run"), 0.0)
    return [(started + row["t"], row) for row in rows if row["type"] == kind]


def switched(size: str, workers: int, plan: tuple[str, str], rounds: int) -> dict[str, list[float]]:
    """Pauses, and the costs that the journal tells, of switches to and fro."""
    each = 60 * workers
    words = [f"{plan[number % 2]}:{(number + 1) * each}u" for number in range(2 * rounds)]
    with TemporaryDirectory(prefix="offbeat-switching-") as folder, Job(Path(folder)) as job:
        command = [sys.executable, "-m", "offbeat", "run", "-q", "-n", workers, "--out", "run"]
        command += ["--total", (2 * rounds + 1) * each, "--plan", " ".join([*words, plan[0]])]
        job.start([*command, JOBS / "ours.py", size]).wait()
        records = told(Path(folder) / "run", "switch")
        if len(records) != 2 * rounds:
            raise SystemExit(f"{len(records)} switches of {2 * rounds}:\n{(job.folder / 'log').read_text()}")
        parts = ("drain_ms", "settle_ms", "transfer_ms")
        cost = [sum(row[part] for part in parts) / 1e3 for _, row in records]
        mine = [row for row in read(job.steps) if row[1] == 0]
        return {"pause": [pause(mine, moment) for moment, _ in records], "cost": cost}


def member_changes(size: str) -> Iterator[tuple[str, float]]:
    """Pauses of the first of three workers when the last is dropped, the other is killed, and that one comes
    back."""
    workers = 3
    with TemporaryDirectory(prefix="offbeat-switching-") as folder, Job(Path(folder)) as job:
        out = Path(folder) / "run"
        words = [sys.executable, "-m", "offbeat", "run", "-q", "-n", workers, "--min", 1, "--plan", "bsp"]
        job.start([*words, "--out", "run", JOBS / "ours.py", size])

        def steps_of(rank: int) -> Steps:
            return [row for row in read(job.steps) if row[1] == rank]

        def members(moment: float, there: set[int], gone: set[int]) -> float | None:
            """When, after a moment, some were first members and some weren't."""
            for at, row in told(out, "members"):
                if at > moment and there <= set(row["members"]) and not gone & set(row["members"]):
                    return at
            return None

        last = workers - 1
        job.wait_for(lambda: len(steps_of(last)) > 50 or None, "50 steps")
        begun = time.time()
        subprocess.run(
            [sys.executable, "-m", "offbeat", "ctl", out, "drop", str(last)], check=True, env=place()
        )
        moment = job.wait_for(lambda: members(begun, {0}, {last}), "the dropped worker's leaving")
        time.sleep(1.0)
        yield "dropped", pause(steps_of(0), moment)
        begun, pid = time.time(), job.pid(1)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        moment = job.wait_for(lambda: members(begun, {0}, {1}), "the killed worker's leaving")
        time.sleep(1.0)
        yield "killed", pause(steps_of(0), moment)
        moment = job.wait_for(lambda: members(moment, {0, 1}, set()), "the killed worker's coming back")
        time.sleep(1.0)
        yield "let in", pause(steps_of(0), moment)


def place() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def restarted(size: str, first: int, second: int) -> float:
    """Seconds from the last step under torchrun to the first one of a job that restores, of other workers."""
    with TemporaryDirectory(prefix="offbeat-switching-") as folder, Job(Path(folder)) as job:
        for workers in (first, second):
            words = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                workers,
            ]
            if job.start([*words, JOBS / "restarted.py", size, 30]).wait():
                raise SystemExit(f"torchrun failed:\n{(job.folder / 'log').read_text()[-3000:]}")
        rows = [row for row in read(job.steps) if row[1] == 0]
        last = max(row[0] for row in rows if row[3] <= 30)
        return min(row[0] for row in rows if row[3] > 30) - last


def measure(setup: Setup) -> Iterator[Row]:
    workers, rounds = (2, 1) if setup.quick else (3, 3)
    for size in SIZES[:1] if setup.quick else SIZES:
        again = [restarted(size, workers, workers - 1) for _ in range(1 if setup.quick else 3)]
        yield Row(RESTART, {"parameters": size}, {"seconds": shown(again)})
        for plan in (("bsp", "asp"), ("bsp", "dasgd(4,2)")):
            found = switched(size, workers, plan, rounds)
            for name, seconds in (
                (f"{plan[0]} → {plan[1]}", found["pause"][::2]),
                (f"{plan[1]} → {plan[0]}", found["pause"][1::2]),
            ):
                costs = found["cost"][::2] if name.startswith("bsp") else found["cost"][1::2]
                values = {"seconds": shown(seconds), "by the journal": shown(costs)}
                yield Row(name, {"parameters": size}, values, *over(again, seconds))
        for name, one in member_changes(size):
            values = {"seconds": shown([one])}
            yield Row(f"a worker is {name}", {"parameters": size}, values, *over(again, [one]))


def over(again: list[float], seconds: list[float]) -> tuple[float, str, tuple[float, float]]:
    """How many times as long a restart takes."""
    ratio = statistics.median(again) / statistics.median(seconds)
    return ratio, RESTART, (min(again) / max(seconds), max(again) / min(seconds))


def shown(seconds: list[float]) -> list[float]:
    """Median, lowest and highest."""
    return [round(one, 4) for one in (statistics.median(seconds), min(seconds), max(seconds))]


def page(record: Record) -> list[str]:
    from page import paragraph, spread, table

    rows = []
    for row in record.rows:
        middle, low, high = row.values["seconds"]
        unit, digits = (1.0, 1) if row.ratio is None and middle > 1 else (1e3, 0)
        cell = f"{middle * unit:.{digits}f} ({spread(low * unit, high * unit, digits)})"
        cell += " s" if unit == 1 else " ms"
        costs = row.values.get("by the journal")
        told = costs and f"{costs[0] * 1e3:.0f} ms ({spread(costs[1] * 1e3, costs[2] * 1e3, 0)})"
        rows.append([row.settings["parameters"], row.name, cell, told, row.ratio and f"{row.ratio:.0f}"])
    text = paragraph(
        """How long the first of three workers pauses, beyond its usual step, when the protocol or the
        members change; torchrun from its last step to the first after the restart. The journal's cost is
        draining, settling and transferring alone."""
    )
    head = ["parameters", "change", "pause", "by the journal", "torchrun's over it"]
    return [text, *table(head, rows)]
