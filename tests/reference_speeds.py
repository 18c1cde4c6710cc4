"""What speed a cluster's costs allow, written down plainly: what timing-only runs are held to."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace

from offbeat.virtual.cost import Costs

_WORD = 64
"""Bytes of the words that workers exchange beside a reduction, about."""


def bsp(costs: Costs, buckets: Sequence[float], shares: Sequence[float], steps: int = 100) -> float:
    """Steps of all workers together per second: `steps` of them, one after the other.

    buckets: bytes of each, in the order in which they leave. shares: of backward that has passed when each is
    full (`offbeat.virtual.cost.ready`)."""
    members, now = tuple(range(costs.workers)), 0.0
    points = [1 - costs.backward * (1 - share) for share in shares]
    update = max(map(costs.update, members))
    for _ in range(steps):
        slowest = max(costs.unit(rank, now) for rank in members)
        landed = now
        for size, point in zip(buckets, points, strict=True):
            begun = max(landed, now + slowest * point)
            landed = begun + costs.allreduce(size, members, begun)
        end = now + slowest
        now = max(landed, end + costs.gather(_WORD, members, end)) + update
    return steps / now


def asp(costs: Costs, gradient: float, parameters: float, rounds: int = 100) -> float:
    """Pushes of all workers together per second, in the later half of `rounds` pushes of each.

    gradient, parameters: bytes of a push and of a pull."""
    traffic = costs.traffic()
    events = [(costs.unit(rank, 0.0), rank, True) for rank in range(costs.workers)]
    heapify(events)
    total, pushes, since = rounds * costs.workers, 0, 0.0
    while pushes < total:
        at, rank, computed = events[0]
        if computed:
            heapreplace(events, (traffic.push(rank, gradient, at), rank, False))
            continue
        pushes += 1
        if pushes == total // 2:
            since = at
        _, arrived = traffic.pull(rank, parameters, at)
        heapreplace(events, (arrived + costs.unit(rank, arrived), rank, True))
    return (total - total // 2) / (at - since)
