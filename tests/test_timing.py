"""Timing-only runs against closed forms, and against a slow reference."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat import compare, live
from offbeat.cluster.epoch import PeerLost
from offbeat.plan import PlanError, parse
from offbeat.protocols import ASP, BSP, SSP, DaSGD, LocalSGD, Program, Protocol, Switch
from offbeat.virtual.clock import Clock
from offbeat.virtual.cluster import Allreduce, Cluster, Compute, Failure, Group, Link, ShardService, equal
from offbeat.virtual.cost import Costs
from offbeat.virtual.timing import Model, Outcome, simulate
from offbeat.worker import Worker

MODEL = Model((1000,) * 8)


class Traffic:
    """A gradient travels for `sent` seconds, is applied when those before it are, in `apply`; parameters are
    read after `asked` seconds and travel for `sent`."""

    def __init__(self, costs: Fake):
        self._costs, self._free, self._now = costs, 0.0, 0.0

    def push(self, rank: int, size: float, at: float) -> float:
        self._in_order(at)
        self._free = max(at + self._costs.sent, self._free) + self._costs.apply
        return self._free

    def pull(self, rank: int, size: float, at: float) -> tuple[float, float]:
        self._in_order(at)
        read = at + self._costs.asked
        return read, read + self._costs.sent

    def _in_order(self, at: float) -> None:
        assert at >= self._now
        self._now = at


@dataclass
class Fake:
    """Costs that a test knows exactly. unit: seconds, or a function of the rank and the time; every worker
    is a host of its own. `spent`: what each rank has computed."""

    workers: int
    unit_s: float | Callable[[int, float], float] = 1.0
    allreduce_s: Callable[[float], float] = lambda size: 0.0
    words_s: float = 0.0
    broadcast_s: float = 0.0
    update_s: float = 0.0
    sent: float = 0.0
    apply: float = 0.0
    asked: float = 0.0
    switch: float = 0.0
    backward: float = 0.5
    membership: float = 0.0
    in_flight: int = 1
    failures: Sequence[Failure] = ()

    def __post_init__(self) -> None:
        self.host_of = range(self.workers)
        self.spent: Counter[int] = Counter()

    def unit(self, rank: int, at: float) -> float:
        seconds = self.unit_s if isinstance(self.unit_s, int | float) else self.unit_s(rank, at)
        self.spent[rank] += seconds  # type: ignore[assignment]
        return seconds

    def update(self, rank: int) -> float:
        return self.update_s

    def allreduce(self, size: float, members: Sequence[int], at: float) -> float:
        assert list(members) == list(range(self.workers))
        return self.allreduce_s(size)

    def lockstep(self, members: Sequence[int]) -> float:
        return 1 / (len(members) - 1)

    def gather(self, size: float, members: Sequence[int], at: float) -> float:
        return self.words_s

    def broadcast(self, size: float, members: Sequence[int], at: float) -> float:
        return self.broadcast_s

    def traffic(self) -> Traffic:
        return Traffic(self)


class Notes:
    """A journal that a test can read."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.rows: list[dict[str, Any]] = []

    def record(self, type: str, **fields: Any) -> None:
        self.rows.append({"type": type, "t": self.clock.now, **fields})

    def of(self, type: str) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["type"] == type]


def ran(plan: Protocol | str, total: int, costs: Any, model: Model = MODEL, **more: Any) -> Outcome:
    return simulate(parse(plan) if isinstance(plan, str) else plan, total, costs, model, **more)


def noted(plan: Protocol | str, total: int, costs: Any, model: Model = MODEL) -> tuple[Outcome, Notes]:
    notes = Notes()
    return ran(plan, total, costs, model, journal=notes, clock=notes.clock), notes


def uneven(seed: int, spread: float = 0.3) -> Callable[[int, float], float]:
    """Lognormal units, each rank's own stream."""
    streams: dict[int, random.Random] = {}

    def unit(rank: int, at: float) -> float:
        return streams.setdefault(rank, random.Random(f"{seed} {rank}")).lognormvariate(0, spread)

    return unit


# Replicas


