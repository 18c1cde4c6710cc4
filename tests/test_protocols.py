"""Every protocol's generator against a worker that only writes down what it is told."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.protocols import ASP, BSP, MERGES, RATES, SSP, DaSGD, LocalSGD, Protocol, Switch
from offbeat.worker import Batch, Handle, Until, Worker


class Told(Handle):
    """A handle with a name; `wait` is the test's to notice."""

    def __init__(self, name: str):
        self.name = name

    def wait(self) -> None:
        return None


class Mine(Batch):
    """A batch that remembers whether its gradient was to be the members' mean."""

    def __init__(self, mean: bool):
        self.name = "gradient(mean)" if mean else "gradient"


class ScriptedWorker(Worker):
    """Records the verbs, and the waits, as text. `members` workers march in step through a job of
    `total` units; `interrupt` is a clock at which `running` turns false, as it does for a checkpoint."""

    rank = 0
    members: Sequence[int] = ()
    clock = 0
    units = 0

    def __init__(self, total: int, members: int = 1, interrupt: int | None = None, clock: int = 0):
        self.total, self.members, self.interrupt = total, range(members), interrupt
        self.clock, self.units = clock, clock * members
        self.told: list[str] = []
        self.averages = 0

    @property
    def progress(self) -> float:
        return self.units / self.total

    @property
    def running(self) -> bool:
        return self.units < self.total and self.clock != self.interrupt

    def gradient(self, mean: bool = False) -> Handle:
        return Mine(mean)

    def step(self) -> None:
        self.told.append("step")
        self.clock += 1
        self.units += len(self.members)

    def average(self, snapshot: bool = False) -> Handle:
        self.averages += 1
        self.told.append(f"average {self.averages}" + (" with snapshot" if snapshot else ""))
        return Told(f"{self.averages}")

    def mix(self, mean: Handle, keep: float) -> None:
        assert isinstance(mean, Told)
        self.told.append(f"mix {mean.name} keep {keep:g}")

    def shift(self, mean: Handle, keep: float) -> None:
        assert isinstance(mean, Told)
        self.told.append(f"shift {mean.name} keep {keep:g}")

    def push(self, after: float = -inf, damped: bool = False) -> Handle:
        self.told.append(f"push after {after:g}" + (" damped" if damped else ""))
        self.clock += 1
        self.units += len(self.members)
        return Told("applied")

    def pull(self, after: float = -inf) -> Handle:
        self.told.append(f"pull after {after:g}")
        return Told("taken")

    def settle(self, then: Protocol | None = None) -> Handle:
        self.told.append(f"settle then {then and then.current(self)}")
        return Told("settled")

    def drive(self, protocol: Protocol) -> list[str]:
        """Runs `protocol` to its end. Returns all that was told and waited for."""
        for handle in protocol.run(self):
            assert isinstance(handle, Mine | Told)
            self.told.append(handle.name if isinstance(handle, Mine) else f"wait {handle.name}")
        return self.told


def bsp(steps: int) -> list[str]:
    return ["gradient(mean)", "step"] * steps


def local(steps: int, period: int) -> list[str]:
    told = []
    for step in range(1, steps + 1):
        told += ["gradient", "step"]
        if step % period == 0:
            number = step // period
            told += [f"average {number}", f"wait {number}", f"mix {number} keep 0"]
    return told


def dasgd(
    steps: int, period: int, delay: int, merge: str = "mix", keep: float = 0.25, first: int = 1
) -> list[str]:
    """Every event at its step, put together the other way round than the protocol does: from the list
    of averages. One that is due after the last step lands right after it. Steps count from `first`."""
    verb, suffix = ("mix", "") if merge == "mix" else ("shift", " with snapshot")
    last = first + steps - 1
    events = {step: ["gradient", "step"] for step in range(first, last + 1)}
    starts = [step for step in events if step % period == 0]
    for number, start in enumerate(starts, 1):
        events[start].append(f"average {number}{suffix}")
        events[min(start + delay, last)] += [f"wait {number}", f"{verb} {number} keep {keep:g}"]
    return [event for step in events.values() for event in step]


def ssp(steps: int, bound: float, suffix: str = "", first: int = 0) -> list[str]:
    told = []
    for clock in range(first, first + steps):
        told += ["gradient", f"push after {clock - bound:g}{suffix}", "wait applied"]
        told += [f"pull after {clock + 1 - bound:g}", "wait taken"]
    return told


