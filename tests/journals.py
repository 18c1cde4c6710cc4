"""Journals of runs that never were, for what shows journals."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from offbeat.journal import Record

HOSTILE = (
    "<script>window.pwned=1</script>",
    '"><img src=x onerror="window.pwned=1">',
    "</script><b>%{x}</b> & ${1+1} {{ 7*7 }}",
    "<a href='javascript:window.pwned=1'>local</a>\n\u202e‮",
)
"""Texts that a plan, a path or an error might hold."""


def begin(plan: str, workers: int = 4, **fields: Any) -> list[Record]:
    run: Record = {
        "type": "run",
        "t": 2.0,
        "started": 1_750_000_000.0,
        "script": "train.py",
        "argv": [],
        "plan": plan,
        "total": 1000,
        "seed": 0,
        "workers": workers,
        "backend": "gloo",
        "device": "cpu",
        "stragglers": "off",
        "wire": "fp32",
        "versions": {"offbeat": "0.1", "torch": "2.13"},
    }
    first = plan.split(" ")[0].split(":")[0]
    return [
        {**run, **fields},
        {"type": "start", "t": 2.1, "import_ms": 900.0, "rendezvous_ms": 20.0},
        {"type": "data", "t": 2.1, "batch_size": 16, "micro_batches": 1, "samples": 1600},
        {"type": "phase", "t": 2.1, "protocol": first, "units": 0, "progress": 0.0},
    ]


def steady(
    protocol: str,
    workers: int,
    seconds: float,
    total: int = 1000,
    start: float = 2.1,
    share: tuple[float, float] = (0.0, 1.0),
    waiting: float = 0.25,
    accuracy: float = 0.97,
) -> list[Record]:
    """Steps, figures and evaluations of a part of a job, `share` of it, four looks a tenth of it."""
    rows: list[Record] = []
    looks = 40
    for i in range(1, looks + 1):
        part = i / looks
        t = start + seconds * part
        progress = share[0] + (share[1] - share[0]) * part
        units = round(total * progress)
        step = {"protocol": protocol, "clock": units // workers, "units": units, "progress": progress}
        rows.append({"type": "step", "t": t, **step, "loss": 2.3 * math.exp(-4 * progress), "lr": 0.1})
        team = [
            {
                "rank": rank,
                "clock": units // workers,
                "units": units // workers,
                "samples": 16 * (units // workers),
                "busy_s": (t - 2.1) * (1 - waiting * (0.5 if rank == workers - 1 else 1.0)),
                "wait_s": (t - 2.1) * waiting * (0.5 if rank == workers - 1 else 1.0),
            }
            for rank in range(workers)
        ]
        rows.append({"type": "workers", "t": t, "workers": team})
        if i % 4 == 0:
            values = {"accuracy": accuracy * (1 - math.exp(-5 * progress)), "loss": math.exp(-3 * progress)}
            rows.append(
                {"type": "evaluation", "t": t, "units": units, "progress": progress, "values": values}
            )
    return rows


def end(seconds: float, units: int = 1000, **fields: Any) -> Record:
    row = {"type": "end", "t": 2.1 + seconds, "seconds": seconds, "units": units, "samples": 16 * units}
    return {**row, "samples_per_s": 16 * units / seconds, "waiting": 0.2, "loss": 0.05, **fields}


def calm(plan: str, seconds: float, accuracy: float = 0.97, workers: int = 4, **fields: Any) -> list[Record]:
    """A run in which nothing happened but its end."""
    return [
        *begin(plan, workers, **fields),
        *steady(plan, workers, seconds, accuracy=accuracy),
        end(seconds),
    ]


def eventful(workers: int = 4, text: str = "") -> list[Record]:
    """A run with a switch, a straggler, a death, and one record at least of every other type."""
    plan = "bsp:50% asp"
    rest = list(range(workers))
    gone = [rank for rank in rest if rank != 2]
    speeds = {str(rank): 10.0 for rank in rest} | {"2": 4.0}
    flag = {"type": "straggler", "rank": 2, "protocol": "bsp", "units": 200, "rule": "robust", "limit": 8.0}
    where = {"units": 500, "progress": 0.5}
    costs = {"drain_ms": 3.0, "meet_ms": 40.0, "settle_ms": 20.0, "transfer_ms": 2.5}
    pushes = [
        {
            "rank": r,
            "pushes": 125,
            "mean_staleness": 3.0,
            "max_staleness": 7,
            "bound_waits": 0,
            "bound_wait_s": 0,
        }
        for r in rest
    ]
    first = steady("bsp", workers, 10.0, share=(0.0, 0.5))
    second = steady("asp", workers, 5.0, start=12.2, share=(0.5, 1.0), waiting=0.05)
    for row in second:
        if row["type"] == "step":
            row["staleness"] = 3
    middle: list[Record] = [
        {**flag, "t": 4.0, "action": "flagged", "speeds": speeds},
        {
            "type": "members",
            "t": 4.1,
            "epoch": 1,
            "members": gone,
            "reason": f"without rank 2, which is slow{text}",
        },
        {**flag, "t": 6.0, "action": "cleared", "speeds": {**speeds, "2": 10.0}},
        {"type": "members", "t": 7.0, "epoch": 2, "members": gone[:-1], "reason": f"rank {workers - 1} died"},
        {
            "type": "recovery",
            "t": 7.1,
            "units": 300,
            "ms": 45.0,
            "epoch": 2,
            "again": [301, 302],
            "partly": [],
        },
        {"type": "warning", "t": 8.0, "message": f"something is odd{text}"},
        {"type": "checkpoint", "t": 9.0, "action": "saved", "path": f"a.pt{text}", "units": 400, "ms": 12.0},
        {"type": "request", "t": 9.5, "do": "checkpoint", "ok": True, "text": f"saved{text}", "units": 410},
        {
            "type": "diverged",
            "t": 9.6,
            "rank": 1,
            "clock": 3,
            "units": 411,
            "loss": "nan",
            "staleness": None,
            "reason": f"the loss is nan{text}",
        },
        {
            "type": "rollback",
            "t": 9.7,
            "units": 411,
            "path": "a.pt",
            "to_units": 400,
            "reason": "the loss is nan",
        },
    ]
    at = len(first) // 2
    switch: list[Record] = [
        {
            "type": "members",
            "t": 12.1,
            "epoch": 3,
            "members": rest,
            "reason": "back among the members: rank 2",
        },
        {"type": "switch", "t": 12.2, "from": "bsp", "to": "asp", **where, **costs},
        {"type": "phase", "t": 12.2, "protocol": "asp", **where},
    ]
    last: list[Record] = [
        {
            "type": "pushes",
            "t": 17.2,
            "protocol": "asp",
            "units": 1000,
            "progress": 1.0,
            "mean_staleness": 3.0,
            "staleness": {"0": 10, "2": 100, "3": 300, "4": 80, "7": 10},
            "workers": pushes,
        },
    ]
    rows = [*begin(plan, workers), *first[:at], *middle, *first[at:], *switch, *second, *last, end(15.1)]
    return sorted(rows, key=lambda row: float(row["t"]))


def steps(count: int) -> Iterable[str]:
    """The lines of a long run: so many `step` records, and figures now and then."""
    yield from (json.dumps(row) + "\n" for row in begin("bsp", 4, total=4 * count))
    for i in range(count):
        t = 2.1 + 0.05 * i
        loss = 0.05 + 2.3 * math.exp(-8 * i / count) * (
            1 + 0.3 * math.sin(i * 12.9898) * math.cos(i * 78.233)
        )
        yield (
            f'{{"type": "step", "t": {t:.3f}, "protocol": "bsp", "clock": {i}, "units": {4 * i}, '
            f'"progress": {i / count:.6f}, "loss": {loss:.6f}, "lr": 0.1}}\n'
        )
        if i % 1000 == 0:
            team = [
                {"rank": r, "units": i, "samples": 16 * i, "busy_s": 0.04 * i, "wait_s": 0.01 * i}
                for r in range(4)
            ]
            yield json.dumps({"type": "workers", "t": t, "workers": team}) + "\n"
            values = {"accuracy": 1 - math.exp(-5 * i / count)}
            row = {"type": "evaluation", "t": t, "units": 4 * i, "progress": i / count, "values": values}
            yield json.dumps(row) + "\n"
    yield json.dumps({**end(0.05 * count, 4 * count), "t": 2.1 + 0.05 * count}) + "\n"


def write(directory: Path, rows: Sequence[Record]) -> Path:
    """Makes a run's directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "journal.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


