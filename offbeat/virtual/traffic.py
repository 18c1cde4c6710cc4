"""The traffic between workers and shards (ASP, SSP).

The parameters are cut over the H hosts in equal slices. A worker reaches its own host's slice by memory,
the others over both hosts' NICs: a push is a stream from the worker's host to each other host, a pull the
reverse. A NIC moves both directions at once. A host's shards apply one push after the other.

`offbeat.virtual.sharing` follows every stream, for few workers; `offbeat.virtual.queues` costs the same
for any number of hosts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

from offbeat.cluster import sizes
from offbeat.virtual.cluster import Link, ShardService

Delay = Callable[[int, float], float]
"""Seconds that a rank's exchanges take longer at a moment."""


class Host(NamedTuple):
    """A host's NIC: bytes per second in each direction, seconds one way, and seconds whose bytes pass at once
    after a pause."""

    rate: float
    latency: float
    burst: float = 0.0


class Hosts:
    """What both ways of reckoning know. host_of: each rank's host. nics: each host's. inside: the way to the
    shards of a worker's own host. delay: None where there are no stragglers with a latency."""

    def __init__(
        self,
        host_of: Sequence[int],
        nics: Sequence[Host],
        inside: Link,
        shards: ShardService,
        delay: Delay | None = None,
    ):
        self.host_of, self.nics, self.inside, self.shards = host_of, nics, inside, shards
        self.delay, self.number = delay, len(nics)
        longest = max(nic.latency for nic in nics)
        self.latency = [(nic.latency + longest) / 2 if self.number > 1 else inside.latency for nic in nics]

    def service(self, size: float) -> float:
        """Seconds that each host's shards take for a push of `size` bytes in all."""
        return self.shards.overhead + size / self.number / self.shards.apply

    def share(self, size: float) -> float:
        """Of a pull that can follow its push shard by shard: all but the last shard's part."""
        return 1 - 1 / sizes.shards(size, self.number)


class Traffic(ABC):
    """Pushes and pulls of all workers, sizes in bytes of the whole. All calls come in non-decreasing `at`."""

    @abstractmethod
    def push(self, rank: int, size: float, at: float) -> float:
        """When a gradient that is sent at `at` has been applied by the last of the shards."""

    @abstractmethod
    def pull(self, rank: int, size: float, at: float) -> tuple[float, float]:
        """When the shards read their parameters for it, and when all have arrived at the worker.

        A pull is asked for right behind the worker's push: where one has gone before, its request is at the
        shards already, and each shard answers as soon as it has applied its part."""