def test_bsp() -> None:
    assert ScriptedWorker(total=5).drive(BSP()) == bsp(5)


def test_bsp_of_several_members_counts_their_units() -> None:
    assert ScriptedWorker(total=10, members=4).drive(BSP()) == bsp(3)


@pytest.mark.parametrize("period", range(1, 7))
@pytest.mark.parametrize("steps", [0, 1, 6, 13])
def test_local_sgd(period: int, steps: int) -> None:
    assert ScriptedWorker(total=steps).drive(LocalSGD(period)) == local(steps, period)


@pytest.mark.parametrize("merge", MERGES)
@pytest.mark.parametrize(("period", "delay"), [(p, d) for p in range(1, 7) for d in range(p)])
@pytest.mark.parametrize("steps", [1, 6, 12, 13, 14])
def test_dasgd(period: int, delay: int, merge: str, steps: int) -> None:
    protocol = DaSGD(period, delay, merge=merge)
    assert ScriptedWorker(total=steps).drive(protocol) == dasgd(steps, period, delay, merge)


def test_dasgd_word_for_word() -> None:
    step = ["gradient", "step"]
    assert ScriptedWorker(total=8).drive(DaSGD(3, 1, keep=0.5)) == [
        *(step * 3),
        "average 1",
        *step,
        *["wait 1", "mix 1 keep 0.5"],
        *(step * 2),
        "average 2",
        *step,
        *["wait 2", "mix 2 keep 0.5"],
        *step,
    ]


def test_dasgd_drains_what_is_in_flight_at_the_end() -> None:
    told = ScriptedWorker(total=5).drive(DaSGD(4, 3, keep=0.5, merge="delta"))
    assert told[-6:] == ["step", "average 1 with snapshot", "gradient", "step", "wait 1", "shift 1 keep 0.5"]


@pytest.mark.parametrize("period", range(1, 7))
def test_dasgd_without_delay_and_keep_is_local_sgd(period: int) -> None:
    assert ScriptedWorker(total=13).drive(DaSGD(period, delay=0, keep=0)) == local(13, period)


@pytest.mark.parametrize("bound", [0, 1, 3, 10**9, inf])
@pytest.mark.parametrize(("lr", "suffix"), [("plain", ""), ("staleness", " damped")])
@pytest.mark.parametrize("steps", [0, 1, 7])
def test_ssp(bound: float, lr: str, suffix: str, steps: int) -> None:
    assert ScriptedWorker(total=steps).drive(SSP(bound, lr)) == ssp(steps, bound, suffix)


@pytest.mark.parametrize("lr", RATES)
def test_asp_is_ssp_without_a_bound(lr: str) -> None:
    told = ScriptedWorker(total=5).drive(ASP(lr))
    assert told == ScriptedWorker(total=5).drive(SSP(inf, lr))
    assert told == ssp(5, inf, " damped" if lr == "staleness" else "")


def test_bounds_follow_the_workers_clock_not_the_protocols_start() -> None:
    assert ScriptedWorker(total=9, clock=4).drive(SSP(2)) == ssp(5, 2, first=4)


def test_averages_follow_the_workers_clock_not_the_protocols_start() -> None:
    resumed = ScriptedWorker(total=9, clock=3)
    assert resumed.drive(DaSGD(4, 2)) == dasgd(6, 4, 2, first=4)


@pytest.mark.parametrize(
    ("at", "total", "members", "first", "second"),
    [(0.5, 10, 1, 5, 5), (0.45, 10, 1, 5, 5), (4, 10, 1, 4, 6), (4, 12, 3, 2, 2), (0.25, 12, 3, 1, 3)],
)
def test_switch_at_a_share_and_at_units(
    at: float | int, total: int, members: int, first: int, second: int
) -> None:
    told = ScriptedWorker(total, members).drive(Switch(BSP(), LocalSGD(100), at))
    settled = ["settle then local(period=100)", "wait settled"]
    assert told == bsp(first) + settled + local(second, period=100)


def test_switch_drains_before_it_settles() -> None:
    told = ScriptedWorker(total=6).drive(Switch(DaSGD(2, 1), BSP(), 4))
    assert told == [*dasgd(4, 2, 1), "settle then bsp", "wait settled", *bsp(2)]
    assert told.index("mix 2 keep 0.25") < told.index("settle then bsp")


