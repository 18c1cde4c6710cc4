"""From what was measured to what a cluster's description says: α–β fits and groups of workers. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from statistics import fmean, median, median_low
from typing import NamedTuple

ALIKE = 0.1
"""Workers whose median units differ by less from the others' median are of one kind."""
KEPT = 120
"""Units of the distribution that are written down."""


class Point(NamedTuple):
    """An all-reduce: bytes and seconds."""

    size: int
    seconds: float


class Line(NamedTuple):
    """seconds = fixed + size · per_byte."""

    fixed: float
    per_byte: float


def line(points: Sequence[Point]) -> Line:
    """The α–β line through times by bytes: the median slope between any two, and the median of what is left
    over, which single outliers don't move (Theil and Sen)."""
    slopes = [
        (b.seconds - a.seconds) / (b.size - a.size) for a, b in combinations(points, 2) if b.size > a.size
    ]
    slope = max(median(slopes), 1e-15) if slopes else 1e-15
    return Line(median(p.seconds - slope * p.size for p in points), slope)


@dataclass(frozen=True)
class Kind:
    """`count` workers in the order of the ranks (None: the rest), `slow` times slower."""

    count: int | None
    slow: float


@dataclass(frozen=True)
class Fit:
    """What was measured, in seconds. nodes: each rank's host. units: each rank's. inside, between: one way
    of a small message, within a host and between hosts. points: all-reduces. push, pull: of the whole model,
    with nobody else there."""

    nodes: Sequence[int]
    units: Sequence[Sequence[float]]
    update: float
    backward: float
    inside: float | None
    between: float | None
    points: Sequence[Point]
    push: float | None
    pull: float | None

    @property
    def workers(self) -> int:
        return len(self.units)

    @property
    def hosts(self) -> int:
        return len(set(self.nodes))

    @property
    def per_host(self) -> int:
        return max(self.nodes.count(node) for node in set(self.nodes))

    @property
    def medians(self) -> list[float]:
        """Of each rank's units."""
        return [median(row) for row in self.units]

    @property
    def rate(self) -> float | None:
        """β of the slowest link of a ring: an all-reduce sends 2(n−1)/n of its bytes over each."""
        if len(self.points) < 2:
            return None
        return 2 * (self.workers - 1) / self.workers / line(self.points).per_byte

    @property
    def overhead(self) -> float:
        """Seconds of an all-reduce beside what the links take; none where a shaped link lets some bytes pass
        at once, so that less than its latency is left over."""
        if len(self.points) < 2:
            return 0.0
        way = self.between if self.between is not None else self.inside or 0.0
        ring = [self.inside or 0.0] * (self.workers - self.hosts) + [way] * self.hosts
        whole = 2 * (self.workers - 1) / self.workers * sum(ring) if self.hosts > 1 else 0.0
        if self.hosts == 1:
            whole = 2 * (self.workers - 1) * (self.inside or 0.0)
        return max(line(self.points).fixed - whole, 0.0)

    def kinds(self) -> list[Kind]:
        """Neighbouring ranks that are alike; the largest group of usual workers is the rest."""
        rows: list[Kind] = []
        for slow in self.slow:
            if rows and rows[-1].slow == slow:
                rows[-1] = Kind((rows[-1].count or 0) + 1, slow)
            else:
                rows.append(Kind(1, slow))
        plain = [row for row in rows if row.slow == 1]
        rest = max(plain or rows, key=lambda row: row.count or 0)
        return [Kind(None, row.slow) if row is rest else row for row in rows]

    @property
    def slow(self) -> list[float]:
        """How many times slower than usual each rank is. A description has no hosts with workers of two
        kinds: where there are such, all count as alike, and their differences are in the distribution."""
        usual = median_low(self.medians)
        found = [its / usual for its in self.medians]
        found = [1.0 if abs(slow - 1) < ALIKE else round(slow, 3) for slow in found]
        kinds: dict[int, set[float]] = {}
        for node, slow in zip(self.nodes, found, strict=True):
            kinds.setdefault(node, set()).add(slow)
        return [1.0] * self.workers if any(len(its) > 1 for its in kinds.values()) else found

    def samples(self) -> list[float]:
        """Units of the usual workers, each worker's scaled by its slowness: the distribution's."""
        rows = zip(self.units, self.slow, strict=True)
        return _thinned([seconds / slow for row, slow in rows for seconds in row])


def _thinned(values: Sequence[float]) -> list[float]:
    """At most `KEPT` values of the same distribution and mean: means of equal parts of the sorted ones."""
    ordered = sorted(values)
    if len(ordered) <= KEPT:
        return ordered
    ends = [len(ordered) * i // KEPT for i in range(KEPT + 1)]
    kept = [fmean(ordered[a:b]) for a, b in pairwise(ends)]
    scale = fmean(ordered) / fmean(kept)
    return [value * scale for value in kept]
