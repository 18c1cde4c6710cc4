"""What a report says first: one sentence, what to keep in mind, and a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from offbeat.compare import ACCURACY, Comparison, Row, Run, compare
from offbeat.live import amount, clock, finite, number
from offbeat.report.field import Entry, differing, setting, told
from offbeat.report.history import History, share

CLOSE = 1.02
"""Times that differ by less than this factor are called the same."""


@dataclass(frozen=True)
class Table:
    """head: the columns; numeric: all but the first are numbers. rows: cells of text; best: cells to set off,
    as (row, column)."""

    head: tuple[str, ...]
    rows: list[list[str]]
    best: set[tuple[int, int]] = field(default_factory=set)
    caption: str = ""


@dataclass(frozen=True)
class Verdict:
    """sentence: the answer. notes: what it rests on. warnings: what speaks against it."""

    sentence: str
    table: Table
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def verdict(field: Sequence[Entry]) -> Verdict:
    """Of one run, or of several beside each other."""
    return _single(field[0].history) if len(field) == 1 else _several(field)


# Several runs


def compared(field: Sequence[Entry]) -> Comparison:
    """As `offbeat compare` does it, one row per label."""
    return compare([Run(e.label, e.history.records, e.history.place, _why(e.history)) for e in field])


def _why(history: History) -> str | None:
    """Why a run has no figures, or None."""
    if history.ended:
        return None
    error = history.one("error")
    reason = f": {error.get('message')}" if error else ""
    return f"it did not end; stopped at {100 * history.progress:.0f}%{reason}"


def _several(field: Sequence[Entry]) -> Verdict:
    result = compared(field)
    ended = [row for row in result.rows if row.error is None and row.seconds is not None]
    notes, warnings = _conditions(field, result)
    return Verdict(_sentence(result, ended), _table(result), notes, warnings)


def _sentence(result: Comparison, ended: list[Row]) -> str:
    if not ended:
        return "No run has ended: there is nothing to compare yet."
    if len(ended) == 1:
        row = ended[0]
        return f"Only {row.plan} has ended, in {_clock(row.seconds)}: there is nothing to compare it with."
    base = ended[0]
    reached = [row for row in ended if row.to_target is not None]
    if len(reached) > 1 and result.target is not None:
        best = min(reached, key=lambda row: row.to_target or 0.0)
        goal = f"{100 * result.target:.1f}% accuracy"
        against = base if best is not base and base in reached else _second(reached, best)
        text = f"{best.plan} reached {goal} first, in {_clock(best.to_target)}, {_times(best, against)}"
        return text + _accuracy(best, against) + "."
    best = min(ended, key=lambda row: row.seconds or 0.0)
    against = base if best is not base else _second(ended, best)
    factor = (against.seconds or 0.0) / best.seconds if best.seconds else 1.0
    how = f"{factor:.2f} times as fast as" if factor >= CLOSE else "about as fast as"
    return f"{best.plan} finished first, in {_clock(best.seconds)}, {how} {against.plan}."


def _second(rows: list[Row], best: Row) -> Row:
    """The one to compare the first plan with where it is itself the best: the runner-up."""
    others = [row for row in rows if row is not best]
    return min(others, key=lambda row: row.to_target if row.to_target is not None else row.seconds or 0.0)


def _times(best: Row, against: Row) -> str:
    mine, other = best.to_target or 0.0, against.to_target or 0.0
    if mine <= 0 or other / mine < CLOSE:
        return f"about as fast as {against.plan}"
    return f"{other / mine:.2f} times as fast as {against.plan} ({_clock(other)})"


def _accuracy(row: Row, base: Row) -> str:
    found = difference(row, base)
    if found is None:
        return ""
    points, spread = found
    if spread is not None and abs(points) <= 2 * spread:
        told = f"{_points(points, spread)}\u00a0points"
        return f"; in the end their accuracies do not differ beyond chance ({told})"
    if abs(points) < 0.05:
        return "; in the end both are as accurate"
    word = "higher" if points > 0 else "lower"
    size = f"{abs(points):.1f}" + ("" if spread is None else f" ± {spread:.1f}")
    return f"; its final accuracy is {size} points {word}"


def difference(row: Row, base: Row) -> tuple[float, float | None] | None:
    """By how many percentage points `row` is more accurate in the end, and the standard error of that, where
    both plans were run more than once."""
    if row.accuracy is None or base.accuracy is None:
        return None
    points = 100 * (row.accuracy - base.accuracy)
    if row.spread is None or base.spread is None:
        return points, None
    error = math.hypot(
        row.spread / math.sqrt(len(row.accuracies)), base.spread / math.sqrt(len(base.accuracies))
    )
    return points, 100 * error


def _points(points: float, spread: float | None) -> str:
    text = "0.00" if abs(points) < 0.005 else f"{points:+.2f}".replace("-", "−")
    return text if spread is None else f"{text}\u00a0±\u00a0{spread:.2f}"


def _conditions(field: Sequence[Entry], result: Comparison) -> tuple[list[str], list[str]]:
    """What a comparison rests on, and what speaks against it."""
    notes, warnings = [], []
    runs = [entry.history for entry in field]
    unlike = [name for name in differing(runs) if name != "stragglers"]
    if unlike:
        names = ", ".join(
            f"{name} ({' | '.join(dict.fromkeys(told(setting(r, name))[:60] for r in runs))})"
            for name in unlike
        )
        warnings.append(f"The runs differ in more than their plans: {names}.")
    if len({run.virtual for run in runs}) > 1:
        warnings.append("Seconds of virtual runs are simulated, those of the others are not.")
    for row in result.rows:
        if row.error is not None:
            warnings.append(f"{row.plan} has no figures: {row.error}.")
        elif row.failed:
            warnings.append(f"{row.plan}: {row.failed} of {row.runs + row.failed} runs did not end.")
    counts = {row.runs for row in result.rows if row.error is None}
    if counts == {1}:
        notes.append(
            "One run of each: nothing here tells a difference from chance. "
            "“offbeat compare --repeat 5” runs each plan with five seeds."
        )
    elif counts:
        notes.append(
            "Means over the runs of a plan; ± is the standard deviation over runs for accuracies, and the "
            "standard error for differences."
        )
    if result.target is not None:
        notes.append(
            f"{100 * result.target:.1f}% is the best accuracy of the plan with the lowest best: the highest "
            "that every plan has reached. Times are those of the first evaluation that shows it, so they are "
            "as coarse as the evaluations are rare."
        )
    if all(run.virtual for run in runs):
        notes.append("Times are virtual: they are those of the described cluster, not of this machine.")
    return notes, warnings


def _table(result: Comparison) -> Table:
    rows = result.rows
    base = next((row for row in rows if row.error is None), None)
    goal = None if result.target is None else f"{100 * result.target:.1f}%"
    stale = any(row.staleness is not None for row in rows)
    repeated = any(row.runs + row.failed > 1 for row in rows)
    head = ["plan", "time", "speed-up"]
    head += [f"time to {goal}", "speed-up to it"] if goal else []
    head += ["accuracy", "difference, points"] if goal else []
    head += ["samples/s", "waiting", *(["staleness"] if stale else []), "final loss"]
    head += ["runs"] if repeated else []
    cells = []
    for row in rows:
        if row.error is not None or base is None:
            cells.append([row.plan, "did not end", *["–"] * (len(head) - 2)])
            continue
        found = difference(row, base)
        line = [row.plan, _clock(row.seconds), _ratio(base.seconds, row.seconds)]
        if goal:
            line += [_clock(row.to_target), _ratio(base.to_target, row.to_target)]
            spread = "" if row.spread is None else f" ± {100 * row.spread:.2f}"
            line.append("–" if row.accuracy is None else f"{100 * row.accuracy:.2f}%{spread}")
            line.append("reference" if row is base else "–" if found is None else _points(*found))
        line += [
            "–" if not row.samples_per_s else amount(row.samples_per_s),
            "–" if row.waiting is None else f"{100 * row.waiting:.1f}%",
        ]
        if stale:
            line.append("–" if row.staleness is None else f"{row.staleness:.1f}")
        line.append("–" if row.loss is None else f"{row.loss:.4g}")
        if repeated:
            line.append(f"{row.runs} of {row.runs + row.failed}" if row.failed else str(row.runs))
        cells.append(line)
    best = {(i, 1) for i in _least([row.seconds if row.error is None else None for row in rows])}
    if goal:
        best |= {(i, 3) for i in _least([row.to_target for row in rows])}
        best |= {(i, 5) for i in _least([None if r.accuracy is None else -r.accuracy for r in rows])}
    reference = "" if base is None else f" Speed-ups and differences are against {base.plan}."
    return Table(tuple(head), cells, best, f"The best of a column is set in bold.{reference}")


def _least(values: list[float | None]) -> list[int]:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return [i for i, value in enumerate(values) if known and len(values) > 1 and value == min(known)]


def _ratio(base: float | None, mine: float | None) -> str:
    return f"{base / mine:.2f}×" if base and mine else "–"


def _clock(seconds: float | None) -> str:
    return (
        "–"
        if seconds is None or not math.isfinite(seconds)
        else clock(max(seconds, 0.0), True).replace(" ", "\u00a0")
    )


# One run


def _single(run: History) -> Verdict:
    end = run.one("end")
    units = finite(end.get("units"))
    speed = finite(end.get("samples_per_s"))
    waiting = finite(end.get("waiting"))
    virtual = " of virtual time" if run.virtual else ""
    accuracy, best = accuracies(run)
    workers = f"{run.workers:,} worker{'' if run.workers == 1 else 's'}"
    if run.ended:
        done = "its work" if units is None else f"{units:,.0f} units"
        text = f"{run.plan} did {done} on {workers} in {_clock(run.seconds)}{virtual}"
        text += (
            "" if waiting is None or run.workers == 1 else f"; they waited {100 * waiting:.0f}% of their time"
        )
        text += "" if accuracy is None else f"; its final accuracy is {100 * accuracy:.2f}%"
    else:
        text = (
            f"{run.plan} on {workers} has not ended: it came to {100 * run.progress:.1f}% in "
            f"{_clock(run.seconds)}{virtual}"
        )
    rows = [["Time", _clock(run.seconds) + virtual]]
    rows += [["Units", f"{units:,.0f}" + (f" of {run.total:,.0f}" if run.total else "")]] if units else []
    rows += [["Samples per second", amount(speed)]] if speed else []
    if units and run.seconds and not speed:
        rows.append(["Units per second", amount(units / run.seconds)])
    rows += [["Waiting, share of the workers' time", f"{100 * waiting:.1f}%"]] if waiting is not None else []
    if accuracy is not None and best is not None:
        rows.append(["Final accuracy", f"{100 * accuracy:.2f}%"])
        rows.append(["Best accuracy", f"{100 * best[1]:.2f}%, at {_clock(best[0])}"])
    loss = number(end.get("loss"))
    rows += [["Final training loss, rank 0's last", f"{loss:.4g}"]] if loss is not None else []
    stale = compare([Run("", run.records, "")]).rows[0].staleness
    rows += [["Mean staleness of a push", f"{stale:.1f} updates"]] if stale is not None else []
    rows += _counts(run)
    return Verdict(text + ".", Table(("", ""), rows), _notes(run), _alarms(run))


def _counts(run: History) -> list[list[str]]:
    switches = [sum(max(finite(r.get(f"{p}_ms")) or 0.0, 0.0) for p in COSTS) for r in run.all("switch")]
    rows = []
    if switches:
        rows.append(["Switches", f"{len(switches)}, {sum(switches):,.1f} ms in all"])
    if flagged := [r for r in run.all("straggler") if r.get("action") == "flagged"]:
        ranks = ", ".join(dict.fromkeys(f"rank {r.get('rank')}" for r in flagged))
        rows.append(["Stragglers flagged", f"{len(flagged)} ({ranks})"])
    if recoveries := list(run.all("recovery")):
        cost = sum(max(finite(r.get("ms")) or 0.0, 0.0) for r in recoveries)
        again = sum(len(r["again"]) for r in recoveries if isinstance(r.get("again"), list))
        rows.append(
            ["Recoveries from deaths", f"{len(recoveries)}, {cost:,.0f} ms in all; {again} units again"]
        )
    return rows


COSTS = ("drain", "settle", "transfer")
"""Of a switch, in milliseconds; waiting for the slowest member is told beside them."""


def accuracies(run: History) -> tuple[float | None, tuple[float, float] | None]:
    """The last accuracy, and the best with its time."""
    found = []
    for record in run.all("evaluation"):
        values = record.get("values")
        if isinstance(values, dict):
            value = next((finite(values[name]) for name in ACCURACY if name in values), None)
            if value is not None:
                found.append((run.time(record), value))
    return (found[-1][1], max(found, key=lambda one: one[1])) if found else (None, None)


def _notes(run: History) -> list[str]:
    notes = []
    if proof := proven(run):
        notes.append(proof)
    if run.virtual:
        notes.append("Times are virtual: they are those of the described cluster, not of this machine.")
    if run.about.get("backend") == "timing-only":
        notes.append("Timing only: nothing was trained, so there is no loss and no accuracy.")
    if not run.about:
        notes.append("The journal does not begin with a run's first record: what the run was is not known.")
    return notes


def proven(run: History) -> str:
    """What the ledger proves of the run, as `offbeat audit` says it; nothing without a ledger."""
    from offbeat.audit import audit

    try:
        found = audit(run.records)
        lines = [line for one in found if one.entries for line in one.lines()[1:]]
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return ""  # of another version
    return f"Audit: {'; '.join(lines)}." if lines else ""


def _alarms(run: History) -> list[str]:
    told = []
    for record in run.records:
        match record["type"]:
            case "error":
                told.append(f"Error on rank {record.get('rank')}: {record.get('message')}")
            case "diverged":
                told.append(f"Diverged on rank {record.get('rank')}: {record.get('reason')}")
            case "warning":
                told.append(f"Warning: {record.get('message')}")
    extra = len(told) - 8
    told = told[:8] + ([f"and {extra} more, below among the events"] if extra > 0 else [])
    if share(run.progress) < 1 and run.ended and run.total:
        told.insert(0, f"It ended at {100 * run.progress:.1f}% of the units that were planned.")
    return told