def test_sync_switch_in_both_directions() -> None:
    plan = Switch(BSP(), Switch(ASP(), Switch(SSP(1), BSP(), 8), 6), 2)
    assert ScriptedWorker(total=10).drive(plan) == [
        *bsp(2),
        *["settle then asp", "wait settled"],
        *ssp(4, inf),
        *["settle then ssp(bound=1)", "wait settled"],
        *ssp(2, 1, first=6),
        *["settle then bsp", "wait settled"],
        *bsp(2),
    ]


@pytest.mark.parametrize("at", [0.0, 0])
def test_switch_at_the_beginning_never_runs_the_first(at: float | int) -> None:
    assert ScriptedWorker(total=3).drive(Switch(DaSGD(), BSP(), at)) == bsp(3)


@pytest.mark.parametrize("at", [1.0, 3])
def test_switch_at_the_end_settles_and_runs_nothing_more(at: float | int) -> None:
    told = ScriptedWorker(total=3).drive(Switch(BSP(), LocalSGD(), at))
    assert told == [*bsp(3), "settle then local", "wait settled"]


def test_switch_past_the_end_never_comes() -> None:
    assert ScriptedWorker(total=3).drive(Switch(BSP(), LocalSGD(), 4)) == bsp(3)


NESTINGS = [
    Switch(BSP(), Switch(LocalSGD(2), DaSGD(4, 2), 0.6), 0.2),
    Switch(Switch(BSP(), LocalSGD(2), 0.2), DaSGD(4, 2), 0.6),
    Switch(BSP(), Switch(LocalSGD(2), DaSGD(4, 2), 6), 2),
    Switch(Switch(BSP(), LocalSGD(2), 2), DaSGD(4, 2), 0.6),
]


@pytest.mark.parametrize("protocol", NESTINGS, ids=repr)
def test_nested_switches_count_from_the_jobs_beginning(protocol: Switch) -> None:
    step = ["gradient", "step"]
    assert ScriptedWorker(total=10).drive(protocol) == [
        *bsp(2),
        *["settle then local(period=2)", "wait settled"],
        *(step * 2),
        *["average 1", "wait 1", "mix 1 keep 0"],
        *(step * 2),
        *["average 2", "wait 2", "mix 2 keep 0"],
        *["settle then dasgd(period=4,delay=2)", "wait settled"],
        *(step * 2),
        "average 3",
        *(step * 2),
        *["wait 3", "mix 3 keep 0.25"],
    ]


@pytest.mark.parametrize("protocol", NESTINGS, ids=repr)
@pytest.mark.parametrize(
    ("clock", "word"), [(0, "bsp"), (1, "bsp"), (2, "local"), (5, "local"), (6, "dasgd")]
)
def test_current(protocol: Switch, clock: int, word: str) -> None:
    assert protocol.current(ScriptedWorker(total=10, clock=clock)).word == word


@pytest.mark.parametrize("protocol", NESTINGS, ids=repr)
@pytest.mark.parametrize("clock", [1, 3, 5, 7, 9])
def test_an_interruption_drains_without_a_switch(protocol: Switch, clock: int) -> None:
    """A checkpoint stops the plan between two boundaries: nothing may settle towards a protocol that
    does not come next, and the plan run again goes on where it was."""
    whole = ScriptedWorker(total=10).drive(protocol)
    worker = ScriptedWorker(total=10, interrupt=clock)
    worker.drive(protocol)
    assert worker.clock == clock
    switches = [boundary for boundary in (2, 6) if boundary <= clock]
    assert sum(told.startswith("settle") for told in worker.told) == len(switches)
    started = sum(told.startswith("average") for told in worker.told)
    assert sum(told.startswith("mix") for told in worker.told) == started
    worker.interrupt = None
    worker.drive(protocol)
    assert worker.clock == 10
    kept = [told for told in worker.told if told.startswith(("gradient", "settle", "step"))]
    assert kept == [told for told in whole if told.startswith(("gradient", "settle", "step"))]


