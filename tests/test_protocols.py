"""Every protocol's generator against a worker that only writes down what it is told."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest

from offbeat.protocols import BSP, MERGES, DaSGD, LocalSGD, Protocol, Switch
from offbeat.worker import Batch, Handle, Worker


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

    def settle(self, then: Protocol | None = None) -> Handle:
        self.told.append(f"settle then {then}")
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


@pytest.mark.parametrize("module", ["protocols", "worker", "plan"])
def test_the_papers_know_no_engine(module: str) -> None:
    code = f"import sys, offbeat.{module}; print(*sorted(m for m in sys.modules if m.startswith('torch')))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []
