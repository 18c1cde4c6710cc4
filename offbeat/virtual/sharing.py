"""The traffic between workers and shards of a small cluster, stream by stream.

Streams share each NIC direction evenly, as TCP's do. All streams of one transfer go at one rate: that of the
worker's own NIC, or of the others' (the mean of the slowest and of the average one), whichever is less. Two
workers that meet on a link delay each other, and may go on meeting there: a worker's push and another's pull
use the same direction, and so do the pull and the push that follow.

A transfer's end is told when it begins, as if nobody else came. If somebody does, it ends later, and that
worker's next transfer begins as much later: what was told too early is made up for there.

A shaped NIC has a bucket of tokens for each direction: a transfer that begins takes what all of its way's
buckets have, and that part passes at once; buckets fill at the rate that nobody uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import count
from math import inf

from offbeat.virtual.traffic import Hosts, Traffic

WORKERS = 8
"""Up to this many workers every stream is followed; the cost of a call grows with their number."""


class Transfer:
    """One push, or one pull, or the part of a pull that runs beside its push.

    left: bytes of each of its streams, when it begins. after: seconds from the last byte's leaving to its
    arrival. told: its end, as it was told. end: the true one, -1 before it is there. then: what begins
    after it, and how long after. beside: what begins with it, and how long after. waits: it is over when this
    one is, too.
    """

    __slots__ = ("after", "beside", "end", "host", "left", "push", "service", "then", "told", "waits")

    def __init__(self, host: int, push: bool, left: float, after: float, service: float = 0.0):
        self.host, self.push, self.left, self.after, self.service = host, push, left, after, service
        self.told = self.end = -1.0
        self.then: list[tuple[float, Transfer]] = []
        self.beside: tuple[float, Transfer] | None = None
        self.waits: Transfer | None = None


class State:
    """The streams at one moment. left: of each active transfer. waiting: a heap of beginnings. shards: when
    they are free. ends: of the transfers that this state saw end. held: those whose bytes have passed and
    that wait for another one's end, by that one. tokens: bytes in the bucket of each NIC, out and in."""

    def __init__(self, hosts: Hosts):
        self.now = self.shards = 0.0
        self.active: list[Transfer] = []
        self.left: list[float] = []
        self.waiting: list[tuple[float, int, Transfer]] = []
        self.ends: dict[Transfer, float] = {}
        self.held: dict[Transfer, tuple[Transfer, float]] = {}
        self._order = count()
        self._costs = [1 / nic.rate for nic in hosts.nics]  # seconds per byte
        self._bursts = [nic.burst * nic.rate if nic.burst else 0.0 for nic in hosts.nics]
        self._shaped = any(self._bursts)
        self.tokens = self._bursts[:], self._bursts[:]

    def copy(self) -> State:
        made = State.__new__(State)
        made.now, made.shards, made._costs, made._order = self.now, self.shards, self._costs, self._order
        made.active, made.left, made.waiting = self.active[:], self.left[:], self.waiting[:]
        made.ends, made.held = {}, self.held.copy()
        made._bursts, made._shaped = self._bursts, self._shaped
        made.tokens = self.tokens[0][:], self.tokens[1][:]
        return made

    def begin(self, transfer: Transfer, at: float) -> None:
        heappush(self.waiting, (at, next(self._order), transfer))

    def run(self, until: float, target: Transfer | None = None) -> None:
        """Goes on to a moment, or until `target` has ended."""
        active, left, waiting = self.active, self.left, self.waiting
        while target is None or target not in self.ends:
            paces = self._paces() if active else []
            first, index = inf, -1
            for i, pace in enumerate(paces):
                if (over := self.now + left[i] * pace) < first:
                    first, index = over, i
            begin = waiting[0][0] if waiting else inf
            moment = min(first, begin, until)
            if moment > self.now:
                for i, pace in enumerate(paces):
                    if pace:
                        left[i] -= (moment - self.now) / pace
                if self._shaped:
                    self._fill(moment - self.now, paces)
                self.now = moment
            if first <= moment:
                left.pop(index)
                self._passed(active.pop(index))
            elif begin <= moment:
                one = heappop(waiting)[2]
                active.append(one)
                left.append(one.left - self._take(one) if self._shaped else one.left)
                if one.beside is not None:
                    self.begin(one.beside[1], begin + one.beside[0])
            else:
                return

    def _passed(self, one: Transfer) -> None:
        """Its last byte has left."""
        end = self.now + one.after
        if one.push:
            self.shards = end = max(self.shards, end) + one.service
        other = one.waits
        if other is not None and other.end < 0:
            if other not in self.ends:
                self.held[other] = one, end
                return
            end = max(end, self.ends[other])
        elif other is not None:
            end = max(end, other.end)
        self._ended(one, end)

    def _ended(self, one: Transfer, end: float) -> None:
        self.ends[one] = end
        for later, following in one.then:
            self.begin(following, end + later)
        if one in self.held:
            waiting, its = self.held.pop(one)
            self._ended(waiting, max(end, its))

    def _fill(self, seconds: float, paces: Sequence[float]) -> None:
        """The buckets, with what the active transfers have left of the rates."""
        free = [1 / cost if cost else inf for cost in self._costs]
        unused = free[:], free[:]
        for one, pace in zip(self.active, paces, strict=True):
            if not pace:
                continue
            near, far = unused if one.push else unused[::-1]
            for host in range(len(free)):
                if host == one.host:
                    near[host] -= (len(free) - 1) / pace
                else:
                    far[host] -= 1 / pace
        for tokens, rates in zip(self.tokens, unused, strict=True):
            for host, (most, rate) in enumerate(zip(self._bursts, rates, strict=True)):
                tokens[host] = min(most, tokens[host] + max(rate, 0.0) * seconds)

    def _take(self, one: Transfer) -> float:
        """Bytes of each of its streams that pass at once."""
        near, far = self.tokens if one.push else self.tokens[::-1]
        away = len(near) - 1
        found = min(one.left, near[one.host] / away, *(far[: one.host] + far[one.host + 1 :]))
        for host in range(len(near)):
            if host == one.host:
                near[host] -= found * away
            else:
                far[host] -= found
        return found

    def _paces(self) -> list[float]:
        """Seconds per byte of each active transfer's streams."""
        costs = self._costs
        number = len(costs)
        own_out, own_in = [0] * number, [0] * number
        pushes = 0
        for one in self.active:
            if one.push:
                own_out[one.host] += 1
                pushes += 1
            else:
                own_in[one.host] += 1
        pulls = len(self.active) - pushes
        away = number - 1
        out = [(n * away + pulls - m) * cost for n, m, cost in zip(own_out, own_in, costs, strict=True)]
        into = [(m * away + pushes - n) * cost for n, m, cost in zip(own_out, own_in, costs, strict=True)]
        found: dict[tuple[int, bool], float] = {}
        paces = []
        for one in self.active:
            key = one.host, one.push
            pace = found.get(key)
            if pace is None:
                near, far = (out, into) if one.push else (into, out)
                others = far[: one.host] + far[one.host + 1 :]
                pace = found[key] = max(near[one.host], (max(others) + sum(others) / away) / 2)
            paces.append(pace)
        return paces


