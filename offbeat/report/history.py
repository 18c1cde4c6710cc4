"""What a report needs of a journal, read in one pass and in little memory, however long the run was."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offbeat.journal import Record, rows
from offbeat.live import VIRTUAL, finite

Numbers = NDArray[np.float64]

LOOKS = 400
"""`workers` records that are kept, at least, of a longer run: they hold sums, so that leaving some out only
makes the picture coarser."""
RANKS = 100_000
"""No worker's rank is that large."""
STEP = ("t", "units", "progress", "loss", "lr", "staleness")
ROW = ("units", "samples", "busy_s", "wait_s")


class ReportError(ValueError):
    """There is nothing to report on; the message says where and why."""


@dataclass(frozen=True)
class Phase:
    """A protocol's time: seconds since the first step, progress as a share."""

    protocol: str
    begin: float
    end: float
    from_progress: float
    to_progress: float


@dataclass
class Pace:
    """What the workers had done at `times`: sums since the run's begin, one column per rank, NaN where a rank
    wasn't heard of yet. Shapes [times] and [times, ranks]; seconds."""

    times: Numbers
    ranks: list[int]
    units: Numbers
    samples: Numbers
    busy: Numbers
    wait: Numbers


@dataclass
class History:
    """One job. `t` counts seconds since its first step; `origin` is that moment in the journal's own seconds.

    name: the run's directory. about: its `run` record, empty where the journal doesn't begin with one.
    records: all but `step` and `workers`. steps: arrays of the sampled steps, by the names in `STEP`."""

    name: str
    place: str
    about: Record = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    steps: dict[str, Numbers] = field(default_factory=dict)
    looks: list[tuple[float, Numbers]] = field(default_factory=list)
    origin: float = 0.0
    last: float = 0.0
    count: int = 0

    def all(self, kind: str) -> Iterator[Record]:
        return (record for record in self.records if record["type"] == kind)

    def one(self, kind: str) -> Record:
        """The last record of its type, or an empty one."""
        return next((record for record in reversed(self.records) if record["type"] == kind), {})

    def time(self, record: Record) -> float:
        return float(record["t"]) - self.origin

    @property
    def plan(self) -> str:
        return str(self.about.get("plan") or "plan unknown")

    @property
    def virtual(self) -> bool:
        return self.about.get("backend") in VIRTUAL

    @property
    def workers(self) -> int:
        """Workers at the start; those seen, where the journal doesn't say."""
        told = finite(self.about.get("workers"))
        return int(told) if told and 1 <= told < RANKS else len(self.pace.ranks)

    @property
    def total(self) -> float | None:
        total = finite(self.about.get("total"))
        return total if total and total > 0 else None

    @property
    def ended(self) -> bool:
        return bool(self.one("end"))

    @property
    def seconds(self) -> float:
        """Since the first step, to the end or to the last record."""
        told = finite(self.one("end").get("seconds"))
        return max(self.last - self.origin, 0.0) if told is None else max(told, 0.0)

    @property
    def batch_size(self) -> float | None:
        size = finite(self.one("data").get("batch_size"))
        return size if size and size > 0 else None

    @cached_property
    def pace(self) -> Pace:
        """Shows every rank that ever told something."""
        ranks = sorted({int(rank) for _, table in self.looks for rank in table[:, 0]})
        column = {rank: i for i, rank in enumerate(ranks)}
        sums = np.full((len(ROW), len(self.looks), len(ranks)), math.nan)
        for i, (_, table) in enumerate(self.looks):
            where = [column[int(rank)] for rank in table[:, 0]]
            sums[:, i, where] = table[:, 1:].T
        times = np.array([t for t, _ in self.looks]) - self.origin
        return Pace(times, ranks, *sums)

    @cached_property
    def phases(self) -> list[Phase]:
        begun = [
            (str(r.get("protocol") or "?"), self.time(r), share(r.get("progress"))) for r in self.all("phase")
        ]
        if not begun:
            return []
        last = (self.last - self.origin, self.progress)
        ends = [(t, progress) for _, t, progress in begun[1:]] + [last]
        return [
            Phase(protocol, t, max(end, t), progress, max(to, progress))
            for (protocol, t, progress), (end, to) in zip(begun, ends, strict=True)
        ]

    @cached_property
    def progress(self) -> float:
        """How far the job came."""
        done = [share(r.get("progress")) for r in self.records if "progress" in r]
        if self.steps["progress"].size:
            done.append(float(np.nanmax(self.steps["progress"], initial=0.0)))
        if self.ended and self.total:
            done.append(min(max(finite(self.one("end").get("units")) or 0.0, 0.0) / self.total, 1.0))
        return max(done, default=0.0)

    @cached_property
    def absences(self) -> dict[int, list[tuple[float, float, str]]]:
        """Of each rank, from when to when it was no member, and why."""
        end = max(self.last - self.origin, 0.0)
        away: dict[int, list[tuple[float, float, str]]] = {}
        out: dict[int, tuple[float, str]] = {}
        members = set(range(self.workers))
        for record in self.all("members"):
            now = {rank for rank in whole(record.get("members")) if 0 <= rank < RANKS}
            t, reason = max(self.time(record), 0.0), str(record.get("reason") or "")
            for rank in members - now:
                out[rank] = (t, reason)
            for rank in now - members:
                since, why = out.pop(rank, (0.0, "not there yet"))
                if t > since:
                    away.setdefault(rank, []).append((since, t, why))
            members = now
        for rank, (since, why) in out.items():
            if end > since:
                away.setdefault(rank, []).append((since, end, why))
        return away


