"""When which worker is slow: the fixed and the random straggler events of a cluster."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from math import inf

import numpy

from offbeat.virtual.cluster import Straggler

Hit = tuple[float, float, int, float, float]
"""Begin, end, worker, how many times slower, seconds of latency."""


class Stragglers:
    """The events of `workers` workers. Where several hit a worker at once, the largest slowness and the
    largest latency count. Random ones are drawn as far as somebody asks, and don't depend on who asks."""

    def __init__(self, events: Iterable[Straggler], workers: int, seed: int):
        self._workers = workers
        self._hits: list[Hit] = []
        self._random: list[tuple[Straggler, float, numpy.random.Generator]] = []
        self._next: list[float] = []
        for number, event in enumerate(events):
            if event.every is None:
                self._hits += [hit for at in event.at for hit in _hits(event, event.workers, at)]
            else:
                rng = numpy.random.default_rng((seed, 1, number))
                self._random.append((event, event.every, rng))
                self._next.append(rng.exponential(event.every))
        self._horizon = inf
        if self._random:
            self._horizon = max(every for _, every, _ in self._random)
            self._draw()
        self._arrange()

    def stretch(self, rank: int, at: float, seconds: float) -> float:
        """How long work takes that is begun at `at` and would take `seconds` on a healthy worker."""
        if at + seconds > self._horizon:
            self._reach(at + seconds)
        found = self._slow.get(rank)
        if found is None:
            return seconds
        bounds, slows = found
        now, index = at, bisect_right(bounds, at)
        while True:
            slow = slows[index]
            end = bounds[index] if index < len(bounds) else inf
            stop = now + seconds * slow
            if min(stop, end) > self._horizon:  # what is drawn now may begin before
                self._reach(min(stop, end))
                return now - at + self.stretch(rank, now, seconds)
            if stop <= end:
                return stop - at
            seconds -= (end - now) / slow
            now, index = end, index + 1

    def delay(self, rank: int, at: float) -> float:
        """The worker's added latency, in seconds."""
        return self.delays(at).get(rank, 0.0)

    def delays(self, at: float) -> dict[int, float]:
        """Of all workers that have one."""
        if at > self._horizon:
            self._reach(at)
        return self._late[bisect_right(self._bounds, at)]

    def _reach(self, until: float) -> None:
        while self._horizon < until:
            self._horizon *= 2
        self._draw()
        self._arrange()

    def _draw(self) -> None:
        for number, (event, every, rng) in enumerate(self._random):
            while self._next[number] <= self._horizon:
                who = rng.choice(self._workers, event.count, replace=False).tolist()
                self._hits += _hits(event, who, self._next[number])
                self._next[number] += rng.exponential(every)

    def _arrange(self) -> None:
        """Piecewise constant: after the i-th of some bounds the i + 1-th value holds."""
        by_rank: dict[int, list[Hit]] = {}
        for hit in self._hits:
            if hit[3] > 1:
                by_rank.setdefault(hit[2], []).append(hit)
        self._slow = {}
        for rank, hits in by_rank.items():
            bounds, active = _pieces(hits)
            self._slow[rank] = bounds, [max((hit[3] for hit in now), default=1.0) for now in active]
        self._bounds, active = _pieces([hit for hit in self._hits if hit[4]])
        self._late: list[dict[int, float]] = []
        for now in active:
            row: dict[int, float] = {}
            for hit in now:
                row[hit[2]] = max(row.get(hit[2], 0.0), hit[4])
            self._late.append(row)


def _hits(event: Straggler, workers: Iterable[int], at: float) -> list[Hit]:
    return [(at, at + event.seconds, worker, event.slow, event.latency) for worker in workers]


def _pieces(hits: list[Hit]) -> tuple[list[float], list[list[Hit]]]:
    """The moments at which something begins or ends, and what is under way before, between and after."""
    changes = sorted({hit[0] for hit in hits} | {hit[1] for hit in hits if hit[1] < inf})
    active: list[list[Hit]] = [[]]
    begins = sorted(hits)
    index, now = 0, list[Hit]()
    for moment in changes:
        now = [hit for hit in now if hit[1] > moment]
        while index < len(begins) and begins[index][0] <= moment:
            now.append(begins[index])
            index += 1
        active.append(now)
    return changes, active
