"""The traffic between workers and shards at a cost that doesn't grow with the cluster.

A transfer is a burst of H−1 slices through its worker's NIC, and a slice through each other host's. Each NIC
direction carries both: bursts of its own workers, which are few and large, and slices of everybody, which
are many and small, and flow evenly. So

- bursts queue at their host, and the slices leave them 1 − ρ of the rate, where ρ is the share that slices
  took lately;
- slices queue likewise, one queue for all hosts with the same rate, since what comes to one of them comes to
  all, and bursts leave them 1 − ρ of the rate;
- a transfer joins its queues at the moment it is asked for, and is over when the slowest is through with it.

Streams share a link, they don't wait: a transfer delays those before it as long as they delay it, and those
have been told their end. So it is told twice its wait. Then the mean time of a transfer is that of an M/D/1
queue with processor sharing, 1 / (1 − ρ) times its time alone, ρ being all that the NIC carries.

The shards' queue is first come, first served: M/D/1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from offbeat.virtual.traffic import Hosts, Traffic

_WINDOW = 4.0
"""How many transfers' times alone a share is judged over."""
_MOST = 0.95


class Direction:
    """One direction of all hosts' NICs. Moments don't decrease from call to call.

    kinds: each host's kind, by its rate. window: seconds over which shares are judged."""

    def __init__(self, kinds: Sequence[int]):
        self._kinds = kinds
        number = max(kinds) + 1
        self._of_kind = [kinds.count(kind) for kind in range(number)]
        self._free = [0.0] * len(kinds)
        self._sliced = [0.0] * number
        self.window, self._since = 0.0, 0.0
        self._bursts, self._slices = [0.0] * number, [0.0] * number  # work since then
        self._by_bursts, self._by_slices = [1.0] * number, [1.0] * number  # 1 / (1 − ρ)

    def burst(self, host: int, at: float, seconds: float) -> float:
        """`seconds` of work for one host; when it is through."""
        if at - self._since > self.window:
            self._judge(at)
        kind = self._kinds[host]
        self._bursts[kind] += seconds
        seconds *= self._by_slices[kind]
        free = self._free[host]
        if free <= at:
            self._free[host] = at + seconds
            return at + seconds
        self._free[host] = free + seconds
        return free + free - at + seconds

    def slices(self, host: int, at: float, work: Sequence[float]) -> float:
        """A slice for every host but `host`, of `work[i]` seconds for one of kind i; when the last is
        through."""
        last = at
        for kind, seconds in enumerate(work):
            if kind == self._kinds[host]:  # which has one host less
                seconds *= 1 - 1 / self._of_kind[kind]
            self._slices[kind] += seconds
            seconds *= self._by_bursts[kind]
            free = self._sliced[kind]
            if free < at:
                free = at
            self._sliced[kind] = free + seconds
            if (over := free + free - at + seconds) > last:
                last = over
        return last

    def _judge(self, at: float) -> None:
        passed = at - self._since
        for shares, works, hosts in (
            (self._by_bursts, self._bursts, self._of_kind),
            (self._by_slices, self._slices, [1] * len(self._slices)),
        ):
            for kind, number in enumerate(hosts):
                before = 1 - 1 / shares[kind]
                share = min(_MOST, (before + works[kind] / number / passed) / 2)
                shares[kind] = 1 / (1 - share)
                works[kind] = 0.0
        self._since = at


class _Sizes(NamedTuple):
    """What transfers of one size take, in seconds. bursts: of each host's workers, on its NIC. alone: on the
    way of the whole, were nothing else there. slices: on the NIC of each kind of host. service: at a host's
    shards. share: of a transfer that the first of a host's shards need not wait for."""

    bursts: list[float]
    alone: list[float]
    slices: list[float]
    service: float
    share: float


class Queued(Traffic):
    """For any number of hosts and workers."""

    def __init__(self, hosts: Hosts):
        self._hosts, self._host_of, self._delay = hosts, hosts.host_of, hosts.delay
        found: dict[float, int] = {}
        kinds = [found.setdefault(nic.rate, len(found)) for nic in hosts.nics]
        self._rates, self._away, self._latency = list(found), hosts.number > 1, hosts.latency
        self._out, self._in = Direction(kinds), Direction(kinds)
        self._sizes: dict[float, _Sizes] = {}
        self._service = 0.0  # when the shards are free: they all get the same
        self._asked = [-1.0] * len(hosts.host_of)  # when the last push was applied, until a pull followed it
        self._early = [0.0] * len(hosts.host_of)

    def push(self, rank: int, size: float, at: float) -> float:
        host = self._host_of[rank]
        sizes = self._sizes.get(size) or self._of(size)
        free = self._service
        self._service = free = (free if free > at else at) + sizes.service
        applied = free + sizes.alone[host]
        if self._away:
            sent = self._out.burst(host, at, sizes.bursts[host])
            there = self._in.slices(host, at, sizes.slices)
            if there > sent:
                sent = there
            sent += self._latency[host] + sizes.service
            if sent > applied:
                applied = sent
        if self._delay is not None:
            applied += self._delay(rank, at)
        self._asked[rank] = applied
        self._early[rank] = sizes.share * sizes.bursts[host]
        return applied

    def pull(self, rank: int, size: float, at: float) -> tuple[float, float]:
        host = self._host_of[rank]
        sizes = self._sizes.get(size) or self._of(size)
        asked = self._asked[rank]
        read = at + self._latency[host] if asked < 0 else max(asked, at)
        self._asked[rank] = -1.0
        delay = 0.0 if self._delay is None else self._delay(rank, at)
        if not self._away:
            return read, read + sizes.alone[host] + delay
        burst = sizes.bursts[host]
        early = 0.0 if asked < at else min(self._early[rank], sizes.share * burst)
        taken = self._in.burst(host, at, burst)
        sent = self._out.slices(host, at, sizes.slices)
        if sent > taken:
            taken = sent
        # The queues were joined at `at`, and the parameters come when they have been read.
        arrived = taken - at + read - early + self._latency[host]
        return read, arrived + delay

    def _of(self, size: float) -> _Sizes:
        hosts, number = self._hosts, self._hosts.number
        slice_ = size / number
        bursts = [(number - 1) * slice_ / nic.rate for nic in hosts.nics]
        memory = hosts.inside.latency + slice_ / hosts.inside.rate
        slices = [slice_ / rate for rate in self._rates]
        alone = [memory] * number
        if self._away:
            alone = [
                max(memory, latency + max(burst, *slices))
                for latency, burst in zip(self._latency, bursts, strict=True)
            ]
        window = max(self._out.window, _WINDOW * max(alone))
        self._out.window = self._in.window = window
        found = _Sizes(bursts, alone, slices, hosts.service(size), hosts.share(size))
        self._sizes[size] = found
        return found