def whole(value: Any) -> list[int]:
    """The whole numbers of a list in a journal."""
    found = [finite(one) for one in value] if isinstance(value, list) else []
    return [int(one) for one in found if one is not None]


def share(value: Any) -> float:
    return min(max(finite(value) or 0.0, 0.0), 1.0)


def listed(value: Any) -> list[dict[str, Any]]:
    """The tables in a list of a journal."""
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []


def histories(path: Path) -> list[History]:
    """The jobs in a journal (a script may make several Synchronizers). Raises ReportError."""
    try:
        found = list(_jobs(path))
    except FileNotFoundError:
        raise ReportError(f"{path} holds no journal.jsonl") from None
    except (OSError, ValueError) as error:
        raise ReportError(str(error)) from None
    if not found:
        raise ReportError(f"{path} holds no record yet: nothing to report")
    for index, job in enumerate(found):
        job.name += f" #{index + 1}" if len(found) > 1 else ""
    return found


def _jobs(path: Path) -> Iterator[History]:
    reader: _Reader | None = None
    for record in rows(path):
        record["type"] = str(record["type"])
        if reader is None or (record["type"] == "run" and reader.job.about):
            if reader is not None:
                yield reader.end()
            reader = _Reader(path)
        reader.add(record)
    if reader is not None:
        yield reader.end()


class _Reader:
    """Gathers one job."""

    def __init__(self, path: Path):
        place = path if path.is_dir() else path.parent
        self.job = History(place.absolute().name, str(path))
        self._columns = {name: array("d") for name in STEP}
        self._began: float | None = None
        self._first: float | None = None
        self._stride, self._looks = 1, 0
        self._newest: tuple[float, Numbers] | None = None

    def add(self, record: Record) -> None:
        job, t = self.job, finite(record.get("t"))
        record["t"] = t = job.last if t is None else t
        job.last = max(job.last, t)
        job.count += 1
        self._first = t if self._first is None else self._first
        kind = record["type"]
        if kind == "step":
            for name, column in self._columns.items():
                value = finite(record.get(name))
                column.append(math.nan if value is None else value)
            return
        if kind == "workers":
            self._look(t, record)
            return
        if kind == "run" and not job.about:
            job.about = record
        elif kind == "evaluation":
            record["values"] = record["values"] if isinstance(record.get("values"), dict) else {}
        elif kind == "pushes":
            record["workers"] = listed(record.get("workers"))
        elif kind == "end":
            for name in ("seconds", "units", "samples_per_s", "waiting"):
                record[name] = finite(record.get(name))
        if kind == "phase" and self._began is None:
            self._began = t
        job.records.append(record)

    def _look(self, t: float, record: Record) -> None:
        table = [
            [int(rank), *(finite(row.get(name)) or 0.0 for name in ROW)]
            for row in listed(record.get("workers"))
            if (rank := finite(row.get("rank"))) is not None and 0 <= rank < RANKS
        ]
        if not table:
            return
        self._newest = (t, np.array(table, dtype=float))
        if self._looks % self._stride == 0:
            self.job.looks.append(self._newest)
        self._looks += 1
        if len(self.job.looks) >= 2 * LOOKS:
            del self.job.looks[1::2]
            self._stride *= 2

    def end(self) -> History:
        job = self.job
        if self._newest is not None and job.looks[-1] is not self._newest:
            job.looks.append(self._newest)
        job.steps = {name: np.frombuffer(column, dtype=float) for name, column in self._columns.items()}
        job.origin = (self._first or 0.0) if self._began is None else self._began
        job.steps["t"] = job.steps["t"] - job.origin
        return job


def expand(paths: Iterable[Path]) -> tuple[list[Path], list[Path]]:
    """The runs' places, and those of runs that left no journal: a directory without one stands for the runs
    in it (of `offbeat compare`), in the order of their names' numbers. Raises ReportError."""
    found: list[Path] = []
    empty: list[Path] = []
    for path in paths:
        if not path.exists():
            raise ReportError(f"there is no {path}")
        if path.is_dir() and not (path / "journal.jsonl").exists():
            inside = sorted((one.parent for one in path.glob("*/journal.jsonl")), key=_order)
            if not inside:
                raise ReportError(f"{path} holds no journal.jsonl, nor do the directories in it")
            found += inside
            empty += sorted(
                (one.parent for one in path.glob("*/logs") if one.parent not in inside), key=_order
            )
        else:
            found.append(path)
    return found, empty


def _order(path: Path) -> tuple[float, str]:
    head = path.name.split("-", 1)[0]
    return (int(head) if head.isascii() and head.isdigit() else math.inf, path.name)
