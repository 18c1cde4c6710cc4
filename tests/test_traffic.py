"""The traffic between workers and shards: against M/D/1, and against streams that share every link fairly."""

from __future__ import annotations

import random
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cost import INSIDE, NIC, costs, group

from offbeat.virtual.cluster import Compute, Link, ShardService, Straggler
from offbeat.virtual.cost import Costs
from offbeat.virtual.queues import Queued
from offbeat.virtual.sharing import WORKERS, Shared
from offbeat.virtual.traffic import Host, Hosts, Traffic
from tests.reference_speeds import asp

BOTH = pytest.mark.parametrize("way", [Shared, Queued])


def traffic_of(way: type[Shared] | type[Queued], hosts: int, per_host: int = 1, **more: Any) -> Traffic:
    service = more.pop("shards", ShardService(inf, 0.0))
    nics = more.pop("nics", [Host(NIC.rate, NIC.latency)] * hosts)
    host_of = [host for host in range(hosts) for _ in range(per_host)]
    return way(Hosts(host_of, nics, INSIDE, service, **more))


def test_pushes_to_one_host_are_an_md1_queue() -> None:
    """Poisson arrivals, constant service: the mean wait is ρ·s / (2(1−ρ))."""
    rng = random.Random(1)
    service, n = 1e-3, 300_000
    for load in (0.5, 0.8):
        traffic = costs(group(8, 8), host=Link(inf, 0.0), shards=ShardService(2e9, 5e-4)).traffic()
        now, waits = 0.0, 0.0
        for _ in range(n):
            now += rng.expovariate(load / service)
            waits += traffic.push(rng.randrange(8), 1e6, now) - now - service
        assert waits / n == pytest.approx(load * service / (2 * (1 - load)), rel=0.03)


@BOTH
def test_an_idle_clusters_push_and_pull_take_the_links_time(way: Any) -> None:
    traffic = traffic_of(way, 4, shards=ShardService(1e9, 2e-4))
    burst, latency, service = 3 * 2.5e5 / 125e6, 1e-4, 2e-4 + 2.5e5 / 1e9
    applied = traffic.push(0, 1e6, 1.0)
    assert applied == pytest.approx(1 + burst + latency + service)
    read, arrived = traffic.pull(0, 1e6, applied)  # its request came behind the push
    assert read == applied
    assert arrived - read == pytest.approx(burst + latency, rel=2e-3)
    read, arrived = traffic.pull(0, 1e6, 2.0)  # nothing was pushed before
    assert read == pytest.approx(2.0 + latency)
    assert arrived - read == pytest.approx(burst + latency, rel=2e-3)


@BOTH
def test_an_empty_push_takes_the_way_alone(way: Any) -> None:
    traffic = traffic_of(way, 2, shards=ShardService(1e9, 2e-4))
    assert traffic.push(0, 0, 0.0) == pytest.approx(1e-4 + 2e-4)


@BOTH
def test_a_large_models_pull_begins_before_its_push_has_ended(way: Any) -> None:
    """8 shards a host (of 1 MB or more): all but the last one's parameters travel while gradients do."""
    traffic = traffic_of(way, 2)
    applied = traffic.push(0, 64e6, 0.0)
    assert applied == pytest.approx(32e6 / 125e6 + 1e-4)
    _, arrived = traffic.pull(0, 64e6, applied)
    assert arrived - applied == pytest.approx(32e6 / 125e6 / 8 + 1e-4, rel=1e-2)


@BOTH
def test_a_slow_nic_slows_those_that_send_to_it(way: Any) -> None:
    traffic = traffic_of(way, 2, nics=[Host(125e6, 1e-4), Host(12.5e6, 1e-4)])
    assert traffic.push(0, 1e6, 0.0) == pytest.approx(5e5 / 12.5e6 + 1e-4)


@BOTH
def test_a_stragglers_latency_reaches_pushes_and_pulls(way: Any) -> None:
    calm = traffic_of(way, 4)
    hit = traffic_of(way, 4, delay=lambda rank, at: 0.03 if rank == 0 else 0.0)
    applied = calm.push(0, 1e6, 1.5)
    assert hit.push(0, 1e6, 1.5) == pytest.approx(applied + 0.03)
    arrived = calm.pull(0, 1e6, applied)[1]
    assert hit.pull(0, 1e6, applied + 0.03)[1] == pytest.approx(arrived + 0.06)