def test_an_interruption_of_dasgd_takes_its_average_at_once() -> None:
    worker = ScriptedWorker(total=10, interrupt=5)
    assert worker.drive(Switch(DaSGD(4, 2), BSP(), 8)) == dasgd(5, 4, 2)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: LocalSGD(0), "local needs a whole period of at least 1; got period=0"),
        (lambda: LocalSGD(2.0), "got period=2.0"),
        (lambda: LocalSGD(True), "got period=True"),
        (lambda: DaSGD(2, 2), "0 <= delay < period.*got delay=2, period=2"),
        (lambda: DaSGD(2, -1), "whole delay of at least 0; got delay=-1"),
        (lambda: DaSGD(keep=1), "0 <= keep < 1.*got keep=1"),
        (lambda: DaSGD(keep=float("nan")), "got keep=nan"),
        (lambda: DaSGD(keep="half"), "got keep=half"),
        (lambda: DaSGD(merge="foo"), "merge=mix and merge=delta; got merge=foo"),
        (lambda: SSP(-1), "ssp needs a whole bound of at least 0, or inf; got bound=-1"),
        (lambda: SSP(2.0), "got bound=2.0"),
        (lambda: SSP(True), "got bound=True"),
        (lambda: SSP(-inf), "got bound=-inf"),
        (lambda: SSP(float("nan")), "got bound=nan"),
        (lambda: SSP("three"), "got bound='three'"),
        (lambda: SSP(lr="fast"), "ssp knows lr=plain and lr=staleness; got lr=fast"),
        (lambda: ASP("fast"), "asp knows lr=plain and lr=staleness; got lr=fast"),
        (lambda: ASP(0.1), "got lr=0.1"),
        (lambda: Switch(BSP(), BSP(), 1.5), "got at=1.5"),
        (lambda: Switch(BSP(), BSP(), -1), "got at=-1"),
        (lambda: Switch(BSP(), BSP(), True), "got at=True"),
    ],
)
def test_wrong_settings(make: object, said: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=said):
        make()


def test_a_switch_joins_protocols() -> None:
    with pytest.raises(TypeError, match="a switch joins two protocols, such as BSP"):
        Switch(BSP(), "dasgd", 0.5)


def test_homes() -> None:
    assert {SSP.home, ASP.home} == {"shards"}
    assert {BSP.home, LocalSGD.home, DaSGD.home} == {"replicas"}


@pytest.mark.parametrize("call", [lambda w: w.push(), lambda w: w.pull(after=3)])
def test_an_engine_without_shards_says_so(call: Callable[[Worker], Handle]) -> None:
    class Plain(ScriptedWorker):
        push, pull = Worker.push, Worker.pull

    for worker in (Plain(total=3), Until(Plain(total=3), 2)):
        with pytest.raises(NotImplementedError, match="Plain has no shards"):
            call(worker)


# Several workers at once, over shards that are counters: at each moment chance decides who goes on.


class Cluster:
    """Shards that count. `taken[r]` is the clock at which rank r last took parameters, `counts[r]` how many
    updates of every rank those hold, `order` the ranks of the updates as they were applied."""

    def __init__(self, protocol: Protocol, members: int, total: int):
        self.total, self.dealt, self.order = total, 0, list[int]()
        self.workers = [Pusher(self, rank, members) for rank in range(members)]
        self.taken, self.through = [0] * members, [False] * members
        self.clocks, self.counts = [0] * members, [[0] * members for _ in range(members)]
        self.staleness: list[int] = []
        self.computed: list[tuple[int, int, list[int]]] = []  # rank, clock and parameters of a gradient
        self.programs = [protocol.run(worker) for worker in self.workers]

    def live(self) -> list[int]:
        return [rank for rank, through in enumerate(self.through) if not through]

    def run(self, weights: Sequence[float], seed: int) -> Cluster:
        """To the end. A worker's weight is how likely it is the next to go on, if it need not wait."""
        chance, waiting = random.Random(seed), {}
        for rank, program in enumerate(self.programs):
            waiting[rank] = next(program, None)
        while True:
            for rank in [rank for rank, handle in waiting.items() if handle is None]:
                self.through[rank] = True
                del waiting[rank]
            if not waiting:
                return self
            able = [r for r, h in waiting.items() if not isinstance(h, Act) or h.ready()]
            assert able, f"nobody can go on: clocks {self.clocks}, taken {self.taken}"
            rank = chance.choices(able, [weights[r] for r in able])[0]
            handle = waiting[rank]
            if isinstance(handle, Act):
                handle.act()
            else:
                self.computed.append((rank, self.clocks[rank], list(self.counts[rank])))
            waiting[rank] = next(self.programs[rank], None)


