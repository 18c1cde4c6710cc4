"""How long collectives take, in closed form.

Symbols: n workers on H hosts, p of them on the fullest one; S bytes; α a link's latency, β its rate, both
inside a host (α_h, β_h) and between hosts (α, β: of the slowest NIC). A NIC is full duplex.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy


def levels(n: int) -> int:
    """⌈log2 n⌉: h in DaSGD's performance model."""
    return (n - 1).bit_length()


class Layout:
    """Where the members of a collective are, and what joins them.

    hosts: number of members on each host, in rank order, the members of one host beside each other. nics:
    (β, α) of each host's NIC; where two differ, the slower rate and the mean latency join them. inside:
    (β_h, α_h).
    """

    def __init__(
        self, hosts: Sequence[int], nics: Sequence[tuple[float, float]], inside: tuple[float, float]
    ):
        self.n, self.hosts, self.most = sum(hosts), len(hosts), max(hosts)
        self._inside_rate, self._inside_latency = inside
        self.between = [
            (min(rate, after_rate), (latency + after_latency) / 2)
            for (rate, latency), (after_rate, after_latency) in zip(nics, [*nics[1:], *nics[:1]], strict=True)
        ]
        self._rate = min(rate for rate, _ in nics)
        # Two hosts with this latency, if there are two: the mean of the two longest.
        self._latency = sum(sorted(latency for _, latency in nics)[-2:]) / min(len(nics), 2)
        hops = [
            hop
            for count, leaving in zip(hosts, self.between, strict=True)
            for hop in [inside] * (count - 1) + [leaving if len(hosts) > 1 else inside]
        ]
        self._ring = _Ring(hops)
        self._outer = _Ring(self.between)

    def _over(self, size: float) -> tuple[float, float]:
        """Seconds of one level of a tree inside the hosts, and between them."""
        return (
            self._inside_latency + size / self._inside_rate,
            self._latency + size / self._rate,
        )

    def ring(self, size: float) -> float:
        """2(n−1)·(α + S/(nβ)) where all links are equal (PALEO; Patarasuk and Yuan 2009): a reduce-scatter
        and an all-gather of n chunks over a ring in rank order, which leaves each host once.

        Over unequal links, the longer of: the way of the chunk that meets the slowest hops, store and
        forward; the time in which the slowest link sends its 2(n−1) chunks."""
        return self._ring.seconds(size / self.n, 2 * (self.n - 1))

    def tree(self, size: float) -> float:
        """2·h·t with h = ⌈log2 n⌉ levels and t = α + S/β (DaSGD's performance model after PALEO): a binary
        tree's reduction and its broadcast. ⌈log2 p⌉ levels lie inside the hosts, ⌈log2 H⌉ between them."""
        return 2 * self.butterfly(size)

    def butterfly(self, size: float) -> float:
        """h·t (DaSGD's performance model after PALEO): at each level all exchange all S bytes with a
        partner. ⌈log2 p⌉ levels lie inside the hosts, ⌈log2 H⌉ between them, where a host's workers hold the
        same sum and its NIC carries it once.

        DaSGD's text says that butterfly takes about twice the tree's time; PALEO's formulas, which its
        authors' code uses as well, and these, make it half of it."""
        inside, between = self._over(size)
        return levels(self.most) * inside + levels(self.hosts) * between

    def hierarchical(self, size: float) -> float:
        """2(p−1)·(α_h + S/(pβ_h)) + 2(H−1)·(α + S/(Hβ)): a reduce-scatter inside each host, a ring between
        the hosts for each of the p slices, all in one NIC, and an all-gather inside."""
        p = self.most
        inside = 2 * (p - 1) * (self._inside_latency + size / (p * self._inside_rate))
        return inside + self._outer.seconds(size / self.hosts, 2 * (self.hosts - 1))

    def broadcast(self, size: float) -> float:
        """h·t: a binary tree."""
        return self.butterfly(size)

    def gather(self, size: float) -> float:
        """(n−1)·(α + S/β): a ring on which everybody's S bytes go round to all others."""
        return self._ring.seconds(size, self.n - 1)

    def late(self, algorithm: str, delays: Sequence[float]) -> float:
        """What latencies of some members' messages add: each is met once by what those members send on a
        path (tree, butterfly, broadcast, gather), and twice around a ring's two turns and on a tree's two
        ways. They add up, as one path may meet them all."""
        return (1 if algorithm in ("butterfly", "broadcast", "gather") else 2) * sum(delays)


class _Ring:
    """A ring of hops, each (β, α) from one member to the next."""

    def __init__(self, hops: Sequence[tuple[float, float]]):
        self._n = len(hops)
        self._per_byte = numpy.array([1 / rate for rate, _ in hops])
        self._latency = numpy.array([latency for _, latency in hops])
        self._uniform = len(set(hops)) == 1
        slowest = int(self._per_byte.argmax())
        self._slowest = float(self._per_byte[slowest]), float(self._latency[slowest])

    def seconds(self, chunk: float, steps: int) -> float:
        """Until chunks of `chunk` bytes have made `steps` hops, each member sending one in each step."""
        if not steps:
            return 0.0
        per_byte, latency = self._slowest
        if self._uniform:
            return steps * (latency + chunk * per_byte)
        hops = self._latency + chunk * self._per_byte
        turns, left = divmod(steps, self._n)
        way = turns * float(hops.sum())
        if left:
            twice = numpy.concatenate([hops, hops])
            sums = numpy.concatenate([[0.0], twice.cumsum()])
            way += float((sums[left : left + self._n] - sums[: self._n]).max())
        return max(way, steps * chunk * per_byte + latency)


NOWHERE = Layout([1], [(inf, 0.0)], (inf, 0.0))
"""One member alone."""
