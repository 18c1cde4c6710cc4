"""Long series made short enough to draw, and what workers did between two looks at them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offbeat.report.history import History, Numbers, Pace

POINTS = 1500
"""Of a series of steps that are drawn, at most."""
MEANS = 100
"""Of a series: points of its smoothed line."""
FEW = 30
"""Points of a series that needs no smoothing."""
Indices = NDArray[np.intp]


@dataclass(frozen=True)
class Smooth:
    """Means over `size` neighbouring points; `at` are the means of the columns beside them."""

    at: dict[str, Numbers]
    mean: Numbers
    size: int


def extremes(values: Numbers, points: int = POINTS) -> Indices:
    """Which of a long series to draw: of every bucket its lowest and its highest, in their order, so that no
    peak is lost. The indices of all finite values where they are few enough."""
    known = np.flatnonzero(np.isfinite(values))
    if known.size <= points:
        return known
    chosen = []
    for bucket in np.array_split(known, points // 2):
        inside = values[bucket]
        chosen += sorted({bucket[int(inside.argmin())], bucket[int(inside.argmax())]})
    chosen = sorted({int(known[0]), *map(int, chosen), int(known[-1])})
    return np.array(chosen, dtype=np.intp)


def smooth(values: Numbers, columns: dict[str, Numbers], means: int = MEANS) -> Smooth | None:
    """Means of neighbours. None where there are so few points that a smoothed line would hide them."""
    known = np.flatnonzero(np.isfinite(values))
    if known.size < FEW:
        return None
    size = max(5, math.ceil(known.size / means))
    edges = np.arange(0, known.size, size)
    counts = np.diff([*edges, known.size])

    def mean(column: Numbers) -> Numbers:
        sums: Numbers = np.add.reduceat(column[known], edges)
        return sums / counts

    return Smooth({name: mean(column) for name, column in columns.items()}, mean(values), size)


@dataclass(frozen=True)
class Intervals:
    """What each worker did between two looks. Shapes [intervals, ranks], NaN where it was no member or
    nothing is known.

    computing, exchanging, waiting: shares of the worker's time, together 1. Journals tell computing from
    waiting; of the waiting, what even the member that waited least has is counted as the exchange itself
    (docs/stragglers.md reckons in the same way). units: done per second. own: units per second of
    computing."""

    begin: Numbers
    end: Numbers
    ranks: list[int]
    computing: Numbers
    exchanging: Numbers
    waiting: Numbers
    units: Numbers
    samples: Numbers
    own: Numbers


def intervals(history: History, most: int = 400, steps: float = 5.0) -> Intervals | None:
    """Between at most so many looks, and such that the median worker takes about so many steps in each, as
    fewer make shares and speeds jump. None where the journal has none."""
    pace = history.pace
    if not pace.ranks:
        return None
    bounds = np.concatenate([[0.0], pace.times[_looks(pace, most, steps)]])
    begin, end = bounds[:-1], bounds[1:]
    spans = np.maximum(end - begin, 0.0)
    grown = np.stack([_grown(history, column, bounds) for column in range(len(pace.ranks))], axis=-1)
    units, samples, busy, wait = np.maximum(grown, 0.0)
    for column, rank in enumerate(pace.ranks):
        for since, until, _ in history.absences.get(rank, []):
            gone = (begin >= since - 0.5 * spans) & (end <= until + 0.5 * spans)
            for one in (busy, wait, units, samples):
                one[gone, column] = math.nan
    with np.errstate(divide="ignore", invalid="ignore"):
        spent = busy + wait
        spent[spent <= 0] = math.nan
        away = wait / spent
        least = np.min(np.where(np.isfinite(away), away, math.inf), axis=1, keepdims=True)
        exchanging = np.where(np.isfinite(away), np.minimum(least, away), math.nan)
        own = np.where(busy > 0, units / busy, math.nan)
        rates, samples = units / spans[:, None], samples / spans[:, None]
    use = end > begin
    columns = (1 - away, exchanging, away - exchanging, rates, samples, own)
    return Intervals(begin[use], end[use], pace.ranks, *(column[use] for column in columns))


def _looks(pace: Pace, most: int, steps: float) -> Indices:
    """Which looks bound the intervals."""
    done = np.nan_to_num(pace.units[-1])
    fit = math.ceil(float(np.median(done)) / steps) if steps else most
    count = max(min(len(pace.times), most, fit), min(len(pace.times), 8))
    keep = np.unique(np.linspace(0, len(pace.times) - 1, count + 1).round().astype(int)[1:])
    gaps = np.diff(pace.times[keep], prepend=0.0)
    if keep.size > 2 and gaps[-1] < 0.5 * np.median(gaps):  # the end comes soon after the last look
        keep = np.delete(keep, -2)
    return keep


def _grown(history: History, column: int, bounds: Numbers) -> Numbers:
    """What a rank's sums grew by in each interval; shape [4, intervals].

    A look may show a worker's figures as they were at an earlier one; between those that are fresh its work
    is taken to be even."""
    pace = history.pace
    rank = pace.ranks[column]
    sums = np.stack([one[:, column] for one in (pace.units, pace.samples, pace.busy, pace.wait)])
    spent = np.nan_to_num(sums[2] + sums[3])
    fresh = np.flatnonzero(np.diff(np.maximum.accumulate(spent), prepend=0.0) > 0)
    times, values = pace.times[fresh], sums[:, fresh]
    gone = history.absences.get(rank, [])
    came = gone[0][1] if gone and gone[0][0] == 0 else 0.0
    knots = [(came, np.zeros(4))] if not times.size or times[0] > came else []
    for since, until, _ in gone:
        if not np.any((times > since) & (times < until)):  # nothing was told meanwhile, so nothing was done
            before = values[:, times <= since]
            held = before[:, -1] if before.size else np.zeros(4)
            knots += [(since, held), (until, held)]
    at = np.concatenate([times, [t for t, _ in knots]])
    order = np.argsort(at, kind="stable")
    table = np.concatenate([values, *(value[:, None] for _, value in knots)], axis=1)[:, order]
    return np.stack([np.diff(np.interp(bounds, at[order], row)) for row in table])
