"""The cost model: closed forms against plain computations, distributions, stragglers, queues."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from math import ceil, exp, inf, log2, sqrt
from statistics import mean, stdev
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from offbeat.virtual.cluster import (
    ALGORITHMS,
    Allreduce,
    Cluster,
    Compute,
    Failure,
    Group,
    Link,
    ShardService,
    Straggler,
)
from offbeat.virtual.collectives import Layout
from offbeat.virtual.cost import Costs, ready
from tests.reference_speeds import asp, bsp

NIC, INSIDE = Link(125e6, 1e-4), Link(10e9, 5e-6)
FREE = ShardService(inf, 0.0)
CALM = Compute(0.1)


def group(
    count: int, per_host: int = 1, compute: Compute = CALM, link: Link = NIC, slow: float = 1.0
) -> Group:
    return Group(count, per_host, slow, compute, link)


def cluster(*groups: Group, **more: Any) -> Cluster:
    given = {"allreduce": Allreduce(), "shards": FREE, "host": INSIDE, "backward": 0.5, **more}
    return Cluster("test", "test.toml", None, groups, **given)


def costs(*groups: Group, seed: int = 0, **more: Any) -> Costs:
    return Costs(cluster(*groups, **more), seed)


# Collectives


def ring_by_steps(n: int, steps: int, chunk: float, hops: list[tuple[float, float]]) -> float:
    """Each member sends a chunk in every step, as soon as it has the one of the step before and its link has
    sent it; hop i leads from member i to the next."""
    has, free = [0.0] * n, [0.0] * n
    for _ in range(steps):
        arrived = [0.0] * n
        for i, (rate, latency) in enumerate(hops):
            free[i] = max(free[i], has[i]) + chunk / rate
            arrived[(i + 1) % n] = free[i] + latency
        has = arrived
    return max(has)


@given(st.integers(2, 40), st.floats(1, 1e9), st.floats(1e3, 1e11), st.floats(0, 0.1))
def test_ring_over_equal_links(n: int, size: float, rate: float, latency: float) -> None:
    one = costs(group(n, link=Link(rate, latency)))
    taken = one.allreduce(size, range(n), 0.0)
    assert taken == pytest.approx(2 * (n - 1) * (latency + size / n / rate))
    assert taken == pytest.approx(ring_by_steps(n, 2 * (n - 1), size / n, [(rate, latency)] * n))


LINKS = st.tuples(st.sampled_from([1e6, 1e7, 1e9]), st.sampled_from([0.0, 1e-4, 1e-2]))


@given(st.lists(st.tuples(st.integers(1, 4), LINKS), min_size=2, max_size=6), st.floats(1, 1e7))
def test_ring_over_unequal_links(hosts: list[tuple[int, tuple[float, float]]], size: float) -> None:
    """The closed form is a lower bound of the steps' simulation, and near it."""
    layout = Layout([count for count, _ in hosts], [link for _, link in hosts], (1e10, 1e-6))
    hops: list[tuple[float, float]] = []
    for (count, link), (_, after) in zip(hosts, [*hosts[1:], hosts[0]], strict=True):
        hops += [(1e10, 1e-6)] * (count - 1) + [(min(link[0], after[0]), (link[1] + after[1]) / 2)]
    n = layout.n
    steps = ring_by_steps(n, 2 * (n - 1), size / n, hops)
    assert layout.ring(size) <= steps * (1 + 1e-9)
    # At most the way round to the slowest link comes on top.
    assert steps <= layout.ring(size) + sum(latency + size / n / rate for rate, latency in hops)


@pytest.mark.parametrize("n", [2, 3, 4, 7, 8, 9, 32])
def test_trees_and_butterflies(n: int) -> None:
    level = 1e-4 + 1e6 / 125e6
    for algorithm, factor in (("tree", 2), ("butterfly", 1)):
        one = costs(group(n), allreduce=Allreduce(algorithm))
        assert one.allreduce(1e6, range(n), 0.0) == pytest.approx(factor * ceil(log2(n)) * level)


def test_levels_inside_servers_take_the_inner_link() -> None:
    """DaSGD's model: the first three levels of 256 workers in servers of 8 are PCIe's."""
    inside, between = 5e-6 + 1e6 / 10e9, 1e-4 + 1e6 / 125e6
    one = costs(group(256, 8), allreduce=Allreduce("butterfly"))
    assert one.allreduce(1e6, range(256), 0.0) == pytest.approx(3 * inside + 5 * between)
    one = costs(group(256, 8), allreduce=Allreduce("hierarchical"))
    inner = 2 * 7 * (5e-6 + 1e6 / 8 / 10e9)
    assert one.allreduce(1e6, range(256), 0.0) == pytest.approx(inner + 2 * 31 * (1e-4 + 1e6 / 32 / 125e6))


