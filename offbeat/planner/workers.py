"""A cluster in its steady states, as closed forms see it: which workers are how fast, and what joins them.

Events at random (`[[stragglers]] every = …`) put the cluster into one of several states; each lasts a share
of the time. Events at fixed moments that pass, deaths and newcomers are no steady state: they are left out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import exp, inf

from offbeat.planner.spread import Spread, spread_of
from offbeat.virtual.cluster import Cluster, Compute, Straggler
from offbeat.virtual.cost import Costs


@dataclass(frozen=True)
class Kind:
    """Workers that are alike. unit: of a mini-batch's forward and backward. update: seconds of an optimizer's
    step."""

    ranks: tuple[int, ...]
    unit: Spread
    update: float

    @property
    def count(self) -> int:
        return len(self.ranks)

    @property
    def mean(self) -> float:
        """Mean seconds of a unit."""
        return self.unit.mean


class Workers:
    """A cluster of known size in one state, in which every straggler is one for good."""

    def __init__(self, cluster: Cluster):
        self.cluster, self.costs = cluster, Costs(cluster, 0)
        self.count = self.costs.workers
        self.members = tuple(range(self.count))
        self._groups = [group for group in cluster.groups for _ in range(group.count or 0)]
        slow, found = self._slow(), dict[tuple[Compute, float, float, float], list[int]]()
        for rank, group in enumerate(self._groups):
            found.setdefault((group.compute, group.slow, slow[rank], group.link.rate), []).append(rank)
        self.kinds = [
            Kind(tuple(ranks), spread_of(compute).slower(group * hit), compute.update * group)
            for (compute, group, hit, _), ranks in found.items()
        ]

    def _slow(self) -> list[float]:
        slow = [1.0] * self.count
        for event in self.cluster.stragglers:
            for rank in event.workers:
                slow[rank] = max(slow[rank], event.slow)
        return slow

    @cached_property
    def speed(self) -> float:
        """Units per second that all workers do together if each works for itself."""
        return sum(kind.count / (kind.mean + kind.update) for kind in self.kinds)

    def fresh(self) -> Costs:
        """Costs that nobody has drawn from."""
        return Costs(self.cluster, 0)

    @property
    def per_host(self) -> float:
        """Workers of a host, on average."""
        return self.count / self.costs.hosts

    def rate_of(self, rank: int) -> float:
        """Bytes per second of the worker's NIC."""
        return self._groups[rank].link.rate

    @property
    def constant(self) -> bool:
        """Whether a worker's units all take the same time."""
        return all(kind.unit.constant for kind in self.kinds)

    @property
    def alike(self) -> bool:
        return len(self.kinds) == 1

    @cached_property
    def unit(self) -> float:
        """Mean seconds of a unit."""
        return sum(kind.count * kind.mean for kind in self.kinds) / self.count

    @cached_property
    def update(self) -> float:
        """Mean seconds of an optimizer's step."""
        return sum(kind.count * kind.update for kind in self.kinds) / self.count

    def allreduce(self, size: float) -> float:
        return self.costs.allreduce(size, self.members, 1.0) if self.count > 1 else 0.0

    def gather(self, size: float) -> float:
        return self.costs.gather(size, self.members, 1.0) if self.count > 1 else 0.0


def states(cluster: Cluster) -> list[tuple[float, Workers]]:
    """The cluster's states, each with the share of the time that it lasts.

    A Poisson process of events `every` seconds that last `seconds` each hits somebody for a share 1 −
    e^(−seconds/every) of the time (M/D/∞). Two processes at once count as the first alone."""
    lasting = tuple(replace(s, at=(0.0,)) for s in cluster.stragglers if _lasts(s))
    calm = replace(cluster, stragglers=lasting, failures=(), joins=())
    found, left = [], 1.0
    for event in cluster.stragglers:
        if event.every is not None:
            share = left * (1 - exp(-event.seconds / event.every))
            left -= share
            assert cluster.size is not None
            hit = tuple(range(cluster.size - event.count, cluster.size))
            now = replace(event, every=None, workers=hit, at=(0.0,), seconds=inf)
            found.append((share, Workers(replace(calm, stragglers=(*lasting, now)))))
    return [(left, Workers(calm)), *found]


def left_out(cluster: Cluster) -> str:
    """Which of a cluster's events no steady state knows; "" if there are none."""
    names = [
        f"{count} {name}{'' if count == 1 else 's'}"
        for count, name in (
            (sum(s.every is None and not _lasts(s) for s in cluster.stragglers), "straggler that passes"),
            (len(cluster.failures), "failure"),
            (cluster.newcomers, "newcomer"),
        )
        if count
    ]
    return ", ".join(names)


def _lasts(event: Straggler) -> bool:
    return event.every is None and event.seconds == inf


def scaled(cluster: Cluster, factor: float) -> Cluster:
    """The same with units that take `factor` times as long."""
    groups = []
    for group in cluster.groups:
        its = group.compute
        samples = tuple(seconds * factor for seconds in its.samples)
        groups.append(replace(group, compute=replace(its, unit=its.unit * factor, samples=samples)))
    return replace(cluster, groups=tuple(groups))
