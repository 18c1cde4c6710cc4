"""How long everything takes on a virtual cluster: the one model behind both virtual engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy

from offbeat.virtual.cluster import Cluster, Compute
from offbeat.virtual.collectives import NOWHERE, Layout
from offbeat.virtual.queues import Queued
from offbeat.virtual.sharing import WORKERS, Shared
from offbeat.virtual.stragglers import Stragglers
from offbeat.virtual.traffic import Host, Hosts, Traffic

_BLOCK = 256
"""Samples of one worker that are drawn at a time."""


class Costs:
    """The costs of a run on `cluster`, which knows its size (`Cluster.sized`); the draws are `seed`'s.

    workers: how many there are in the beginning. room: with those that come later, which are like the last
    group's, each on a host of its own. hosts: of all. host_of: each rank's host. backward: share of a unit.
    in_flight: how many of BSP's all-reduces may be under way at a time.
    failures, joins: in their order. switch, membership: seconds of each switch of protocols, of each
    change of members.

    Nothing depends on the order in which different ranks' costs are asked for, except `traffic`. Times are
    in seconds, sizes in bytes.
    """

    def __init__(self, cluster: Cluster, seed: int):
        cluster = cluster.sized()
        assert cluster.size is not None
        self.cluster, self.seed, self.workers = cluster, seed % 2**64, cluster.size
        self.backward, self.switch, self.membership = cluster.backward, cluster.switch, cluster.membership
        self.failures = sorted(cluster.failures, key=lambda failure: (failure.at, failure.worker))
        self.joins = sorted(cluster.joins, key=lambda join: join.at)
        self.room = self.workers + cluster.newcomers
        self.host_of: list[int] = []
        self._nics: list[tuple[float, float]] = []
        self._bursts: list[float] = []
        self._inside = (cluster.host.rate, cluster.host.latency)
        self._computes: list[tuple[Compute, float]] = []
        for group in cluster.groups:
            for index in range(group.count or 0):
                if index % (group.per_host or group.count or 1) == 0:
                    self._nics.append((group.link.rate, group.link.latency))
                    self._bursts.append(group.link.burst)
                self.host_of.append(len(self._nics) - 1)
                self._computes.append((group.compute, group.slow))
        last = cluster.groups[-1]
        for _ in range(cluster.newcomers):
            self._nics.append((last.link.rate, last.link.latency))
            self._bursts.append(last.link.burst)
            self.host_of.append(len(self._nics) - 1)
            self._computes.append((last.compute, last.slow))
        self.hosts = len(self._nics)
        self._updates = [compute.update * slow for compute, slow in self._computes]
        self._constants = [
            compute.unit * slow if compute.kind == "constant" else None for compute, slow in self._computes
        ]
        self._rngs: list[numpy.random.Generator | None] = [None] * self.room
        self._samples: list[list[float]] = [[] for _ in range(self.room)]
        self._stragglers = Stragglers(cluster.stragglers, self.room, self.seed)
        self._slow = any(straggler.slow > 1 for straggler in cluster.stragglers)
        self._late = any(straggler.latency for straggler in cluster.stragglers)
        self._allreduce, self.in_flight = cluster.allreduce, cluster.allreduce.in_flight
        self._layouts: dict[tuple[int, ...], tuple[Layout, dict[tuple[str, float], float]]] = {}
        self._members: Sequence[int] = ()
        self._known: dict[tuple[str, float], float] = {}
        self._layout = NOWHERE

    def unit(self, rank: int, at: float) -> float:
        """Seconds of the worker's next unit, forward and backward, if it begins at `at`: the next draw of
        this rank's own stream. A straggler's slowness counts from the moment it begins to the moment it
        ends."""
        seconds = self._constants[rank]
        if seconds is None:
            samples = self._samples[rank]
            seconds = samples.pop() if samples else self._draw(rank)
        return self._stragglers.stretch(rank, at, seconds) if self._slow else seconds

    def _draw(self, rank: int) -> float:
        rng = self._rngs[rank]
        if rng is None:
            rng = self._rngs[rank] = numpy.random.default_rng((self.seed, 0, rank))
        compute, slow = self._computes[rank]
        if compute.kind == "lognormal":
            drawn = compute.unit * numpy.exp(
                compute.sigma * rng.standard_normal(_BLOCK) - compute.sigma**2 / 2
            )
        else:
            drawn = rng.choice(compute.samples, _BLOCK)
        self._samples[rank] = samples = (drawn[::-1] * slow).tolist()
        return samples.pop()

    def update(self, rank: int) -> float:
        """Seconds of the optimizer's step."""
        return self._updates[rank]

    def delay(self, rank: int, at: float) -> float:
        """Seconds that a straggler's exchanges take longer at `at`. All below, and `traffic`, contain it."""
        return self._stragglers.delay(rank, at) if self._late else 0.0

    def allreduce(self, size: float, members: Sequence[int], at: float) -> float:
        """Seconds from the moment `at` at which the last of `members` (ascending) has begun."""
        return self._collective(self.cluster.allreduce.algorithm, size, members, at)

    def lockstep(self, members: Sequence[int]) -> float:
        """Share of an all-reduce's rounds in which all that are under way have to send at once
        (`offbeat.virtual.flight`). For other algorithms than a ring nobody has measured it: all."""
        return 1 / max(len(members) - 1, 1) if self._allreduce.algorithm == "ring" else 1.0

    def broadcast(self, size: float, members: Sequence[int], at: float) -> float:
        """Seconds until all have one member's `size` bytes."""
        return self._collective("broadcast", size, members, at)

    def gather(self, size: float, members: Sequence[int], at: float) -> float:
        """Seconds until all have everybody's `size` bytes."""
        return self._collective("gather", size, members, at)

    def message(self, size: float, sender: int, receiver: int, at: float) -> float:
        """Seconds of one message between two workers, with nothing else on the way."""
        here, there = self.host_of[sender], self.host_of[receiver]
        rate, latency = self._inside
        if here != there:
            (rate, latency), (other_rate, other_latency) = self._nics[here], self._nics[there]
            rate, latency = min(rate, other_rate), (latency + other_latency) / 2
        return latency + size / rate + self.delay(sender, at)

    def _collective(self, kind: str, size: float, members: Sequence[int], at: float) -> float:
        # A tuple doesn't change: the same one needs no second look.
        if members is not self._members or type(members) is not tuple:
            self._look_at(members)
        seconds = self._known.get((kind, size))
        if seconds is None:
            seconds = 0.0
            if self._layout.n > 1:
                form: Callable[[float], float] = getattr(self._layout, kind)
                seconds = form(size)
                if kind not in ("broadcast", "gather"):
                    seconds += self._allreduce.overhead + self._allreduce.per_member * self._layout.n
            self._known[kind, size] = seconds
        if self._late and self._layout.n > 1 and (delays := self._stragglers.delays(at)):
            hit = [delay for rank, delay in delays.items() if rank in members]
            rounds = None if kind in ("broadcast", "gather") else self._allreduce.rounds
            seconds += self._layout.late(kind, hit) if rounds is None else rounds * sum(hit)
        return seconds

    def _look_at(self, members: Sequence[int]) -> None:
        key = tuple(members)
        if key not in self._layouts:
            counts: dict[int, int] = {}
            for rank in key:
                counts[self.host_of[rank]] = counts.get(self.host_of[rank], 0) + 1
            layout = Layout(list(counts.values()), [self._nics[host] for host in counts], self._inside)
            self._layouts[key] = layout, {}
        self._members = members
        self._layout, self._known = self._layouts[key]

    def traffic(self) -> Traffic:
        """The traffic between workers and shards, with nothing under way."""
        hosts = Hosts(
            self.host_of,
            [Host(*nic, burst) for nic, burst in zip(self._nics, self._bursts, strict=True)],
            self.cluster.host,
            self.cluster.shards,
            self.delay if self._late else None,
        )
        few = self.hosts > 1 and self.workers <= WORKERS
        return Shared(hosts) if few else Queued(hosts)


def ready(sizes: Sequence[int], buckets: Sequence[int]) -> list[float]:
    """Share of backward that has passed when each of BSP's buckets is full. Backward meets the parameters
    in reverse order and each takes the same time, as nets are mostly built of layers that cost alike; so
    only their number counts.

    sizes: of the parameters. buckets: how many parameters are in each, the last parameters first."""
    return [full / len(sizes) for full in accumulate(buckets)]