def test_bsp_is_the_formula() -> None:
    """Buckets of 4 MB, a first one of 256 KB and a last one of one parameter, full at these shares of
    backward; each all-reduce starts when its bucket is full and the one before has landed."""
    model = Model((500_000, 900_000, 1_200_000, 60_000, 30_000, 40_000))
    full = [2 / 6, 4 / 6, 5 / 6, 6 / 6]
    sizes = [4 * 70_000, 4 * 1_260_000, 4 * 900_000, 4 * 500_000]
    for rate in (1e6, 1e7, 1e9):
        costs = Fake(4, 1.0, lambda size, rate=rate: 0.01 + size / rate, words_s=0.002, update_s=0.25)
        landed = 0.0
        for share, size in zip(full, sizes, strict=True):
            landed = max(landed, 0.5 + 0.5 * share) + costs.allreduce_s(size)
        step = max(landed, 1.0 + 0.002) + 0.25
        assert ran("bsp", 40, costs, model).seconds == pytest.approx(10 * step + 0.002, rel=1e-12)


def test_two_buckets_under_way_overlap_their_latencies() -> None:
    """Two workers: the second bucket, ready 0.25 s after the first, has its latency behind the first's."""
    model = Model((560_000, 70_000))
    latency, rate = 0.4, 4e6
    costs = Fake(2, 1.0, lambda size: latency + size / rate, in_flight=2)
    first, second = 4 * 70_000 / rate, 4 * 560_000 / rate
    assert [first, second] == [0.07, 0.56]
    # Ready at 0.75 and 1.0; alone they land at 1.22 and 1.96.
    assert (
        0.75 + latency + first + second < ran("bsp", 2, costs, model).seconds < 1.0 + latency + second + 0.1
    )
    assert ran("bsp", 2, replace(costs, in_flight=1), model).seconds == 1.22 + latency + second


def test_bsp_waits_for_the_slowest_in_each_bucket() -> None:
    """A worker that begins late and is fast, one that begins early and is slow."""
    units = {0: 2.0, 1: 1.0}
    first = Fake(2, lambda rank, at: units[rank] if at else 1.0 + rank, lambda size: 0.01)
    found = ran(Switch(LocalSGD(2), BSP(), 2), 4, first, Model((1_000_000, 50_000)))
    # Local steps end at 1 and 2 and the settle at 2.01; then buckets are full at 3.51 and 4.01.
    assert found.seconds == pytest.approx(2.01 + 2.0 + 0.01, rel=1e-12)


def test_buckets_are_the_reducers() -> None:
    import torch
    from torch import nn

    from offbeat.cluster.reducer import Reducer

    picked = random.Random(1)
    for _ in range(20):
        sizes = tuple(int(10 ** picked.uniform(0, 6)) for _ in range(picked.randrange(1, 12)))
        parameters = [nn.Parameter(torch.empty(size, device="meta")) for size in sizes]
        reducer = Reducer(parameters, [str(i) for i in range(len(sizes))], None)
        reducer._fill_buckets()
        assert Model(sizes).buckets() == [bucket.numbers for bucket in reducer.buckets]
        reducer.remove()


