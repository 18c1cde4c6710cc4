"""ASP in closed form: a closed network of queues.

A worker computes for t_p (the shards step, not it), pushes and pulls for R, and begins again; X units per
second are done by all. R grows with what the others send. Symbols: H hosts, p workers on each; S bytes; β
rate of a NIC; C a worker's cycle, t_p + R; s seconds in which a host's shards apply a push; D = (H−1)/H · S/β
seconds of a transfer alone on its NIC.

- Shards apply one push after the other, an M/D/1 queue: W = s·ρ / (2·(1 − ρ)), ρ = s·X of the others.
- A NIC is shared. In a push's direction go the pushes of the same host's workers, and others' pulls from its
  shards: T_push = D·(1 + (p−1)·T_push/C + p·T_pull/C) (mean value analysis, with Schweitzer's approximation
  of the others' load). A pull likewise.

That holds while shards and NICs have time to spare (`LIGHT`). Beyond it, and at SSP's bounds, who meets whom
depends on everybody's phase, which no mean knows: there the steps are followed in the virtual cluster
(`offbeat.virtual.timing`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING

import numpy

from offbeat.planner.spread import Array

if TYPE_CHECKING:
    from offbeat.planner.workers import Workers
    from offbeat.virtual.model import Model

LIGHT = 0.3
"""Up to this share of the time NICs and shards may be busy where the closed form holds."""
_ROUNDS = 100
"""Of the fixed point."""


@dataclass(frozen=True)
class Exchange:
    """A kind's push and pull, in seconds. alone: with nobody else there. push, pull: on the worker's NIC.
    service: at the shards."""

    alone: float
    push: float
    pull: float
    service: float


class Queues:
    """Workers that push to shards and pull from them. wire: bytes of a gradient by the parameters' own."""

    def __init__(self, workers: Workers, model: Model, wire: float):
        self._workers, kinds = workers, workers.kinds
        self._counts = numpy.array([float(kind.count) for kind in kinds])
        self._own = numpy.array([kind.mean for kind in kinds])
        found = [self._exchange(kind.ranks[0], model, wire) for kind in kinds]
        self._alone, self._push, self._pull, self._service = (
            numpy.array([getattr(one, name) for one in found])
            for name in ("alone", "push", "pull", "service")
        )

    @property
    def alone(self) -> float:
        """Seconds of a unit's exchange with nobody else there."""
        return float(self.shares @ self._alone)

    @cached_property
    def shares(self) -> Array:
        """Of the units that each kind of worker does."""
        speeds = self._counts / (self._own + self._waits)
        return speeds / speeds.sum()

    @property
    def busy(self) -> float:
        """Share of the time that the busiest of NICs and shards would be, if nobody waited."""
        return float((self._needs / (self._own + self._alone)).max())

    @property
    def seconds(self) -> float:
        """In which all workers together do one unit each."""
        return self._workers.count / self._speed(self._own + self._waits)

    @property
    def _needs(self) -> Array:
        """Seconds of each worker's cycle that its NIC and the shards need, at least."""
        n, p = self._workers.count, self._workers.per_host
        return numpy.maximum(n * self._service, p * (self._push + self._pull))

    def _speed(self, cycle: Array) -> float:
        return float((self._counts / cycle).sum())

    def _exchange(self, rank: int, model: Model, wire: float) -> Exchange:
        """By the virtual cluster's own traffic."""
        costs, cluster = self._workers.costs, self._workers.cluster
        pushed, pulled = model.size * wire, float(model.size)
        traffic = costs.traffic()
        _, arrived = traffic.pull(rank, pulled, traffic.push(rank, pushed, 0.0))
        service = cluster.shards.overhead + pushed / costs.hosts / cluster.shards.apply
        rate = inf if costs.hosts == 1 else self._workers.rate_of(rank)
        away = (costs.hosts - 1) / costs.hosts / rate
        return Exchange(arrived, away * pushed, away * pulled, service)

    @cached_property
    def _waits(self) -> Array:
        """R of each kind."""
        workers, push, pull = self._workers, self._push, self._pull
        if workers.constant and workers.alike:  # they fall into step and do not meet
            return self._alone
        p, found = workers.per_host, self._alone
        sent, taken = push.copy(), pull.copy()
        for _ in range(_ROUNDS):
            cycle = self._own + found
            speed = self._speed(cycle)
            rho = numpy.minimum((speed - 1 / cycle) * self._service, 0.9)
            queued = self._service * rho / (2 * (1 - rho))
            share = self._counts / workers.count / cycle
            sending, taking = float(share @ sent), float(share @ taken)
            sent = push * (1 + (p - 1) * sending + p * taking)
            taken = pull * (1 + (p - 1) * taking + p * sending)
            # A push is in the shards' queue while others' are on the NICs: the longer of the two counts.
            longer = numpy.maximum(sent - push, queued) + taken - pull
            found = (found + self._alone + longer) / 2
        return found
