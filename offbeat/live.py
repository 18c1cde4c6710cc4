"""What a person sees of a run: a line while it runs, a summary at its end. Pure functions of the
journal's records, and the small reader that follows a journal while it grows."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from offbeat.journal import Record

RECENT = 10.0
"""Seconds over which speed, waiting and the time left are judged."""
EVENTS = 40
"""Records that are kept to be told as events."""
LOSSES = 120
"""Losses that are kept, at least, of a longer run."""
VIRTUAL = ("virtual", "timing-only")
"""Backends whose seconds are virtual."""


@dataclass(frozen=True)
class Point:
    """The job at time `t`: share of it done, samples, the workers' busy and waiting seconds, in all."""

    t: float
    progress: float = 0.0
    samples: float = 0.0
    busy: float = 0.0
    wait: float = 0.0


@dataclass(frozen=True)
class Look:
    """A `workers` record: what each rank had done at time `t`: units, busy and waiting seconds."""

    t: float
    rows: dict[int, tuple[float, float, float]]


@dataclass(frozen=True)
class Pace:
    """A worker's recent time: units a second, and the share of it that was spent waiting."""

    units: float
    units_per_s: float | None
    waiting: float | None


@dataclass(frozen=True)
class View:
    """A run as far as its journal tells. Times are seconds since the run's start. `staleness` is that of the
    last push while shards are in charge; `pushes` and `stale` are the ended shards phases' pushes and
    the sum of their staleness. `members`: their ranks, once they have changed; `slow`: ranks that are flagged
    as stragglers; `losses`: evenly over the run, every `stride`-th of those sampled; `happened`: the last
    records that are events."""

    plan: str = ""
    virtual: bool = False
    workers: int = 0
    total: int = 0
    protocol: str = ""
    units: int = 0
    loss: float | None = None
    staleness: float | None = None
    pushes: float = 0.0
    stale: float = 0.0
    now: Point = field(default_factory=lambda: Point(0.0))
    points: tuple[Point, ...] = ()
    began: float | None = None
    evaluation: dict[str, Any] | None = None
    end: dict[str, Any] | None = None
    script: str = ""
    lr: float | None = None
    members: tuple[int, ...] | None = None
    slow: frozenset[int] = frozenset()
    looks: tuple[Look, ...] = ()
    losses: tuple[float, ...] = ()
    sampled: int = 0
    stride: int = 1
    happened: tuple[Record, ...] = ()

    @property
    def first(self) -> Point:
        return self.points[0] if self.points else self.now

    @property
    def samples_per_s(self) -> float | None:
        seconds, samples = self.now.t - self.first.t, self.now.samples - self.first.samples
        return samples / seconds if seconds > 0 and samples > 0 else None

    @property
    def units_per_s(self) -> float | None:
        """For loops over batches that offbeat did not deal, whose sizes it does not know."""
        seconds, share = self.now.t - self.first.t, self.now.progress - self.first.progress
        return share * self.total / seconds if seconds > 0 and share > 0 else None

    @property
    def waiting(self) -> float | None:
        """Share of the workers' recent time that they spent waiting for each other."""
        busy, wait = self.now.busy - self.first.busy, self.now.wait - self.first.wait
        return wait / (busy + wait) if busy + wait > 0 else None

    @property
    def mean_staleness(self) -> float | None:
        """Over all pushes of the shards phases that have ended."""
        return self.stale / self.pushes if self.pushes else None

    @property
    def paces(self) -> dict[int, Pace]:
        """Each worker's, by rank."""
        if not self.looks:
            return {}
        now, before = self.looks[-1], self.looks[0]
        found = {}
        for rank, (units, busy, wait) in sorted(now.rows.items()):
            earlier = before.rows.get(rank, (0.0, 0.0, 0.0)) if before is not now else (0.0, 0.0, 0.0)
            since = before.t if before is not now else self.began or 0.0
            done, worked, waited = (a - b for a, b in zip((units, busy, wait), earlier, strict=True))
            seconds, spent = now.t - since, worked + waited
            found[rank] = Pace(
                units, done / seconds if seconds > 0 else None, waited / spent if spent > 0 else None
            )
        return found

    @property
    def seconds_left(self) -> float | None:
        seconds, progress = self.now.t - self.first.t, self.now.progress - self.first.progress
        if self.now.progress >= 1:
            return 0.0
        return (1 - self.now.progress) * seconds / progress if seconds > 0 and progress > 0 else None