def test_costs_hand_on_latencies_and_choose_by_size() -> None:
    event = Straggler(1.0, latency=0.03, workers=(0,), at=(1.0,))
    one = costs(group(4), stragglers=(event,)).traffic()
    calm = costs(group(4)).traffic()
    assert one.push(0, 1e6, 1.5) == pytest.approx(calm.push(0, 1e6, 1.5) + 0.03)
    assert isinstance(costs(group(WORKERS)).traffic(), Shared)
    assert isinstance(costs(group(WORKERS + 1)).traffic(), Queued)
    assert isinstance(costs(group(4, 4)).traffic(), Queued)


def test_two_streams_share_a_link() -> None:
    """The first was told its end before the second came: it makes up for that in its next transfer."""
    traffic = traffic_of(Shared, 2, per_host=2)
    alone = 4e5 / 125e6
    assert traffic.push(0, 8e5, 0.0) == pytest.approx(alone + 1e-4)
    # Both are through at 2·alone: when the second comes, half of the first is left.
    assert traffic.push(1, 8e5, alone / 2) == pytest.approx(2 * alone + 1e-4)
    read, arrived = traffic.pull(0, 8e5, alone + 1e-4)
    assert read == pytest.approx(1.5 * alone + 1e-4)
    assert arrived == pytest.approx(read + alone + 1e-4)


def test_a_shaped_links_bucket_passes_at_once_after_a_pause() -> None:
    nics = [Host(125e6, 1e-4, burst=1e-3)] * 2
    shaped, plain = traffic_of(Shared, 2, nics=nics), traffic_of(Shared, 2)
    alone = plain.push(0, 1e6, 0.0)
    assert shaped.push(0, 1e6, 0.0) == pytest.approx(alone - 1e-3)
    # The next has what the bucket has got back; a long pause fills it, and no more.
    pause = 4e-4
    assert shaped.push(0, 1e6, alone - 1e-3 + pause) == pytest.approx(2 * alone - 1e-3 + pause - 5e-4)
    assert shaped.push(0, 1e6, 1.0) == pytest.approx(1 + alone - 1e-3)


# Against streams that share every link max-min fairly