def test_one_host_needs_no_nic() -> None:
    for algorithm in ALGORITHMS:
        slow, fast = (
            costs(group(4, 4, link=Link(rate, 1.0)), allreduce=Allreduce(algorithm)) for rate in (1.0, 1e9)
        )
        assert slow.allreduce(1e6, range(4), 0.0) == fast.allreduce(1e6, range(4), 0.0) < 1e-2


def test_one_member_waits_for_nobody() -> None:
    one = costs(group(4), allreduce=Allreduce("ring", 0.5))
    for of in (one.allreduce, one.broadcast, one.gather):
        assert of(1e6, (2,), 0.0) == 0
        assert of(1e6, (2, 3), 0.0) > 0


def test_broadcast_and_gather() -> None:
    one, level = costs(group(8)), 1e-4 + 1e3 / 125e6
    assert one.broadcast(1e3, range(8), 0.0) == pytest.approx(3 * level)
    assert one.gather(1e3, range(8), 0.0) == pytest.approx(7 * level)


def test_the_slowest_members_nic_counts() -> None:
    slow = Link(1e6, 1e-3)
    for algorithm in ALGORITHMS:
        one = costs(group(3), group(1, link=slow), allreduce=Allreduce(algorithm))
        without = one.allreduce(1e6, (0, 1, 2), 0.0)
        assert one.allreduce(1e6, range(4), 0.0) > 10 * without
        # Members may change from call to call, in a list that is one and the same too.
        members = [0, 1, 2]
        assert one.allreduce(1e6, members, 0.0) == without
        members.append(3)
        assert one.allreduce(1e6, members, 0.0) == one.allreduce(1e6, (0, 1, 2, 3), 0.0)


def test_overhead_counts_once_a_call() -> None:
    for algorithm in ALGORITHMS:
        plain = costs(group(4), allreduce=Allreduce(algorithm))
        more = costs(group(4), allreduce=Allreduce(algorithm, 0.25))
        assert more.allreduce(1e6, range(4), 0.0) == pytest.approx(plain.allreduce(1e6, range(4), 0.0) + 0.25)
        assert more.gather(1e6, range(4), 0.0) == plain.gather(1e6, range(4), 0.0)
        each = costs(group(4), allreduce=Allreduce(algorithm, 0.25, per_member=0.1))
        for members in ((0, 1, 3), range(4)):
            expected = plain.allreduce(1e6, members, 0.0) + 0.25 + 0.1 * len(members)
            assert each.allreduce(1e6, members, 0.0) == pytest.approx(expected)
        assert each.allreduce(1e6, (2,), 0.0) == 0


@given(
    st.sampled_from(ALGORITHMS), st.integers(1, 20), st.integers(1, 4), st.floats(0, 1e8), st.floats(0, 1e8)
)
def test_more_bytes_and_more_workers_never_take_less(
    algorithm: str, n: int, per_host: int, size: float, more: float
) -> None:
    one = costs(group(n + per_host, per_host), allreduce=Allreduce(algorithm))
    few, many = tuple(range(n)), tuple(range(n + 1))
    assert one.allreduce(size, few, 0.0) <= one.allreduce(size + more, few, 0.0)
    if algorithm in ("tree", "butterfly"):
        assert one.allreduce(size, few, 0.0) <= one.allreduce(size, many, 0.0)


# Computing


def test_constant_units_and_updates() -> None:
    one = costs(group(1, compute=Compute(0.1, update=0.01)), group(1, compute=Compute(0.2), slow=3))
    assert (one.unit(0, 0.0), one.update(0)) == (0.1, 0.01)
    assert (one.unit(1, 5.0), one.update(1)) == (pytest.approx(0.6), 0)


def test_lognormal_units_have_the_mean_and_the_spread() -> None:
    sigma = 0.3
    one = costs(group(1, compute=Compute(0.1, "lognormal", sigma), slow=2))
    drawn = [one.unit(0, 0.0) for _ in range(40_000)]
    assert mean(drawn) == pytest.approx(0.2, rel=0.01)
    assert stdev(drawn) / mean(drawn) == pytest.approx(sqrt(exp(sigma**2) - 1), rel=0.03)