class Shared(Traffic):
    """For two hosts or more."""

    def __init__(self, hosts: Hosts):
        self._hosts, self._state = hosts, State(hosts)
        self._last: list[Transfer | None] = [None] * len(hosts.host_of)
        self._pulled = -1.0  # bytes of the last pull

    def push(self, rank: int, size: float, at: float) -> float:
        self._go(at)
        hosts, host = self._hosts, self._hosts.host_of[rank]
        one = self._made(rank, True, size / hosts.number, at)
        one.service = hosts.service(size)
        pulled = size if self._pulled < 0 else self._pulled
        if share := hosts.share(pulled):
            # All but the last shard's parameters follow their gradients while those of others still go.
            early = self._made(rank, False, share * pulled / hosts.number, at)
            seconds = (hosts.number - 1) * size / hosts.number / hosts.nics[host].rate
            one.beside = (1 - share) * seconds + one.after, early
        self._begin(rank, one, at)
        memory = hosts.inside.latency + size / hosts.number / hosts.inside.rate + one.service
        one.told = max(self._end(one), at + memory)
        return one.told

    def pull(self, rank: int, size: float, at: float) -> tuple[float, float]:
        self._go(at)
        self._pulled = size
        last = self._last[rank]
        one = self._made(rank, False, size / self._hosts.number, at)
        if last is not None and last.push:
            read = max(at, last.end if last.end >= 0 else self._end(last))
            if last.beside is not None and at <= last.told:
                one.left *= 1 - self._hosts.share(size)
                one.waits = last.beside[1]
            self._begin(rank, one, at)
        else:
            read = at + self._hosts.latency[self._hosts.host_of[rank]]
            self._begin(rank, one, read)
        one.told = self._end(one)
        return read, one.told

    def _made(self, rank: int, push: bool, left: float, at: float) -> Transfer:
        hosts, host = self._hosts, self._hosts.host_of[rank]
        late = 0.0 if hosts.delay is None else hosts.delay(rank, at)
        return Transfer(host, push, left, hosts.latency[host] + late)

    def _begin(self, rank: int, one: Transfer, at: float) -> None:
        """After the same worker's last one, by as much as `at` is after what was told for it."""
        last, self._last[rank] = self._last[rank], one
        if last is None:
            self._state.begin(one, at)
            return
        later = max(0.0, at - last.told)
        if last.end >= 0:
            self._state.begin(one, max(at, last.end + later))
        else:
            last.then.append((later, one))

    def _go(self, at: float) -> None:
        state = self._state
        state.run(at)
        for one, end in state.ends.items():
            one.end = end
        state.ends.clear()

    def _end(self, one: Transfer) -> float:
        """If nobody else came."""
        ahead = self._state.copy()
        ahead.run(inf, one)
        return ahead.ends[one]