def fold(view: View, record: Record) -> View:
    """The view after one more record. Records that it does not know, or cannot read, change nothing: a look
    at a run must not end it."""
    try:
        return _fold(view, record)
    except (TypeError, ValueError, AttributeError):
        return view


def _fold(view: View, record: Record) -> View:
    kind, t = record.get("type"), finite(record.get("t")) or 0.0
    if kind == "run":
        return replace(
            view,
            plan=str(record.get("plan") or ""),
            virtual=record.get("backend") in VIRTUAL,
            workers=int(finite(record.get("workers")) or 0),
            total=int(finite(record.get("total")) or 0),
            script=str(record.get("script") or ""),
        )
    if kind in ("step", "phase"):
        view = replace(
            view,
            protocol=str(record.get("protocol", view.protocol)),
            units=int(finite(record.get("units")) or view.units),
            loss=view.loss if record.get("loss") is None else number(record["loss"]),
            lr=view.lr if record.get("lr") is None else number(record["lr"]),
            staleness=finite(record.get("staleness")),
            began=t if view.began is None else view.began,
        )
        view = _sampled(view, record) if kind == "step" else _happened(view, record)
        return _at(view, t, progress=finite(record.get("progress")) or view.now.progress)
    if kind == "workers":
        rows = record.get("workers") or []
        totals = {
            name: sum(finite(row.get(key)) or 0.0 for row in rows)
            for name, key in (("samples", "samples"), ("busy", "busy_s"), ("wait", "wait_s"))
        }
        return _at(_looked(view, t, rows), t, **totals, keep=True)
    if kind == "pushes":
        count, stale = pushed(record)
        view = replace(view, pushes=view.pushes + count, stale=view.stale + stale)
    elif kind == "members":
        view = replace(view, members=tuple(int(one) for one in record.get("members") or ()))
    elif kind == "straggler":
        rank = {int(finite(record.get("rank")) or 0)}
        view = replace(view, slow=view.slow | rank if record.get("action") == "flagged" else view.slow - rank)
    if kind == "evaluation":
        return replace(view, evaluation=dict(record.get("values") or {}))
    if kind == "end":
        done = int(finite(record.get("units")) or view.units)
        progress = min(1.0, done / view.total) if view.total else view.now.progress
        return replace(view, end=dict(record), units=done, now=replace(view.now, progress=progress))
    return _happened(view, record)


def view(records: Iterable[Record]) -> View:
    """The view of all records."""
    state = View()
    for record in records:
        state = fold(state, record)
    return state


def _happened(view: View, record: Record) -> View:
    """All but samples and figures is kept for a while: who shows it knows what is an event."""
    if record.get("type") in ("start", "data", "ledger"):
        return view
    return replace(view, happened=(*view.happened, record)[-EVENTS:])


def _sampled(view: View, record: Record) -> View:
    """Keeps the loss if its turn has come; when there are many, every other one."""
    loss = number(record.get("loss"))
    if loss is None:
        return view
    losses, stride = view.losses, view.stride
    if view.sampled % stride == 0:
        losses = (*losses, loss)
    if len(losses) > 2 * LOSSES:
        losses, stride = losses[::2], 2 * stride
    return replace(view, losses=losses, stride=stride, sampled=view.sampled + 1)


def _looked(view: View, t: float, rows: list[Any]) -> View:
    found = {
        int(rank): (
            finite(row.get("units")) or 0.0,
            finite(row.get("busy_s")) or 0.0,
            finite(row.get("wait_s")) or 0.0,
        )
        for row in rows
        if (rank := finite(row.get("rank"))) is not None
    }
    looks = (*view.looks, Look(t, found))
    recent = next(i for i, look in enumerate(looks) if t - look.t <= RECENT)
    return replace(view, looks=looks[max(0, recent - 1) :])