class Act(Told):
    """Something that happens once `ready`."""

    def __init__(self, ready: Callable[[], bool], act: Callable[[], None]):
        super().__init__("act")
        self.ready, self.act = ready, act


class Pusher(ScriptedWorker):
    """One worker of a `Cluster`: its units are the number of its ticket."""

    def __init__(self, cluster: Cluster, rank: int, members: int):
        super().__init__(cluster.total, members)
        self.rank, self.cluster = rank, cluster
        self.units, cluster.dealt = cluster.dealt, cluster.dealt + 1
        self.done: list[int] = []

    def push(self, after: float = -inf, damped: bool = False) -> Handle:
        cluster, mine = self.cluster, self.rank

        def apply() -> None:
            cluster.staleness.append(len(cluster.order) - sum(cluster.counts[mine]))
            cluster.order.append(mine)
            self.done.append(self.units)
            self.clock = cluster.clocks[mine] = self.clock + 1
            self.units, cluster.dealt = cluster.dealt, cluster.dealt + 1

        return Act(lambda: all(cluster.taken[rank] >= after for rank in cluster.live()), apply)

    def pull(self, after: float = -inf) -> Handle:
        cluster, mine = self.cluster, self.rank

        def take() -> None:
            cluster.taken[mine] = self.clock
            cluster.counts[mine] = [cluster.order.count(rank) for rank in range(len(self.members))]

        return Act(lambda: all(cluster.clocks[rank] >= after for rank in cluster.live()), take)


clusters = st.tuples(
    st.integers(1, 5).flatmap(
        lambda n: st.lists(st.sampled_from([1.0, 1.0, 0.2, 0.01]), min_size=n, max_size=n)
    ),
    st.integers(0, 40),
    st.integers(0, 2**32),
)


@given(clusters, st.one_of(st.just(ASP()), st.builds(SSP, st.one_of(st.integers(0, 4), st.just(inf)))))
def test_every_ticket_is_done_once_and_the_bound_holds_on_both_sides(
    found: tuple[list[float], int, int], protocol: Protocol
) -> None:
    weights, total, seed = found
    cluster = Cluster(protocol, len(weights), total).run(weights, seed)
    assert sorted(ticket for worker in cluster.workers for ticket in worker.done) == list(range(total))
    assert [cluster.order.count(worker.rank) for worker in cluster.workers] == cluster.clocks
    bound = protocol.bound if isinstance(protocol, SSP) else inf
    if bound < inf:
        assert max(cluster.staleness, default=0) <= (2 * bound + 1) * (len(weights) - 1)
    for rank, clock, counts in cluster.computed:
        assert counts[rank] == clock
        for other, count in enumerate(counts):
            assert count <= clock + bound
            assert count >= min(clock - bound, cluster.clocks[other])  # those who are through add no more


@given(clusters)
def test_ssp_of_zero_computes_in_rounds_as_bsp(found: tuple[list[float], int, int]) -> None:
    weights, total, seed = found
    cluster = Cluster(SSP(0), len(weights), total).run(weights, seed)
    rounds = [cluster.order[i : i + len(weights)] for i in range(0, total, len(weights))]
    assert all(len(set(one)) == len(one) for one in rounds)
    for _, clock, counts in cluster.computed:
        assert all(count in (clock, cluster.clocks[rank]) for rank, count in enumerate(counts))


def test_under_asp_the_fast_do_more_and_ssp_holds_them_back() -> None:
    weights = [1, 1, 1, 0.1]
    asp = Cluster(ASP(), 4, 400).run(weights, 0)
    assert asp.clocks[3] < 40 < min(asp.clocks[:3])
    held = Cluster(SSP(2), 4, 400).run(weights, 0)
    assert max(held.clocks) - min(held.clocks) <= 3
    assert max(held.staleness) < max(asp.staleness)


@pytest.mark.parametrize("module", ["protocols", "worker", "plan"])
def test_the_papers_know_no_engine(module: str) -> None:
    code = f"import sys, offbeat.{module}; print(*sorted(m for m in sys.modules if m.startswith('torch')))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []
