"""A line of text for what happened in a run, from the journal's record of it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from offbeat.journal import Record
from offbeat.live import finite, number, pushed

FEW = 0.8
"""A worker that made fewer than this share of its even part of the pushes is named."""
NOTED = ("switch", "phase", "pushes", "diverged", "rollback", "warning")
"""What deserves a line where a run's own output goes by."""
ALARMING = ("warning", "diverged", "rollback")
"""Of them, what does even where the live line shows the rest."""


def event(record: Record) -> str | None:
    """The line, or None for a record that is no event (a sample, a figure)."""
    try:
        return _event(record)
    except (TypeError, ValueError, AttributeError):
        return f"{record.get('type')}: a record of another version"


def _event(record: Record) -> str | None:
    match record.get("type"):
        case "switch":
            return _switch(record)
        case "phase":
            progress = _or_zero(record.get("progress"))
            return f"{100 * progress:.1f}%: {record.get('protocol')}" if progress == 0 else None
        case "pushes":
            return _pushes(record)
        case "members":
            return f"members now {ranks(record.get('members'))}: {record.get('reason')}"
        case "straggler":
            return _straggler(record)
        case "recovery":
            return _recovery(record)
        case "checkpoint":
            took = f"{_or_zero(record.get('ms')):.0f} ms"
            return f"checkpoint {record.get('action')} in {took}: {record.get('path')}"
        case "request":
            done = "done" if record.get("ok") else "not done"
            return f"asked to {record.get('do')}, {done}: {record.get('text')}"
        case "diverged":
            stale = number(record.get("staleness"))
            where = f"its step {record.get('clock')}, {record.get('units')} units"
            where += "" if stale is None else f", staleness {stale:g}"
            return f"diverged on rank {record.get('rank')} ({where}): {record.get('reason')}"
        case "rollback":
            where = f"from {record.get('units')} to {record.get('to_units')} units ({record.get('path')})"
            return f"rollback {where}, on with bsp: {record.get('reason')}"
        case "warning":
            return f"warning: {record.get('message')}"
        case "error":
            return f"error on rank {record.get('rank')}: {record.get('message')}"
    return None


def _switch(record: Record) -> str:
    costs = [_or_zero(record.get(f"{part}_ms")) for part in ("drain", "settle", "transfer")]
    return (
        f"switch {record.get('from')} → {record.get('to')} at "
        f"{100 * _or_zero(record.get('progress')):.1f}% ({record.get('units')} units): "
        f"{sum(costs):.1f} ms (drain {costs[0]:.1f}, settle {costs[1]:.1f}, transfer {costs[2]:.1f})"
    )


def _pushes(record: Record) -> str:
    """Pushes of a phase, their staleness, who made far fewer than the others, what waited at the bound."""
    rows = record.get("workers") or []
    count, stale = pushed(record)
    if not count:
        return f"{record.get('protocol')}: no pushes"
    most = max(_or_zero(row.get("max_staleness")) for row in rows)
    staleness = f"staleness {stale / count:.1f} on average, {most:g} at most"
    text = f"{record.get('protocol')}: {count:,.0f} pushes, {staleness}"
    slowest = min(rows, key=lambda row: _or_zero(row.get("pushes")))
    share = _or_zero(slowest.get("pushes")) / count
    if share < FEW / len(rows):
        text += f"; rank {slowest.get('rank')} made {100 * share:.0f}% of them"
    waits, seconds = (sum(_or_zero(row.get(f"bound_wait{end}")) for row in rows) for end in ("s", "_s"))
    return text + (f"; {waits:,.0f} waits at the bound, {seconds:.1f} s" if waits else "")


def _straggler(record: Record) -> str:
    rank, speeds = record.get("rank"), record.get("speeds")
    speed = number(speeds.get(str(rank))) if isinstance(speeds, dict) else None
    limit = number(record.get("limit"))
    how = "" if speed is None else f": {speed:.3g} units/s of its own time"
    how += "" if speed is None or limit is None else f", limit {limit:.3g}"
    return f"rank {rank} {record.get('action')} as a straggler{how}"


def _recovery(record: Record) -> str:
    again = record.get("again")
    count = len(again) if isinstance(again, list) else 0
    return (
        f"went on without the dead after {_or_zero(record.get('ms')):.0f} ms; {count} units are dealt again"
    )


def ranks(members: Any) -> str:
    """Ranks in short: `0–2, 5`."""
    whole = (
        sorted({int(one) for one in members if isinstance(one, int)}) if isinstance(members, Sequence) else []
    )
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(whole), lambda pair: pair[1] - pair[0])]
    return (
        ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
        or "none"
    )


def _or_zero(value: Any) -> float:
    return finite(value) or 0.0
