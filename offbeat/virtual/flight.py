"""All-reduces of one group that are under way at the same time.

The gradients' gloo group has four threads, so four of BSP's buckets travel at once: their latencies overlap,
and their bytes share the link. NCCL runs a group's collectives in order, on one stream.

Alone, an all-reduce takes T seconds, and keeps the slowest link busy for B of them; the rest are latencies
and fixed costs. Beside others, it goes on at 1/f of its speed, with u = B/T and U the sum of all that are
under way:

    f = (1 − q)·max(1, U) + q·(1 + U − u)

In the first round of a ring's reduce-scatter and of its all-gather all have to send at once, and nobody's
bytes can travel in another's latency: q, 2 of 2(n−1) rounds. In the other rounds they do, and only a full
link slows anybody. `benchmarks/flight.py` holds it to gloo: within 4 % for two at once, 9 % for four.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from typing import Any, Protocol

Cost = Callable[[float], tuple[float, float]]
"""T and B of a collective that begins at a moment."""


class Reductions(Protocol):
    """What has to be known of a cluster (`offbeat.virtual.cost.Costs`)."""

    @property
    def in_flight(self) -> int: ...

    def lockstep(self, members: Sequence[int]) -> float: ...

    def allreduce(self, size: float, members: Sequence[int], at: float) -> float: ...


class Flight:
    """Collectives of one group, at most `most` at a time and begun in order. lockstep: q.

    landed: what has landed and when, for the caller to take away."""

    __slots__ = ("_flying", "_most", "_now", "_q", "_slow", "_waiting", "landed")

    def __init__(self, most: int, lockstep: float):
        self._most, self._q = most, lockstep
        self._waiting: deque[tuple[float, Cost, Any]] = deque()
        self._flying: list[tuple[float, float, Any]] = []  # seconds left if alone, u, what
        self._slow: list[float] = []  # f of each
        self._now = 0.0  # when those under way were last others
        self.landed: list[tuple[float, Any]] = []

    def add(self, at: float, cost: Cost, what: Any = None) -> None:
        """One more is ready at `at`, which is not before the last one."""
        self.run(at)
        self._waiting.append((at, cost, what))
        self._begin()

    def next(self) -> float:
        """When the next one lands, if no other is added; infinity where none is under way."""
        return self._now + min(self._lasting(), default=inf)

    def _lasting(self) -> list[float]:
        """Seconds that each still needs beside the others."""
        return [left * slow for (left, _, _), slow in zip(self._flying, self._slow, strict=True)]

    def run(self, until: float) -> None:
        """Lets all land that land up to `until`."""
        while (then := self.next()) <= until:
            if then == inf:
                return
            lasting = self._lasting()
            index = lasting.index(min(lasting))
            self._move(then)
            self.landed.append((then, self._flying.pop(index)[2]))
            self._begin()

    def over(self) -> float:
        """Lets all land. Returns when the last one does (0: there was none)."""
        self.run(inf)
        return self.landed[-1][0] if self.landed else 0.0

    def _move(self, to: float) -> None:
        passed, self._now = to - self._now, to
        self._flying = [
            (max(left - passed / slow, 0.0), busy, what)
            for (left, busy, what), slow in zip(self._flying, self._slow, strict=True)
        ]

    def _begin(self) -> None:
        while self._waiting and len(self._flying) < self._most:
            at, cost, what = self._waiting.popleft()
            if at > self._now:
                self._move(at)
            seconds, busy = cost(self._now)
            self._flying.append((seconds, busy / seconds if seconds else 0.0, what))
        q, whole = self._q, sum(busy for _, busy, _ in self._flying)
        self._slow = [(1 - q) * max(1.0, whole) + q * (1 + whole - busy) for _, busy, _ in self._flying]


def reductions(
    costs: Reductions, sizes: Sequence[float], ready: Sequence[float], members: Sequence[int]
) -> float:
    """When the last of some all-reduces has landed. sizes: bytes of each. ready: when all members have come
    to it, never before the last one."""
    landed = full = 0.0
    if costs.in_flight == 1:
        for size, at in zip(sizes, ready, strict=True):
            begun = max(at, landed)
            landed = begun + costs.allreduce(size, members, begun)
        return landed
    flight = Flight(costs.in_flight, costs.lockstep(members))
    for size, at in zip(sizes, ready, strict=True):
        full = max(full, at)
        flight.add(full, cost(costs, size, members))
    return flight.over()


def cost(costs: Reductions, size: float, members: Sequence[int]) -> Cost:
    """An all-reduce's T and B: without bytes only latencies and fixed costs are left."""

    def known(at: float) -> tuple[float, float]:
        seconds = costs.allreduce(size, members, at)
        return seconds, seconds - costs.allreduce(0.0, members, at)

    return known
