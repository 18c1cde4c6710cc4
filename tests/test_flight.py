"""All-reduces that are under way at the same time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.virtual.cluster import Allreduce, Cluster, Compute, Group, Link, ShardService
from offbeat.virtual.cost import Costs
from offbeat.virtual.flight import Flight, reductions

TIMES = st.floats(0.001, 2.0)


def landed(most: int, lockstep: float, ready: list[float], costs: list[tuple[float, float]]) -> list[float]:
    """When each lands, in the order of their beginning."""
    flight = Flight(most, lockstep)
    for number, (at, cost) in enumerate(zip(ready, costs, strict=True)):
        flight.add(at, lambda begun, cost=cost: cost, number)
    flight.over()
    return [at for _, at in sorted((number, at) for at, number in flight.landed)]


@given(st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=6))
def test_one_at_a_time_they_follow_each_other(rows: list[tuple[float, float]]) -> None:
    at, ready, free, expected = 0.0, [], 0.0, []
    for after, seconds in rows:
        at += after
        free = max(at, free) + seconds
        ready.append(at)
        expected.append(free)
    assert landed(1, 0.5, ready, [(seconds, seconds / 2) for _, seconds in rows]) == expected


@pytest.mark.parametrize("lockstep", [0.0, 0.2, 1.0])
def test_latencies_overlap_and_bytes_share_the_link(lockstep: float) -> None:
    assert landed(2, lockstep, [0.0, 0.0], [(1.0, 0.0)] * 2) == [1.0, 1.0]
    assert landed(2, lockstep, [0.0, 0.0], [(1.0, 1.0)] * 2) == pytest.approx([2.0, 2.0])
    assert landed(2, lockstep, [0.0, 0.0, 0.0], [(1.0, 0.0)] * 3) == [1.0, 1.0, 2.0]


def test_in_lockstep_nobodys_bytes_hide_in_anothers_latency() -> None:
    """T = 1 of which B = 0.4: in lockstep L + 2B, else nobody slows the other before the link is full."""
    assert landed(2, 1.0, [0.0, 0.0], [(1.0, 0.4)] * 2) == pytest.approx([1.4, 1.4])
    assert landed(2, 0.0, [0.0, 0.0], [(1.0, 0.4)] * 2) == pytest.approx([1.0, 1.0])
    assert landed(3, 0.0, [0.0, 0.0, 0.0], [(1.0, 0.4)] * 3) == pytest.approx([1.2] * 3)


def test_who_joins_slows_whoever_is_under_way_and_leaves_it_the_link_again() -> None:
    # The first has half of its second left when the other comes, which is done when 1.5 s of bytes are.
    assert landed(2, 0.5, [0.0, 0.5], [(1.0, 1.0), (0.5, 0.5)]) == pytest.approx([1.5, 1.5])
    assert landed(2, 0.5, [0.0, 0.5], [(1.0, 1.0), (0.2, 0.2)]) == pytest.approx([1.2, 0.9])


@given(
    st.lists(st.tuples(TIMES, TIMES, st.floats(0, 1)), min_size=1, max_size=6),
    st.integers(1, 4),
    st.floats(0, 1),
)
def test_neither_faster_than_alone_nor_slower_than_in_order(
    rows: list[tuple[float, float, float]], most: int, lockstep: float
) -> None:
    ready, at = [], 0.0
    for after, _, _ in rows:
        at += after
        ready.append(at)
    costs = [(seconds, share * seconds) for _, seconds, share in rows]
    several, ordered = (landed(number, lockstep, ready, costs) for number in (most, 1))
    slack = 1 + 1e-9
    assert max(several) <= max(ordered) * slack
    for end, begun, (seconds, _) in zip(several, ready, costs, strict=True):
        assert end * slack >= begun + seconds
    assert max(several) * slack >= ready[0] + sum(busy for _, busy in costs)


MEASURED = {
    # Hosts; T and B of 0.6 MB alone, 10 ms on each host's link; two at once, and four in pairs.
    "2 at 50 Mbit": (2, 0.1431, 0.1025, 0.2445, 0.4859),
    "2 at 200 Mbit": (2, 0.0672, 0.0228, 0.0881, 0.1659),
    "2 at 1 Gbit": (2, 0.0489, 0.0034, 0.0545, 0.1070),
    "4 at 50 Mbit": (4, 0.2516, 0.1579, 0.3519, 0.6643),
    "4 at 200 Mbit": (4, 0.1738, 0.0363, 0.1935, 0.3516),
    "4 at 1 Gbit": (4, 0.1533, 0.0055, 0.1579, 0.2879),
}
"""`benchmarks/flight.py`, seconds, gloo's own two threads."""


@pytest.mark.parametrize("name", MEASURED)
def test_what_gloo_does(name: str) -> None:
    hosts, seconds, busy, two, four = MEASURED[name]
    found = [max(landed(2, 1 / (hosts - 1), [0.0] * k, [(seconds, busy)] * k)) for k in (2, 4)]
    assert found == pytest.approx([two, four], rel=0.09)


def test_a_clusters_own() -> None:
    """With no latency several at once end when one after the other would; without bytes, with the last."""

    def last(rate: float, latency: float, in_flight: int) -> float:
        groups = (Group(4, 1, 1.0, Compute(0.1), Link(rate, latency)),)
        allreduce, shards = Allreduce(in_flight=in_flight), ShardService(1e9, 0.0)
        costs = Costs(Cluster("c", "c", 4, groups, 0.5, Link(1e10, 0.0), allreduce, shards), 0)
        return reductions(costs, [1e6, 2e6], [0.0, 0.01], range(4))

    assert last(1e7, 0.0, 2) == pytest.approx(last(1e7, 0.0, 1))
    assert last(1e15, 0.1, 2) == pytest.approx(0.01 + 0.6, rel=1e-6)
    assert last(1e15, 0.1, 1) == pytest.approx(1.2, rel=1e-6)
    assert last(1e7, 0.01, 4) == last(1e7, 0.01, 2)  # there are only two