def streams(hosts: int, per_host: int, unit: float, size: float, rate: float, rounds: int) -> float:
    """Pushes per second of workers that compute about `unit` seconds, send a slice to each other host and get
    one back from each as soon as it has come; no latency, no service."""
    rng, order, now, done = random.Random(1), count(), 0.0, 0
    flows: list[list[Any]] = []  # from, to, bytes left, whether it is a push's, rank
    events: list[tuple[float, int, int]] = []
    missing: dict[int, int] = {}
    home = [rank // per_host for rank in range(hosts * per_host)]
    for rank in range(len(home)):
        heappush(events, (rng.uniform(0.5, 1.5) * unit, next(order), rank))
    while done < rounds * len(home):
        rates = fair(flows, hosts, rate)
        over = min((now + flow[2] / r for flow, r in zip(flows, rates, strict=True)), default=inf)
        moment = min(over, events[0][0] if events else inf)
        for flow, r in zip(flows, rates, strict=True):
            flow[2] -= r * (moment - now)
        now = moment
        for flow in [flow for flow in flows if flow[2] < 1e-6]:
            flows.remove(flow)
            start, end, _, push, rank = flow
            if push:
                flows.append([end, start, size / hosts, False, rank])
                continue
            missing[rank] -= 1
            if not missing[rank]:
                done += 1
                heappush(events, (now + rng.uniform(0.7, 1.3) * unit, next(order), rank))
        while events and events[0][0] <= now:
            rank = heappop(events)[2]
            missing[rank] = hosts - 1
            flows += [[home[rank], h, size / hosts, True, rank] for h in range(hosts) if h != home[rank]]
    return done / now


def fair(flows: list[list[Any]], hosts: int, rate: float) -> list[float]:
    """Progressive filling: the tightest link's streams get an even share of what it has left, and so on."""
    rates = [0.0] * len(flows)
    left = {(way, host): rate for way in "oi" for host in range(hosts)}
    ends = [(("o", flow[0]), ("i", flow[1])) for flow in flows]
    live = set(range(len(flows)))
    while live:
        used: dict[tuple[str, int], int] = {}
        for i in live:
            for link in ends[i]:
                used[link] = used.get(link, 0) + 1
        tight = min(used, key=lambda link: left[link] / used[link])
        share = left[tight] / used[tight]
        for i in [i for i in live if tight in ends[i]]:
            rates[i] = share
            live.discard(i)
            for link in ends[i]:
                left[link] -= share
    return rates


def closed_loop(traffic: Traffic, workers: int, unit: float, size: float, rounds: int) -> float:
    """The same over `traffic`."""
    rng = random.Random(1)
    events: list[tuple[float, int, bool]] = []
    for rank in range(workers):
        heappush(events, (rng.uniform(0.5, 1.5) * unit, rank, True))
    pushes = 0
    while pushes < rounds * workers:
        at, rank, computed = heappop(events)
        if computed:
            heappush(events, (traffic.push(rank, size, at), rank, False))
        else:
            pushes += 1
            _, arrived = traffic.pull(rank, size, at)
            heappush(events, (arrived + rng.uniform(0.7, 1.3) * unit, rank, True))
    return pushes / at


@pytest.mark.parametrize(
    ("way", "hosts", "per_host", "load", "within"),
    [
        (Shared, 2, 1, 0.3, 0.03),
        (Shared, 2, 1, 0.8, 0.05),
        (Shared, 4, 1, 0.3, 0.03),
        (Shared, 4, 1, 1.0, 0.05),
        (Shared, 4, 2, 0.6, 0.06),
        (Shared, 8, 1, 0.6, 0.03),
        (Queued, 10, 1, 0.3, 0.03),
        (Queued, 10, 1, 1.0, 0.06),
        (Queued, 6, 2, 0.3, 0.04),
        (Queued, 6, 2, 0.6, 0.1),
    ],
)
def test_throughput_is_that_of_fair_streams(
    way: Any, hosts: int, per_host: int, load: float, within: float
) -> None:
    """load: what a NIC would carry if workers never waited for it."""
    size, rate = 1.2e6, 6.25e6
    unit = per_host * 2 * (hosts - 1) / hosts * size / rate / load
    traffic = traffic_of(way, hosts, per_host, nics=[Host(rate, 0.0)] * hosts)
    want = streams(hosts, per_host, unit, size, rate, 40)
    got = closed_loop(traffic, hosts * per_host, unit, size, 100)
    assert got == pytest.approx(want, rel=within)


@pytest.mark.parametrize("load", [0.2, 0.5, 1.0, 3.0])
def test_queues_and_streams_agree(load: float) -> None:
    hosts, size, rate = 12, 1.2e6, 6.25e6
    unit = 2 * (hosts - 1) / hosts * size / rate / load
    nics = [Host(rate, 1e-3)] * hosts
    exact, pooled = (
        closed_loop(traffic_of(way, hosts, nics=nics), hosts, unit, size, rounds)
        for way, rounds in ((Shared, 30), (Queued, 100))
    )
    assert pooled == pytest.approx(exact, rel=0.03)


# Bounds


def test_nics_bound_asp() -> None:
    """H hosts move no more than their NICs do: each push costs (H−1)/H·S out and its pull as much again."""
    one = costs(group(64, 8, compute=Compute(0.1, "lognormal", 0.5)))
    bound = 8 * 125e6 / (2 * 7 / 8 * 4e6)
    assert 0.7 * bound < asp(one, 4e6, 4e6) < bound


@pytest.mark.parametrize("workers", [8, 32])
def test_shards_bound_asp(workers: int) -> None:
    service = ShardService(1e9, 1e-3)
    one = costs(group(workers, compute=Compute(1e-3), link=Link(1e12, 1e-6)), shards=service)
    assert asp(one, workers * 1e6, workers * 1e6) == pytest.approx(1 / (1e-3 + 1e-3), rel=0.01)


@given(
    st.sampled_from([Shared, Queued]),
    st.integers(2, 5),
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(0, 14), st.floats(0, 0.05)), max_size=30),
)
@settings(max_examples=60)
def test_nothing_comes_before_an_idle_cluster_would_bring_it(
    way: Any, hosts: int, per_host: int, calls: list[tuple[int, float]]
) -> None:
    shards = ShardService(1e9, 1e-4)
    shared, now = traffic_of(way, hosts, per_host, shards=shards), 0.0
    free = [0.0] * (hosts * per_host)
    for rank, pause in calls:
        now += pause
        rank %= hosts * per_host
        if free[rank] > now:  # it still waits
            continue
        idle = traffic_of(way, hosts, per_host, shards=shards)
        applied = shared.push(rank, 1e5, now)
        assert applied >= idle.push(rank, 1e5, now) - 1e-9
        free[rank] = applied


def test_the_same_calls_give_the_same_times() -> None:
    def times(seed: int) -> list[float]:
        one = Costs(costs(group(6)).cluster, seed)
        traffic, rng, now, found = one.traffic(), random.Random(3), 0.0, []
        for _ in range(200):
            now += rng.expovariate(200)
            found.append(traffic.push(rng.randrange(6), 1e6, now))
        return found

    assert times(0) == times(0) == times(1)