def test_samples_are_drawn_with_replacement() -> None:
    one = costs(group(1, compute=Compute(0.2, "samples", samples=(0.1, 0.1, 0.4)), slow=2))
    drawn = [one.unit(0, 0.0) for _ in range(6000)]
    assert set(drawn) == {0.2, 0.8}
    assert drawn.count(0.8) / len(drawn) == pytest.approx(1 / 3, rel=0.1)


@given(st.integers(-(2**70), 2**70), st.lists(st.integers(0, 3), max_size=60))
@settings(max_examples=20)
def test_a_ranks_draws_do_not_depend_on_the_others(seed: int, order: list[int]) -> None:
    what = [group(4, compute=Compute(0.1, "lognormal", 0.5))]
    mixed, alone = costs(*what, seed=seed), costs(*what, seed=seed)
    got: dict[int, list[float]] = {rank: [] for rank in range(4)}
    for rank in order:
        got[rank].append(mixed.unit(rank, 0.0))
    for rank in reversed(range(4)):
        assert got[rank] == [alone.unit(rank, 0.0) for _ in got[rank]]
    assert len({costs(*what, seed=seed).unit(rank, 0.0) for rank in range(4)}) == 4


def test_other_seeds_draw_otherwise() -> None:
    what = group(1, compute=Compute(0.1, "lognormal", 0.5))
    assert costs(what, seed=1).unit(0, 0.0) != costs(what, seed=2).unit(0, 0.0)


# Stragglers


def test_slowness_counts_from_its_begin_to_its_end() -> None:
    one = costs(group(2), stragglers=(Straggler(0.1, 4.0, workers=(1,), at=(1.0,)),))
    assert one.unit(0, 1.0) == 0.1
    assert one.unit(1, 0.5) == pytest.approx(0.1)
    assert one.unit(1, 0.95) == pytest.approx(0.05 + 0.1 + 0.025)  # 0.025 of its work is done while slow
    assert one.unit(1, 1.0) == pytest.approx(0.1 + 0.075)
    assert one.unit(1, 1.08) == pytest.approx(0.02 + 0.095)
    assert one.unit(1, 1.1) == pytest.approx(0.1)


EVENT = st.builds(
    Straggler,
    seconds=st.one_of(st.floats(0.01, 2), st.just(inf)),
    slow=st.sampled_from([1.0, 1.5, 4.0]),
    latency=st.sampled_from([0.0, 0.01]),
    workers=st.sampled_from([(0,), (1,), (0, 1)]),
    at=st.tuples(st.floats(0, 3)),
)


@given(st.lists(EVENT, max_size=4), st.floats(0, 4), st.floats(0.01, 1))
@settings(max_examples=60)
def test_slowness_against_small_steps(events: list[Straggler], at: float, unit: float) -> None:
    one = costs(group(2, compute=Compute(unit)), stragglers=tuple(events))
    done, now, step = 0.0, at, 1e-3
    while done < unit:
        hit = [e.slow for e in events if 0 in e.workers and e.at[0] <= now < e.at[0] + e.seconds]
        done += step / max([1.0, *hit])
        now += step
    assert one.unit(0, at) == pytest.approx(now - at, abs=0.02)
    late = [e.latency for e in events if 0 in e.workers and e.at[0] <= at < e.at[0] + e.seconds]
    assert one.delay(0, at) == max(late, default=0.0)


def test_latency_is_met_as_often_as_a_path_leads_through_it() -> None:
    event = Straggler(1.0, latency=0.03, workers=(1, 2), at=(1.0,))
    for algorithm, often in (("ring", 2), ("tree", 2), ("butterfly", 1), ("hierarchical", 2)):
        one = costs(group(4), allreduce=Allreduce(algorithm), stragglers=(event,))
        calm, hit = (one.allreduce(1e6, range(4), at) for at in (0.0, 1.5))
        assert hit - calm == pytest.approx(2 * often * 0.03)
        assert one.allreduce(1e6, (0, 3), 1.5) == one.allreduce(1e6, (0, 3), 0.0)
        chatty = costs(group(4), allreduce=Allreduce(algorithm, rounds=14.5), stragglers=(event,))
        assert chatty.allreduce(1e6, range(4), 1.5) - calm == pytest.approx(2 * 14.5 * 0.03)
        assert chatty.gather(1e6, range(4), 1.5) == one.gather(1e6, range(4), 1.5)
    assert (one.delay(1, 1.5), one.delay(0, 1.5), one.delay(1, 2.5)) == (0.03, 0, 0)