def _at(view: View, t: float, keep: bool = False, **changes: float) -> View:
    """`keep` makes the point one to measure speeds from: those of the last seconds, and one older."""
    now, points = replace(view.now, t=t, **changes), view.points
    if not points and view.began is not None:
        points = (Point(view.began, progress=now.progress),)
    if keep:
        points = (*points, now)
        recent = next(i for i, point in enumerate(points) if t - point.t <= RECENT)
        points = points[max(0, recent - 1) :]
    return replace(view, now=now, points=points)


def line(view: View) -> str:
    """One line: progress, protocol, speed, loss, staleness, share of waiting, time left. What is not known
    yet is left out."""
    if view.now.t == 0:
        return "starting"
    waiting, left = view.waiting, view.seconds_left
    parts = [
        f"{100 * view.now.progress:5.1f}%",
        f"virtual {clock(view.now.t)}" if view.virtual else "",
        view.protocol,
        speed(view.samples_per_s, view.units_per_s),
        "" if view.loss is None else f"loss {view.loss:.4g}",
        "" if view.staleness is None else f"staleness {view.staleness:g}",
        "" if waiting is None else f"waiting {100 * waiting:.0f}%",
        "" if left is None else f"ETA {clock(left)}",
    ]
    return "  ".join(part for part in parts if part)


def pushed(record: Record) -> tuple[float, float]:
    """Pushes in a `pushes` record, and the sum of their staleness."""
    count = sum(finite(row.get("pushes")) or 0.0 for row in record.get("workers") or [])
    return count, count * (finite(record.get("mean_staleness")) or 0.0)


def summary(view: View) -> str:
    """The run's end in a few lines: time, speed, waiting, staleness, loss, last evaluation."""
    if view.end is None:
        return f"stopped at {100 * view.now.progress:.1f}% of {view.plan}" if view.plan else "no run recorded"
    end = view.end
    seconds, samples, units, waiting, loss = (
        number(end.get(key)) for key in ("seconds", "samples_per_s", "units", "waiting", "loss")
    )
    stale = view.mean_staleness
    parts = [
        ""
        if seconds is None
        else clock(seconds, precise=True) + (" of virtual time" if view.virtual else ""),
        speed(samples, units / seconds if units and seconds else None),
        "" if waiting is None else f"waiting {100 * waiting:.1f}%",
        "" if stale is None else f"mean staleness {stale:.1f}",
        "" if loss is None else f"final loss {loss:.4g}",
    ]
    text = f"{view.plan} on {view.workers} workers: " + ", ".join(part for part in parts if part)
    if view.evaluation:
        values = ", ".join(f"{name} {_short(value)}" for name, value in view.evaluation.items())
        text += f"\nlast evaluation: {values}"
    return text


def speed(samples: float | None, units: float | None) -> str:
    """Samples a second; units where samples were not counted; nothing where neither is known."""
    if samples:
        return f"{amount(samples)} samples/s"
    return f"{amount(units)} units/s" if units else ""


def number(value: Any) -> float | None:
    """A journal's number; NaN and infinity stand there by name."""
    if value is None or isinstance(value, bool):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def finite(value: Any) -> float | None:
    """A journal's number, None where it is none, is not finite, or is too large to reckon with."""
    found = number(value)
    return found if found is not None and abs(found) < 1e15 else None


def amount(value: float) -> str:
    """Three digits that matter: 8.25, 82.5, 825, 8,250."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def clock(seconds: float, precise: bool = False) -> str:
    """Seconds for a person: 3.2 s (where precise) or 3 s, 2:05, 1:02:05."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 60:
        return f"{seconds:.1f} s" if precise else f"{seconds:.0f} s"
    hours, rest = divmod(round(seconds), 3600)
    minutes, rest = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class Follower:
    """Reads a journal as it grows; `read` gives the records that came since the last call."""

    def __init__(self, path: Path):
        self._path, self._position, self._rest = path, 0, b""

    def read(self) -> list[Record]:
        """New whole records. A journal that is not there yet, or a line that is no record, is no error:
        a look at a run must not end it."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._position)
                new = file.read()
        except OSError:
            return []
        self._position += len(new)
        *lines, self._rest = (self._rest + new).split(b"\n")
        rows = []
        for text in lines:
            try:
                row = json.loads(text)
            except ValueError:
                continue
            if isinstance(row, dict) and "type" in row:
                rows.append(row)
        return rows