PLANS = {
    "bsp": (10.0, 0.985),
    "local(period=4)": (7.0, 0.97),
    "dasgd(period=4,delay=2)": (5.5, 0.975),
    "asp": (5.0, 0.94),
    "bsp:12.5% asp": (5.6, 0.983),
}
"""Five plans, with the seconds and the accuracy of each."""


def five(directory: Path) -> Path:
    """A directory of `offbeat compare` with five plans."""
    for number, (plan, (seconds, accuracy)) in enumerate(PLANS.items()):
        write(directory / f"{number + 1}-plan", calm(plan, seconds, accuracy))
    return directory


@st.composite
def spoiled(draw: st.DrawFn) -> list[Record]:
    """A run in which some fields hold what they should not."""
    rows = [dict(row) for row in eventful()]
    odd = st.one_of(
        st.none(), st.booleans(), st.integers(-(10**20), 10**20), st.floats(), st.text(max_size=5),
        st.lists(st.integers(-2, 5), max_size=3),
        st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
    )  # fmt: skip
    for _ in range(draw(st.integers(1, 12))):
        row = rows[draw(st.integers(0, len(rows) - 1))]
        key = draw(st.sampled_from(sorted(row)))
        if draw(st.booleans()):
            row[key] = draw(odd)
        elif key != "type":
            del row[key]
    return rows