def test_latency_reaches_pushes_and_pulls() -> None:
    event = Straggler(1.0, latency=0.03, workers=(0,), at=(1.0,))
    calm, hit = costs(group(4)).traffic(), costs(group(4), stragglers=(event,)).traffic()
    applied = calm.push(0, 1e6, 1.5)
    assert hit.push(0, 1e6, 1.5) == pytest.approx(applied + 0.03)
    arrived = calm.pull(0, 1e6, applied)[1]
    assert hit.pull(0, 1e6, applied + 0.03)[1] == pytest.approx(arrived + 0.06)


def test_random_stragglers_come_at_their_rate() -> None:
    event = Straggler(5.0, 3.0, every=50.0, count=2)
    one = costs(group(4, compute=Compute(1.0)), stragglers=(event,))
    horizon = 200_000
    work = [0.0] * 4
    for rank in range(4):
        now = 0.0
        while now < horizon:
            now += one.unit(rank, now)
            work[rank] += 1
    # Each worker is hit by half of the events: slow for 5 s of every 100 s and overlaps.
    hit = 1 - exp(-5 / 100)
    assert mean(work) / horizon == pytest.approx(1 - hit * 2 / 3, rel=0.01)


@given(st.integers(0, 100), st.permutations(range(12)))
@settings(max_examples=20)
def test_random_stragglers_do_not_depend_on_who_asks(seed: int, order: list[int]) -> None:
    events = (Straggler(20.0, 3.0, 0.01, every=30.0), Straggler(5.0, 2.0, every=7.0, count=3))
    first, second = (costs(group(3), seed=seed, stragglers=events) for _ in range(2))
    moments = [(i % 3, 17.0 * i) for i in range(12)]
    want = [(first.unit(*m), first.delay(*m)) for m in moments]
    got = {i: (second.unit(*moments[i]), second.delay(*moments[i])) for i in order}
    assert [got[i] for i in range(12)] == want


def test_failures_come_in_order() -> None:
    failures = (Failure(1, 5.0), Failure(0, 2.0))
    assert costs(group(2), failures=failures).failures == [Failure(0, 2.0), Failure(1, 5.0)]


# Buckets


def test_buckets_are_full_by_the_number_of_their_parameters() -> None:
    assert ready([10, 1000, 10, 10], [1, 2, 1]) == [0.25, 0.75, 1.0]


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=50), st.randoms())
def test_the_last_bucket_is_full_when_backward_ends(sizes: list[int], rng: random.Random) -> None:
    ends = sorted(rng.sample(range(1, len(sizes)), rng.randrange(len(sizes)))) + [len(sizes)]
    shares = ready(sizes, [b - a for a, b in pairwise([0, *ends])])
    assert shares == sorted(shares)
    assert shares[-1] == 1


# Speeds


def test_bsp_speed_is_the_formulas() -> None:
    """t_f + the reduction's tail: one bucket waits for all of backward, the overlap hides the first."""
    one = costs(group(4, compute=Compute(0.1, update=0.01)), group(1, slow=2))
    ring = 2 * 4 * (1e-4 + 1e6 / 5 / 125e6)
    words = 4 * (1e-4 + 64 / 125e6)
    assert 1 / bsp(one, [1e6], [1.0]) == pytest.approx(0.2 + ring + 0.01)
    assert 1 / bsp(one, [1e6, 0], [0.5, 1.0]) == pytest.approx(0.2 + max(2 * 4 * 1e-4, words) + 0.01)
    assert 1 / bsp(one, [0, 1e6], [0.5, 1.0]) == pytest.approx(0.2 + ring + 0.01)


@given(st.integers(1, 12), st.floats(0.01, 1), st.floats(1e3, 1e7))
@settings(max_examples=30)
def test_one_alone_waits_for_its_own_shards_only(n: int, unit: float, size: float) -> None:
    assume(n == 1 or size > 1e4)
    one = costs(group(n, n, compute=Compute(unit)), host=Link(inf, 0.0))
    assert asp(one, size, size) == pytest.approx(n / unit)
    assert bsp(one, [size], [1.0]) == pytest.approx(1 / unit)


def test_costs_are_those_of_the_cluster() -> None:
    one = Costs(replace(cluster(group(5, 2), group(2, 4)), switch=36.0, membership=2.0), 0)
    assert (one.workers, one.hosts, one.host_of) == (7, 4, [0, 0, 1, 1, 2, 3, 3])
    assert (one.backward, one.switch, one.membership) == (0.5, 36, 2)