@pytest.mark.parametrize("period", [1, 2, 5])
def test_local_sgd_is_the_formula(period: int) -> None:
    costs = Fake(3, 1.0, lambda size: 1e-5 * size, words_s=0.001, update_s=0.5)
    mean, settle = 1e-5 * 33_000, 0.001 + 1e-5 * (33_000 + 32_000)
    found = ran(LocalSGD(period), 3 * 20, costs, Model((1000,) * 8, buffers=1000))
    assert found.seconds == pytest.approx(20 * 1.5 + 20 // period * mean + settle, rel=1e-12)


@given(
    st.integers(1, 6).flatmap(lambda tau: st.tuples(st.just(tau), st.integers(0, tau - 1))),
    st.floats(0.01, 10),
    st.floats(0.01, 3),
)
def test_dasgd_exposes_what_d_steps_do_not_hide(which: tuple[int, int], t_c: float, t_p: float) -> None:
    """max(0, t_c − d·t_p)/τ per step; the last average, which ends the job, is hidden behind nothing."""
    tau, d = which
    rounds = 7
    found = ran(DaSGD(tau, d), 2 * tau * rounds, Fake(2, t_p, lambda size: t_c))
    exposed = max(0.0, t_c - d * t_p)
    settle = t_c
    rest = found.seconds - tau * rounds * t_p - settle - t_c
    assert rest == pytest.approx((rounds - 1) * exposed, rel=1e-9, abs=1e-9)


def test_an_average_does_not_delay_a_fast_worker_more_than_the_slowest() -> None:
    units = {0: 1.0, 1: 2.0}
    found = ran(DaSGD(2, 1), 2 * 8, Fake(2, lambda rank, at: units[rank], lambda size: 0.5))
    assert found.seconds == pytest.approx(8 * 2.0 + 0.5 + 0.5, rel=1e-12)
    assert [w.waited for w in found.workers] == pytest.approx([9.0, 1.0], rel=1e-12)


def test_a_narrow_wire_halves_what_travels_but_not_what_settles() -> None:
    costs = Fake(2, 1.0, lambda size: size * 1e-5)
    for plan, travels in (("bsp", 8 * 0.32), ("local(2)", 4 * 0.32)):
        full, half = (ran(plan, 16, costs, wire=wire).seconds for wire in (1.0, 0.5))
        assert full - half == pytest.approx(travels / 2, rel=1e-9)


# Shards


def test_asp_is_the_sum_of_speeds() -> None:
    speeds = [1.0, 2.0, 4.0, 0.5]
    found = ran("asp", 750, Fake(4, lambda rank, at: 1 / speeds[rank]))
    assert found.seconds == pytest.approx(100.0, rel=0.02)
    assert [w.units / found.seconds for w in found.workers] == pytest.approx(speeds, rel=0.02)
    assert found.units == sum(w.units for w in found.workers) == 750


def test_asp_on_a_slow_shard_is_as_fast_as_the_shard() -> None:
    costs = Fake(16, uneven(3), apply=0.25)
    assert ran("asp", 2000, costs).seconds == pytest.approx(2000 * 0.25, rel=0.01)


def test_ssp_without_slack_is_lockstep() -> None:
    """Each step takes as long as its slowest unit, and of its n pushes each finds one more before it."""
    n, steps = 5, 40
    draw = uneven(7)
    slowest = [max(row) for row in zip(*([draw(r, 0) for _ in range(steps)] for r in range(n)), strict=True)]
    found, notes = noted(SSP(0), n * steps, Fake(n, uneven(7)))
    assert found.seconds == pytest.approx(sum(slowest), rel=1e-12)
    (pushes,) = notes.of("pushes")
    assert pushes["staleness"] == {str(k): steps for k in range(n)}
    same, others = noted(SSP(0), n * steps, Fake(n, 1.0))
    assert same.seconds == pytest.approx(steps, rel=1e-12)
    assert others.of("pushes")[0]["staleness"] == pushes["staleness"]


@dataclass(frozen=True)
class Watched(SSP):
    """SSP that writes down when pushes were applied and parameters read."""

    word: ClassVar[str] = "watched"
    seen: ClassVar[list[tuple[str, int, int, float]]] = []

    def run(self, w: Worker) -> Program:
        for number, handle in enumerate(super().run(w)):
            yield handle
            kind = ("batch", "push", "pull")[number % 3]
            self.seen.append((kind, w.rank, w.clock, w.read if kind == "pull" else w.now))  # type: ignore[attr-defined]


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_ssp_keeps_its_bounds(bound: int) -> None:
    """At clock k: parameters hold all others' first k − s updates, and none after the first k + s."""
    n, total = 6, 600
    Watched.seen.clear()
    costs = Fake(n, uneven(bound, 1.0), sent=0.05, apply=0.02, asked=0.03)
    ran(Watched(bound), total, costs)
    last = max(time for *_, time in Watched.seen)
    applied = {rank: [inf] * total for rank in range(n)}  # by how many
    for kind, rank, clock, time in Watched.seen:
        if kind == "push":
            applied[rank][clock] = time
    ended = min(max(t for t in applied[rank] if t < inf) for rank in range(n))
    for kind, rank, clock, time in Watched.seen:
        if kind != "pull" or time >= ended:  # then some are through, and count no more
            continue
        for other in set(range(n)) - {rank}:
            assert clock <= bound or applied[other][clock - bound] <= time + 1e-9
            assert applied[other][clock + bound + 1] >= time - 1e-9
    assert last > ended > 0


def reference(n: int, total: int, bound: float, costs: Fake) -> tuple[float, Counter[int]]:
    """SSP by looking at everything after every event: seconds, and how often each staleness occurred."""
    traffic, order, events = costs.traffic(), itertools.count(), []
    clock, done, taken, resting = [0] * n, [0] * n, [0] * n, [False] * n
    seen, version, tickets, ends = [0] * n, 0, itertools.count(), [0.0] * n
    pushing: dict[int, int] = {}  # whose gradient is there: the clock that it waits for
    pulling: dict[int, int] = {}
    arrival: dict[int, float] = {}
    stale: Counter[int] = Counter()

    def later(time: float, kind: str, rank: int) -> None:
        heapq.heappush(events, (time, next(order), kind, rank))

    def begin(rank: int, now: float) -> None:
        if ticket[rank] < total:
            later(now + costs.unit(rank, now), "send", rank)
        else:
            later(now, "rest", rank)

    ticket = [next(tickets) for _ in range(n)]
    for rank in range(n):
        begin(rank, 0.0)
    while events:
        now, _, kind, rank = heapq.heappop(events)
        if kind == "send":
            ticket[rank] = next(tickets)
            clock[rank] += 1
            later(traffic.push(rank, 0, now), "there", rank)
        elif kind == "there":
            pushing[rank] = clock[rank] - 1 - bound  # type: ignore[assignment]
        elif kind == "read":
            taken[rank], seen[rank] = clock[rank], version
            begin(rank, arrival.pop(rank))
        else:
            resting[rank], ends[rank] = True, now
        while True:  # until nobody can go on
            for r, after in pushing.items():
                if all(taken[o] >= after or resting[o] for o in range(n)):
                    del pushing[r]
                    stale[version - seen[r]] += 1
                    version, done[r], pulling[r] = version + 1, clock[r], after + 1
                    break
            else:
                for r, after in pulling.items():
                    if all(done[o] >= after or resting[o] for o in range(n)):
                        del pulling[r]
                        read, arrival[r] = traffic.pull(r, 0, now)
                        later(read, "read", r)
                        break
                else:
                    break
    return max(ends), stale


@settings(max_examples=150, deadline=None)
@given(
    st.integers(2, 6),
    st.integers(1, 60),
    st.sampled_from([0, 1, 2, 5, inf]),
    st.integers(0, 10**6),
    st.sampled_from([0.1, 1.0]),
)
def test_shards_against_the_reference(n: int, total: int, bound: float, seed: int, spread: float) -> None:
    rest = {"sent": 0.013, "apply": 0.07, "asked": 0.2137}  # never at once with another push
    seconds, stale = reference(n, total, bound, Fake(n, uneven(seed, spread), **rest))
    found, notes = noted(SSP(bound), total, Fake(n, uneven(seed, spread), **rest))
    assert found.seconds == pytest.approx(seconds, rel=1e-9)
    assert notes.of("pushes")[0]["staleness"] == {str(k): stale[k] for k in sorted(stale)}


# Plans

PHASES = ["bsp", "local(3)", "dasgd(4,2)", "ssp(0)", "ssp(2)", "asp"]


@st.composite
def plans(draw: Any) -> tuple[str, int]:
    count = draw(st.integers(1, 4))
    ends = sorted(draw(st.sets(st.integers(1, 59), min_size=count - 1, max_size=count - 1)))
    words = [draw(st.sampled_from(PHASES)) for _ in range(count)]
    return " ".join(f"{w}:{e}u" for w, e in zip(words, ends, strict=False)) + f" {words[-1]}", 60


@settings(max_examples=80, deadline=None)
@given(plans(), st.integers(1, 9), st.integers(0, 100))
def test_any_plan(planned: tuple[str, int], n: int, seed: int) -> None:
    """Units are exact under shards and overshoot by less than n on replicas; every second of every worker is
    spent computing or waiting; records come in the order of time."""
    plan, total = planned
    ends = {int(part.rsplit(":")[1][:-1]) for part in plan.split()[:-1]}

    def costs() -> Fake:
        return Fake(n, uneven(seed), lambda size: 0.1, 0.01, 0.02, 0.001, 0.01, 0.01, 0.01, switch=0.5)

    mine = costs()
    found, notes = noted(plan, total, mine)
    assert total <= found.units < total + n
    assert found.units == sum(w.units for w in found.workers)
    for worker in found.workers:
        assert worker.busy + worker.waited == pytest.approx(found.seconds, rel=1e-9)
        updates = worker.busy - mine.spent[worker.rank]
        assert -1e-9 <= updates <= 0.001 * worker.units + 1e-9
    times = [row["t"] for row in notes.rows]
    assert times == sorted(times)
    begun = 0
    for row in notes.of("switch"):
        assert min(row[f"{part}_ms"] for part in ("drain", "meet", "settle", "transfer")) >= 0
        if row["from"].startswith(("asp", "ssp")) and n > 1:
            assert row["units"] in {*ends, begun}
        begun = row["units"]
    if notes.rows[-3]["type"] == "pushes":
        assert found.units == max(total, begun)
    again, others = noted(plan, total, costs())
    assert (found, notes.rows) == (again, others.rows)


def test_units_are_exact_under_shards() -> None:
    found, notes = noted("asp:7u ssp(1):9u asp:10u ssp(0):31u asp", 61, Fake(5, uneven(1)))
    assert [row["units"] for row in notes.of("pushes")] == [7, 9, 10, 31, 61]
    assert [sum(w["pushes"] for w in row["workers"]) for row in notes.of("pushes")] == [7, 2, 1, 21, 30]
    assert found.units == 61


@pytest.mark.parametrize("plan", ["bsp", "local(4)", "dasgd(4,2)", "ssp(3)", "asp", "asp:5u bsp:9u ssp(1)"])
def test_one_worker_waits_for_nobody(plan: str) -> None:
    costs = Fake(1, 1.0, lambda size: 7.0, 7.0, 7.0, 0.5, 7.0, 7.0, 7.0)
    found, notes = noted(plan, 20, costs)
    assert (found.seconds, found.units, found.waiting) == (30.0, 20, 0.0)
    assert not notes.of("pushes")


def test_a_switch_costs_what_it_takes() -> None:
    """Entering shards: words. Leaving them: words, two hosts' shards, buffers, and what each has done. Local
    protocols: parameters, buffers and the optimizer's state."""
    model = Model((1000,) * 8, buffers=1000, state=2.0)
    costs = Fake(2, 1.0, lambda size: size * 1e-6, words_s=0.01, broadcast_s=0.1, switch=3.0)
    _, notes = noted("bsp:20u asp:40u bsp:60u local(2):80u dasgd(4,2):92u bsp", 100, costs, model)
    costs_of = {
        f"{row['from']} → {row['to']}": [
            row[f"{part}_ms"] for part in ("drain", "meet", "settle", "transfer")
        ]
        for row in notes.of("switch")
    }
    own, mean = 1e-3 * (1000 + 3 * 32_000), 1e-3 * 33_000
    assert costs_of == {
        "bsp → asp": pytest.approx([0, 10, 1, 3010]),
        "asp → bsp": pytest.approx([0, 10, 221, 3000]),
        "bsp → local(period=2)": pytest.approx([0, 10, 1, 3000]),
        "local(period=2) → dasgd(period=4,delay=2)": pytest.approx([0, 10, own, 3000]),
        "dasgd(period=4,delay=2) → bsp": pytest.approx([0, 10, own, 3000]),
    }
    _, notes = noted("dasgd(4,2):8u bsp", 20, costs, model)
    (row,) = notes.of("switch")
    assert row["drain_ms"] == pytest.approx(mean - 10)
    assert row["meet_ms"] == pytest.approx(10 + 10)


def test_the_same_arguments_give_the_same_journal() -> None:
    plan = "bsp:20% asp:50% ssp(2):80% dasgd(4,2)"
    runs = [noted(plan, 300, Fake(7, uneven(5), lambda size: 0.1, 0.01, sent=0.1, apply=0.1)) for _ in "ab"]
    assert runs[0][0] == runs[1][0]
    assert runs[0][1].rows == runs[1][1].rows


def test_the_journal_is_a_real_runs() -> None:
    _, notes = noted("bsp:50% asp", 64, Fake(4, uneven(2, 0.1)))
    kinds = [row["type"] for row in notes.rows if row["type"] not in ("step", "workers")]
    assert kinds == ["run", "start", "phase", "switch", "phase", "pushes", "end"]
    step = notes.of("step")[-1]
    expected = {"type", "t", "protocol", "clock", "units", "progress", "loss", "lr", "staleness"}
    assert set(step) == expected
    assert {row["protocol"] for row in notes.of("step")} == {"bsp", "asp"}
    rows = notes.of("workers")[-1]["workers"]
    assert [row["rank"] for row in rows] == [0, 1, 2, 3]
    assert set(rows[0]) == {"rank", "clock", "units", "samples", "busy_s", "wait_s"}
    assert sum(row["units"] for row in rows) == notes.of("end")[0]["units"] == 64
    gaps = [b["t"] - a["t"] for a, b in itertools.pairwise(notes.of("workers"))]
    assert min(gaps[:-1]) == max(gaps[:-1]) == 1.0


def test_progress_is_told() -> None:
    told: list[tuple[float, float]] = []
    found = ran("asp", 40, Fake(4), watch=lambda seconds, share: told.append((seconds, share)))
    assert told[-1] == (found.seconds, 1.0)
    assert told == sorted(told)
    assert [seconds for seconds, _ in told[:5]] == [1.0, 2.0, 3.0, 4.0, 5.0]


def ethernet(workers: int, unit: float) -> Costs:
    group = Group(workers, 2, 1.0, Compute(unit), Link(1.25e9, 5e-5))
    return Costs(
        Cluster(
            name="servers",
            source="a test",
            size=workers,
            groups=(group,),
            backward=0.5,
            host=Link(16e9, 5e-6),
            allreduce=Allreduce("ring", in_flight=1),
            shards=ShardService(2e9, 1e-4),
        ),
        seed=1,
    )


def test_on_a_cluster() -> None:
    """The formulas again, with the costs of a cluster; a person can look at the journal."""
    model = Model(equal(25_600_000, 161))
    costs, step, landed = ethernet(8, 0.05), 0.05, 0.0
    buckets = model.buckets()
    for bucket in buckets:
        share = (161 - bucket[-1]) / 161
        size = sum(model.sizes[number] for number in bucket) * 4
        landed = max(landed, step * (0.5 + 0.5 * share)) + costs.allreduce(size, range(8), 0.0)
    found, notes = noted("bsp", 80, ethernet(8, 0.05), model)
    assert landed > 2 * step
    assert found.seconds == pytest.approx(10 * landed, rel=1e-3)  # and the settle's words
    t_c = costs.allreduce(model.size, range(8), 0.0)
    hidden, _ = noted("dasgd(4,3)", 80 * 4, ethernet(8, t_c / 2), model)
    assert hidden.seconds == pytest.approx(40 * t_c / 2 + 3 * t_c, rel=1e-3)  # the last, and the settle's two
    assert live.view(notes.rows).seconds_left == 0
    assert compare.compare([compare.Run("bsp", notes.rows)]).rows[0].waiting == pytest.approx(
        found.waiting, 1e-3
    )


# What goes wrong


@pytest.mark.parametrize("plan", ["bsp", "local(4)", "asp", "ssp(1)"])
def test_a_death_stops_the_run(plan: str) -> None:
    notes = Notes()
    costs = Fake(4, uneven(1), failures=[Failure(2, 7.5), Failure(3, 1e6)])
    with pytest.raises(PeerLost, match=r"rank 2 died at 7\.5 s of virtual time"):
        ran(plan, 400, costs, journal=notes, clock=notes.clock)
    assert notes.rows[-1]["type"] == "error"
    assert notes.rows[-1]["rank"] == 2
    assert max(row["t"] for row in notes.rows) == 7.5
    assert ran(plan, 12, Fake(4, failures=[Failure(3, 1e6)])).units >= 12


@dataclass(frozen=True)
class Forlorn(ASP):
    """Its pulls wait for clocks that nobody reaches."""

    word: ClassVar[str] = "forlorn"

    def run(self, w: Worker) -> Program:
        while w.running:
            yield w.gradient()
            yield w.push()
            yield w.pull(after=w.clock + 10 * (w.rank % 2))


def test_a_deadlock_says_who_waits_for_what() -> None:
    with pytest.raises(RuntimeError, match=r"no worker can go on .*after clock 11 wait ranks 1, 3"):
        ran(Switch(Forlorn(), BSP(), 5), 100, Fake(4))


def test_a_plan_must_fit_the_job() -> None:
    with pytest.raises(PlanError, match="beyond the end"):
        ran("bsp:50u asp", 40, Fake(2))


def test_nothing_happens_in_the_past() -> None:
    clock, seen = Clock(), []
    for name, time in (("b", 2.0), ("a", 1.0), ("c", 2.0)):
        clock.at(time, lambda name=name: seen.append((name, clock.now)))  # type: ignore[misc]
    assert clock.next_at() == 1.0
    clock.run()
    assert seen == [("a", 1.0), ("b", 2.0), ("c", 2.0)]
    with pytest.raises(ValueError, match="nothing can happen at 1"):
        clock.at(1.0, clock.stop)
    assert not clock.step()
    assert clock.next_at() == inf
