"""The policies, pure: who is a straggler, whose link is slow, and what a switch from BSP does about it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from math import inf, nan
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from offbeat.plan import parse
from offbeat.policies.detector import RULES, Detection, Detector, Look
from offbeat.policies.lookout import Lookout, Pace, own_links, shifts
from offbeat.policies.switches import POLICIES, Elastic, Greedy, Stragglers, begins_with_bsp
from offbeat.protocols import ASP, BSP, DaSGD, LocalSGD, Protocol, Switch
from offbeat.worker import Batch, Handle, Ready, Until, Worker

SEEDS = range(200)
NOISE = 0.1  # of a step's time: its standard deviation


def windows(
    seed: int, count: int, members: int, slow: Mapping[int, float] | None = None, window: int = 10
) -> list[dict[int, float]]:
    """Speeds of `count` windows. A window's time of a step is the mean of `window` steps' times, each normal
    about 1 s with 10 % noise, times a planted straggler's slowdown."""
    times = np.random.RandomState(seed).normal(1, NOISE, (count, members, window)).mean(2)
    for rank, factor in (slow or {}).items():
        times[:, rank] *= factor
    return [dict(enumerate(row)) for row in (1 / times).tolist()]


def looked(speeds: Sequence[Mapping[int, float]], settings: Detection | None = None) -> list[Look]:
    detector = Detector(settings)
    return [detector.look(row, 10.0 * k) for k, row in enumerate(speeds)]


def level(members: int, **others: float) -> dict[int, float]:
    """Speeds of 1, but for `r3=0.5`: member 3's is 0.5."""
    return dict.fromkeys(range(members), 1.0) | {int(name[1:]): speed for name, speed in others.items()}


# Who is found


def found(rule: str, members: int, slow: Sequence[int], slowdown: float) -> float:
    """Share of `SEEDS` in which all of `slow` are flagged within `count + 2` windows. Nobody else may be."""
    settings, hits = Detection(rule), 0
    for seed in SEEDS:
        rows = windows(seed, settings.count + 2, members, dict.fromkeys(slow, slowdown))
        stragglers = looked(rows, settings)[-1].stragglers
        assert stragglers <= set(slow), f"healthy members flagged with seed {seed}: {stragglers}"
        hits += stragglers == set(slow)
    return hits / len(SEEDS)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("members", "slow"), [(4, [1]), (8, [5])])
@pytest.mark.parametrize(
    ("slowdown", "least"), [(1.3, 0.95), (1.5, 1), (2, 1), (4, 1)]
)  # 1.3: 99 % of 4, all of 8 by the robust rule, all by the paper's
def test_one_straggler_is_found(
    rule: str, members: int, slow: list[int], slowdown: float, least: float
) -> None:
    assert found(rule, members, slow, slowdown) >= least


@pytest.mark.parametrize(("slowdown", "least"), [(1.3, 0.9), (1.5, 1), (2, 1), (4, 1)])  # 1.3: 95 %
def test_two_stragglers_of_four_are_found_by_the_robust_rule(slowdown: float, least: float) -> None:
    assert found("robust", 4, [0, 2], slowdown) >= least


@pytest.mark.parametrize("slowdown", [1.3, 2, 4])
def test_two_stragglers_of_four_are_never_both_found_by_the_papers_rule(slowdown: float) -> None:
    """Half of the members slow: their mean is S̄ − d, d being half the difference between the halves' means,
    and σ is d or, with any noise, more. So S̄ − σ is not above the mean of the two, never above both, and
    within `count + 2` windows both can't be flagged. (In the long run noise flags one, then the other.)"""
    assert found("paper", 4, [0, 2], slowdown) == 0
    for look in looked(windows(1, 200, 4, {0: slowdown, 2: slowdown}), Detection("paper")):
        assert not {0, 2} <= look.slow
    still = [level(4, r0=1 / slowdown, r2=1 / slowdown)] * 50
    assert not any(look.slow or look.stragglers for look in looked(still, Detection("paper")))


def test_false_alarms_of_the_robust_rule() -> None:
    count = 20_000
    alarms = sum(len(look.flagged) for look in looked(windows(0, count, 8)))
    assert 1000 * alarms / count <= 1


def test_false_alarms_of_the_papers_rule_fall_with_count() -> None:
    """Per 1,000 windows: about 1,100, 200, 30 and 6."""
    rows = windows(0, 1500, 8)
    alarms = [
        sum(len(look.flagged) for look in looked(rows, Detection("paper", count=count)))
        for count in range(1, 5)
    ]
    assert alarms[0] > 2 * alarms[1] > 4 * alarms[2] > 8 * alarms[3] > 0


def test_a_harmless_two_percent() -> None:
    rows = [level(8, r6=0.98)] * 10
    assert looked(rows, Detection("paper"))[-1].stragglers == {6}
    assert not any(look.slow for look in looked(rows))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("members", range(1, 9))
def test_equal_members_are_no_stragglers(rule: str, members: int) -> None:
    for speed in (0.0, 0.1, 1 / 3, 1e9):
        row = dict.fromkeys(range(members), speed)
        assert not any(look.slow for look in looked([row] * 5, Detection(rule)))


def test_nothing_done_at_all_is_slow() -> None:
    assert looked([level(4, r2=0.0)] * 3)[-1].flagged == (2,)


def test_of_two_members_the_robust_rule_finds_one() -> None:
    rows = [level(2, r0=0.5)] * 3
    assert looked(rows)[-1].flagged == (0,)
    assert looked(rows, Detection("paper"))[-1].flagged == ()


def test_where_the_faster_half_differs_a_straggler_must_be_slower_by_spread() -> None:
    """Of 1 and 0.8 the middle is 0.9 and the deviation 0.148: 0.6 is 1.5 times slower, by 2.02 deviations."""
    row = {0: 1.0, 1: 0.8, 2: 0.8, 3: 0.6}
    slow = [looked([row], Detection(spread=spread))[0].slow for spread in (0, 2, 2.05)]
    assert slow == [{3}, {3}, set()]
    assert looked([row])[0].limit == pytest.approx(0.9 - 3 * 1.4826 * 0.1)
    assert looked([row], Detection(spread=0))[0].limit == pytest.approx(0.9 / 1.15)


def test_one_alone_is_no_straggler() -> None:
    assert not looked([{3: 0.1}] * 5)[-1].stragglers


# Coming and going


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_count_windows_in_a_row_until_flagged_and_until_recovered(rule: str, count: int) -> None:
    slow, fast = level(8, r4=0.5), level(8)
    rows = [slow] * (count - 1) + [fast] + [slow] * count + [fast] * (count - 1) + [slow] + [fast] * count
    looks = looked(rows, Detection(rule, count=count))
    flagged = [k for k, look in enumerate(looks) if look.flagged]
    cleared = [k for k, look in enumerate(looks) if look.cleared]
    assert (flagged, cleared) == ([2 * count - 1], [len(rows) - 1])
    assert {rank for look in looks for rank in look.flagged + look.cleared} == {4}
    assert not looks[-1].stragglers


def test_who_hovers_about_the_limit_does_not_come_and_go() -> None:
    """The limit is 1 / 1.15 = 0.870; recovered is who is past half the way back, 0.935."""
    detector = Detector()
    below, above, recovered = level(8, r1=0.86), level(8, r1=0.92), level(8, r1=0.94)
    for row in [below, below, above] * 20:
        assert detector.look(row).stragglers == frozenset()
    for row in [below] * 3 + [above] * 20 + [below, above] * 20 + [recovered, recovered, above] * 20:
        look = detector.look(row)
    assert look.stragglers == {1}
    assert not look.slow
    assert [detector.look(recovered).cleared for _ in range(3)] == [(), (), (1,)]
    assert not any(detector.look(above).stragglers for _ in range(20))


def test_by_the_papers_rule_half_the_way_back_to_the_mean_is_recovered() -> None:
    def row(speed: float) -> dict[int, float]:
        return dict(enumerate([1.2, 0.8] * 4)) | {8: speed}

    detector = Detector(Detection("paper"))
    for speed in [0.3] * 3 + [0.85] * 10:  # the limit is 0.79 then, and recovered 0.89
        look = detector.look(row(speed))
    assert (look.stragglers, look.slow) == ({8}, frozenset())
    assert look.limit == pytest.approx(0.79, abs=0.005)
    assert [detector.look(row(0.9)).cleared for _ in range(3)] == [(), (), (8,)]


def test_who_is_at_the_limit_with_noise_is_flagged_once() -> None:
    looks = looked(windows(3, 2000, 8, {2: 1.15}))
    assert [look.flagged for look in looks if look.flagged] == [(2,)]
    assert not any(look.cleared for look in looks)


def test_a_missing_member_keeps_its_state_and_its_count_begins_anew() -> None:
    detector = Detector()
    slow, fast = level(4, r3=0.5), level(4)
    missing = level(3)
    for row in (slow, slow, missing, slow, slow):
        assert detector.look(row).stragglers == frozenset()
    assert detector.look(slow).flagged == (3,)
    for row in (fast, fast, *[missing] * 9, fast, fast):
        assert detector.look(row).stragglers == {3}
    assert detector.look(fast).cleared == (3,)


def test_persistent_is_told_once_and_again_after_it_was_cleared() -> None:
    detector = Detector(Detection(count=2))
    slow, fast = level(4, r1=0.5), level(4)

    def told(row: Mapping[int, float], begin: int, end: int) -> list[tuple[int, tuple[int, ...]]]:
        looks = [(at, detector.look(row, at)) for at in range(begin, end, 10)]
        return [(at, look.persistent) for at, look in looks if look.persistent]

    assert told(fast, 0, 50) == []
    assert told(slow, 50, 400) == [(160, (1,))]  # slow since 50; at 150 it is 100 s, not more
    assert told(fast, 400, 410) == []  # not cleared yet
    assert told(slow, 410, 700) == []
    assert told(fast, 700, 720) == []  # cleared
    assert told(slow, 720, 1000) == [(830, (1,))]


def test_a_slowness_is_counted_from_its_own_first_window() -> None:
    slow, fast, missing = level(4, r1=0.5), level(4), {0: 1.0, 2: 1.0, 3: 1.0}
    for between in ([fast], [missing]):
        detector = Detector(Detection(count=2))
        detector.look(slow, 0)
        for row in between:
            detector.look(row, 10)
        looks = [detector.look(slow, at) for at in (200, 210, 300, 301)]
        assert [look.persistent for look in looks] == [(), (), (), (1,)]


# What makes no difference


@st.composite
def histories(draw: st.DrawFn) -> list[dict[int, float]]:
    members = draw(st.integers(1, 8))
    speeds = st.none() | st.integers(1, 20)
    rows = draw(st.lists(st.lists(speeds, min_size=members, max_size=members), min_size=1, max_size=8))
    return [{k: float(speed) for k, speed in enumerate(row) if speed is not None} for row in rows]


settings_of = st.builds(Detection, rule=st.sampled_from(RULES), count=st.integers(1, 3))


@settings(max_examples=40)
@given(histories(), st.permutations(range(8)), settings_of)
def test_the_ranks_make_no_difference(
    rows: list[dict[int, float]], to: list[int], detection: Detection
) -> None:
    def renamed(ranks: Any) -> list[int]:
        return sorted(to[rank] for rank in ranks)

    others = looked([{to[rank]: speed for rank, speed in row.items()} for row in rows], detection)
    for look, other in zip(looked(rows, detection), others, strict=True):
        assert look.limit == other.limit
        for name in ("slow", "flagged", "cleared", "stragglers", "persistent"):
            assert renamed(getattr(look, name)) == sorted(getattr(other, name))


@settings(max_examples=40)
@given(histories(), st.integers(-40, 40), settings_of)
def test_the_unit_of_speed_makes_no_difference(
    rows: list[dict[int, float]], power: int, detection: Detection
) -> None:
    """By powers of two, which round nothing: the answers are the same even where speeds are at the limit."""
    factor = 2.0**power
    others = looked([{rank: factor * speed for rank, speed in row.items()} for row in rows], detection)
    for look, other in zip(looked(rows, detection), others, strict=True):
        assert other.limit == factor * look.limit
        for name in ("slow", "flagged", "cleared", "stragglers", "persistent"):
            assert getattr(look, name) == getattr(other, name)


@settings(max_examples=40)
@given(histories(), st.floats(1e-6, 1e6), st.sampled_from(RULES))
def test_any_factor_makes_no_difference_to_who_is_slow(
    rows: list[dict[int, float]], factor: float, rule: str
) -> None:
    for row in rows:
        look = Detector(Detection(rule)).look(row)
        assume(all(abs(speed - look.limit) > 1e-9 for speed in row.values()))
        other = Detector(Detection(rule)).look({rank: factor * speed for rank, speed in row.items()})
        assert look.slow == other.slow


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"rule": "best"}, "one of robust, paper; got 'best'"),
        ({"window": 0}, "window is a whole number from 1; got 0"),
        ({"window": 2.5}, "window is a whole number from 1; got 2.5"),
        ({"count": True}, "count is a whole number from 1; got True"),
        ({"min_slowdown": 1}, "min_slowdown is a factor above 1.*got 1"),
        ({"min_slowdown": nan}, "min_slowdown is a factor above 1.*got nan"),
        ({"min_slowdown": inf}, "min_slowdown is a factor above 1.*got inf"),
        ({"spread": -1}, "spread is a number of standard deviations from 0; got -1"),
        ({"spread": nan}, "got nan"),
        ({"recovery": 1.5}, "recovery is a share, 0 to 1; got 1.5"),
    ],
)
def test_wrong_settings_of_the_detector(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Detection(**wrong)


@pytest.mark.parametrize("speed", [-1.0, nan, inf])
def test_a_speed_that_is_none(speed: float) -> None:
    detector = Detector(Detection(count=1))
    with pytest.raises(ValueError, match=f"worker 2's speed is units per second from 0; got {speed}"):
        detector.look(level(4, r0=0.1, r2=speed))
    assert detector.stragglers == frozenset()


# What the detector is fed with


class Job:
    """Members under BSP: seconds of computing and of the exchange, and what a probe would find."""

    def __init__(self, members: int, settings: Detection | None = None, exchange: float = 0.02):
        self.lookout, self.at, self.probes = Lookout(settings), 0.0, 0
        self.busy, self.exchange = dict.fromkeys(range(members), 0.1), exchange
        self.links = dict.fromkeys(range(members), 0.0001)

    def step(self, probes: bool = True) -> None:
        most = max(self.busy.values())
        figures = {rank: (busy, self.exchange + most - busy) for rank, busy in self.busy.items()}
        assert len({round(busy + waited, 9) for busy, waited in figures.values()}) == 1  # by the wall clock
        self.lookout.step(figures, probes=probes)
        self.at += most + self.exchange

    def window(self) -> Look:
        """The steps of one window, and a probe if it is wanted."""
        for _ in range(self.lookout.settings.window):
            assert self.lookout.look(self.at) is None
            assert not self.lookout.wants_probe
            self.step()
        if self.lookout.wants_probe:
            assert self.lookout.look(self.at) is None
            self.probes += 1
            self.lookout.probed(self.links)
        look = self.lookout.look(self.at)
        assert look is not None
        return look

    def windows(self, count: int) -> list[Look]:
        return [self.window() for _ in range(count)]


def test_a_slow_processor() -> None:
    job = Job(8)
    job.windows(3)
    job.busy[5] = 0.2
    looks = job.windows(3)
    assert [look.flagged for look in looks] == [(), (), (5,)]
    assert looks[0].speeds == pytest.approx(dict.fromkeys(range(8), 1 / 0.12) | {5: 1 / 0.22})
    job.busy[5] = 0.1
    assert [look.cleared for look in job.windows(3)] == [(), (), (5,)]
    assert job.probes == 1  # the first window's


def test_a_slow_link() -> None:
    """All exchanges become longer; the probe tells by whose doing, as long as it lasts."""
    job = Job(8)
    job.windows(3)
    job.exchange, job.links[2] = 0.15, 0.01
    looks = job.windows(4)
    assert [look.flagged for look in looks] == [(), (), (2,), ()]
    assert looks[0].speeds == pytest.approx(dict.fromkeys(range(8), 1 / 0.12) | {2: 1 / 0.25})
    assert job.probes == 1 + 4
    job.exchange, job.links[2] = 0.02, 0.0001
    assert [look.cleared for look in job.windows(3)] == [(), (), (2,)]
    assert job.probes == 1 + 4 + 1


def test_a_slow_link_from_the_very_beginning() -> None:
    job = Job(8, exchange=0.15)
    job.links[7] = 0.01
    assert [look.flagged for look in job.windows(4)] == [(), (), (7,), ()]
    job.exchange, job.links[7] = 0.02, 0.0001
    assert [look.cleared for look in job.windows(3)] == [(), (), (7,)]
    job.windows(5)
    assert job.probes == 4 + 1


def test_a_slow_processor_and_a_slow_link() -> None:
    job = Job(8)
    job.windows(1)
    job.busy[0], job.exchange, job.links[4] = 0.3, 0.15, 0.01
    assert job.windows(3)[-1].flagged == (0, 4)


def test_a_link_that_costs_little_is_no_straggler() -> None:
    job = Job(8, exchange=0.001)
    job.windows(1)
    job.exchange, job.links[1] = 0.01, 0.01  # 10 times as long, and 9 % of a step
    assert not any(look.slow for look in job.windows(5))
    assert job.probes == 1


@pytest.mark.parametrize("rule", RULES)
def test_no_probe_as_long_as_the_exchange_stays_usual(rule: str) -> None:
    job, chance = Job(8, Detection(rule)), np.random.RandomState(5)
    job.links = dict(enumerate((0.001 * chance.normal(1, 0.02, 8)).tolist()))
    for _ in range(100):
        job.exchange = 0.02 * chance.normal(1, 0.2)
        job.busy = dict(enumerate(chance.normal(0.1, 0.003, 8).tolist()))
        job.window()
    assert job.probes == 1 + 1  # the second after fifty windows


def test_a_longer_exchange_with_all_links_alike_becomes_the_usual_one() -> None:
    job = Job(8)
    job.windows(2)
    job.exchange = 0.15
    job.links = dict.fromkeys(range(8), 0.01)
    assert not any(look.slow for look in job.windows(5))
    assert job.probes == 1 + 1
    job.exchange, job.links[3] = 0.6, 0.1
    looks = job.windows(3)
    assert looks[-1].flagged == (3,)
    assert looks[-1].speeds == pytest.approx(dict.fromkeys(range(8), 1 / 0.25) | {3: 1 / 0.7})


def test_two_members_cannot_tell_whose_link_is_slow() -> None:
    job = Job(2)
    job.windows(2)
    job.exchange, job.links = 0.3, own_links(range(2), echoed(2, sends={0: 0.01}))
    assert not any(look.slow for look in job.windows(5))
    assert job.probes == 1 + 1
    job.busy[1] = 0.5
    assert job.windows(3)[-1].flagged == (1,)


def test_other_members_start_a_new_window() -> None:
    job = Job(4)
    job.busy[3] = 0.2
    job.windows(2)
    for _ in range(9):
        job.step()
    del job.busy[3]
    assert set(job.window().speeds) == {0, 1, 2}
    job.busy[3] = 0.2
    assert job.windows(3)[-1].flagged == (3,)  # its count began anew


def test_another_protocol_begins_with_a_probe_and_keeps_the_stragglers() -> None:
    job = Job(4)
    job.busy[3] = 0.2
    job.windows(3)
    for _ in range(5):
        job.step()
    job.lookout.begin()
    assert job.lookout.stragglers == {3}
    assert job.window().stragglers == {3}
    assert job.probes == 2


def test_where_links_cannot_be_probed_a_long_exchange_is_nobodys() -> None:
    job = Job(8)
    for seconds in [0.02] * 3 + [0.5] * 5 + [0.02] * 3:
        job.exchange = seconds
        for _ in range(10):
            job.step(probes=False)
        assert not job.lookout.wants_probe
        look = job.lookout.look(job.at)
        assert look is not None
        assert not look.slow
    job.busy[2] = 0.2
    for _ in range(30):
        job.step(probes=False)
        job.lookout.look(job.at)
    assert job.lookout.stragglers == {2}
    job.exchange, job.links[6] = 0.5, 0.01  # now they can be
    assert job.windows(3)[-1].flagged == (6,)


def test_exchanges_of_several_steps() -> None:
    """Under local(5): figures of five steps at a time."""
    lookout = Lookout()
    for exchange in range(6):
        figures = {rank: (1.0 if rank == 1 else 0.5, 0.1 if rank == 1 else 0.6) for rank in range(4)}
        lookout.step(figures, steps=5, probes=False)
        look = lookout.look(float(exchange))
        assert (look is None) == (exchange % 2 == 0)
    assert look is not None
    assert look.flagged == (1,)
    assert look.speeds == pytest.approx(dict.fromkeys(range(4), 1 / 0.12) | {1: 1 / 0.22})


# Whose link it is


def echoed(
    members: int, sends: Mapping[int, float] | None = None, receives: Mapping[int, float] | None = None
) -> list[list[float]]:
    """Seconds in which each member had back what it had sent to the one `shift` after it: 0.2 ms, up to half
    of that for chance, and what the sending and the receiving of the two add."""
    sends, receives, chance = sends or {}, receives or {}, np.random.RandomState(members)
    return [
        [
            2e-4 * chance.uniform(1, 1.5)
            + sum(d.get(one, 0) for d in (sends, receives) for one in (index, (index + shift) % members))
            for shift in shifts(members)
        ]
        for index in range(members)
    ]


@pytest.mark.parametrize("members", [3, 4, 5, 8])
@pytest.mark.parametrize("directions", ["sends", "receives", "both"])
def test_one_slow_link_stands_out(members: int, directions: str) -> None:
    ranks = [3 * index + 1 for index in range(members)]  # the members need not be the first ranks
    for slow in range(members):
        delays = {slow: 0.01}
        rows = echoed(
            members,
            sends=delays if directions != "receives" else None,
            receives=delays if directions != "sends" else None,
        )
        links = own_links(ranks, rows)
        assert list(links) == ranks
        assert [rank for rank, seconds in links.items() if seconds > 0.005] == [ranks[slow]]
        assert max(seconds for rank, seconds in links.items() if rank != ranks[slow]) < 3.1e-4


@pytest.mark.parametrize("members", [4, 5, 6, 8])
def test_two_slow_links_are_told_from_their_neighbours(members: int) -> None:
    for pair in itertools.combinations(range(members), 2):
        links = own_links(range(members), echoed(members, sends=dict.fromkeys(pair, 0.01)))
        assert tuple(rank for rank, seconds in links.items() if seconds > 0.005) == pair


def test_between_two_members_a_slow_link_is_nobodys() -> None:
    for rows in (echoed(2, sends={0: 0.01}), echoed(2, receives={0: 0.01})):
        links = own_links(range(2), rows)
        assert links[0] == links[1] > 0.01


def test_shifts() -> None:
    assert [list(shifts(members)) for members in range(1, 6)] == [[], [1], [1, 2], [1, 2, 3], [1, 2, 3]]
    assert own_links([4], [[]]) == {4: 0}


# Speeds on shards


def test_pace() -> None:
    pace = Pace(10)
    assert pace.speeds({0: (0, 0.0), 1: (0, 0.0), 2: (0, 0.0)}, at=5) is None
    # Worker 1 is half as fast; worker 2 has told nothing yet: it has done fewer than 10 in 10 seconds.
    assert pace.speeds({0: (10, 10.0), 1: (10, 20.0), 2: (0, 0.0)}, at=15) == {0: 1, 1: 0.5, 2: 1}
    assert pace.speeds({0: (20, 20.0), 1: (10, 20.0), 2: (0, 0.0)}, at=25) == {0: 1, 1: 0.5, 2: 0.5}
    assert pace.speeds({0: (30, 30.0), 1: (20, 30.0), 2: (0, 0.0)}, at=45) == {0: 1, 1: 1, 2: 0.25}
    assert pace.speeds({0: (40, 40.0), 1: (40, 50.0), 2: (10, 45.0)}, at=55) == pytest.approx(
        {0: 1, 1: 1, 2: 10 / 45}
    )


# The switches, against a worker that only writes down what it is told


class Told(Handle):
    def __init__(self, name: str):
        self.name = name

    def wait(self) -> None:
        return None


class Mine(Batch):
    """A batch that remembers whether its gradient was to be the members' mean."""

    def __init__(self, mean: bool):
        self.name = "gradient(mean)" if mean else "gradient"


class Scripted(Worker):
    """Records the verbs, and the waits, as text. `members` workers march in step through a job of `total`
    units. slow: who is flagged, from which `clock` (or `by="units"`: units) on. `interrupt` is a clock at
    which `running` turns false, as it does for a checkpoint. `steps`: protocol, members and stragglers of
    each step."""

    rank = 0
    members: Sequence[int] = ()
    clock = 0
    units = 0

    def __init__(
        self,
        slow: Mapping[int, set[int] | frozenset[int]] | None = None,
        total: int = 80,
        members: int = 4,
        by: str = "clock",
        interrupt: int | None = None,
    ):
        self.slow, self.total, self.by, self.interrupt = slow or {}, total, by, interrupt
        self.everybody = self.members = list(range(members))
        self.under_bsp = 0
        self.told: list[str] = []
        self.steps: list[tuple[str, frozenset[int], frozenset[int]]] = []

    @property
    def progress(self) -> float:
        return self.units / self.total

    @property
    def running(self) -> bool:
        return self.units < self.total and self.clock != self.interrupt

    @property
    def stragglers(self) -> frozenset[int]:
        since = [at for at in self.slow if at <= getattr(self, self.by)]
        return frozenset(self.slow[max(since)]) if since else frozenset()

    def served(self, protocol: Protocol, at: float | int) -> bool:
        assert protocol == BSP()
        return (self.under_bsp if isinstance(at, int) else self.under_bsp / self.total) >= at

    def gradient(self, mean: bool = False) -> Handle:
        self.mean = mean
        return Mine(mean)

    def _stepped(self, protocol: str) -> None:
        self.steps.append((protocol, frozenset(self.members), self.stragglers))
        self.clock += 1
        self.units += len(self.members)
        self.under_bsp += len(self.members) if protocol == "bsp" else 0

    def step(self) -> None:
        self.told.append("step")
        self._stepped("bsp" if self.mean else "local")

    def average(self, snapshot: bool = False) -> Handle:
        self.told.append("average")
        return Told("averaged")

    def mix(self, mean: Handle, keep: float) -> None:
        self.told.append("mix")

    def shift(self, mean: Handle, keep: float) -> None:
        self.told.append("shift")

    def push(self, after: float = -inf, damped: bool = False) -> Handle:
        assert self.members == self.everybody
        self.told.append("push")
        self._stepped("asp")
        return Told("applied")

    def pull(self, after: float = -inf) -> Handle:
        self.told.append("pull")
        return Told("taken")

    def exclude(self, ranks: frozenset[int]) -> Handle:
        assert ranks
        assert ranks < set(self.members)
        self.told.append(f"exclude {sorted(ranks)}")
        self.members = [rank for rank in self.members if rank not in ranks]
        return Told("excluded")

    def readmit(self) -> Handle:
        if self.members == self.everybody:
            return Ready()
        self.told.append("readmit")
        self.members = self.everybody
        return Told("readmitted")

    def settle(self, then: Protocol | None = None) -> Handle:
        self.told.append(f"settle then {then and then.current(self)}")
        return Told("settled")

    def drive(self, protocol: Protocol) -> list[str]:
        """Runs `protocol` to its end. Returns all that was told and waited for."""
        for handle in protocol.run(self):
            if not isinstance(handle, Ready):
                assert isinstance(handle, Mine | Told)
                self.told.append(handle.name if isinstance(handle, Mine) else f"wait {handle.name}")
        return self.told


def bsp(steps: int) -> list[str]:
    return ["gradient(mean)", "step"] * steps


def asp(steps: int) -> list[str]:
    return ["gradient", "push", "wait applied", "pull", "wait taken"] * steps


def settle(then: str) -> list[str]:
    return [f"settle then {then}", "wait settled"]


def exclude(*ranks: int) -> list[str]:
    return [f"exclude {list(ranks)}", "wait excluded"]


READMIT = ["readmit", "wait readmitted"]

# 4 members, 80 units: 20 steps of all. The BSP share is 32 units, 8 steps of all.
PLAN = Switch(BSP(), ASP(), 32)
GREEDY, ELASTIC = Greedy(BSP(), ASP(), 32), Elastic(BSP(), ASP(), 32)
ONCE = {3: {1}, 6: set[int]()}


def test_greedy_goes_to_asp_and_comes_back() -> None:
    """The share is served in full: 3 and 5 steps, and the switch comes at the 11th instead of the 8th."""
    told = [
        *[*bsp(3), *settle("asp")],
        *[*asp(3), *settle("bsp")],
        *[*bsp(5), *settle("asp")],
        *asp(9),
    ]
    assert Scripted(ONCE).drive(GREEDY) == told
    assert Scripted(ONCE).drive(Greedy(BSP(), ASP(), 0.4)) == told
    assert Scripted({12: {1}, 24: set()}, by="units").drive(GREEDY) == told


class Late(Scripted):
    """Claims its first unit of a detour when nobody is slow any more: asking whether it runs tells it so."""

    calm = False

    @property
    def running(self) -> bool:
        self.calm = self.told[-1:] == ["wait settled"]
        return super().running

    @property
    def stragglers(self) -> frozenset[int]:
        return frozenset() if self.calm else super().stragglers


def test_greedy_does_nothing_in_a_detour_that_is_over_already() -> None:
    worker = Late({2: {1}})
    told = worker.drive(Greedy(BSP(), ASP(), 32))
    begun = len(bsp(2))
    assert told[begun : begun + 4] == settle("asp") + settle("bsp")


def test_greedy_doesnt_mind_a_second_straggler_during_a_detour() -> None:
    overlapping = {3: {1}, 4: {1, 2}, 5: {2}, 6: set[int]()}
    assert Scripted(overlapping).drive(GREEDY) == Scripted(ONCE).drive(GREEDY)


def test_greedy_with_two_detours() -> None:
    assert Scripted({2: {0}, 4: set(), 5: {3}, 6: set()}).drive(GREEDY) == [
        *[*bsp(2), *settle("asp")],
        *[*asp(2), *settle("bsp")],
        *[*bsp(1), *settle("asp")],
        *[*asp(1), *settle("bsp")],
        *[*bsp(5), *settle("asp")],
        *asp(9),
    ]


def test_greedy_with_a_straggler_that_stays() -> None:
    """The rest is under ASP, and the share is never served."""
    assert Scripted({3: {1}}).drive(GREEDY) == [*bsp(3), *settle("asp"), *asp(17)]


def test_greedy_with_a_straggler_from_the_beginning() -> None:
    """ASP is in charge at once: there is nothing to settle."""
    worker = Scripted({0: {1}, 2: set()})
    assert GREEDY.current(worker) == ASP()
    assert worker.drive(GREEDY) == [*asp(2), *settle("bsp"), *bsp(8), *settle("asp"), *asp(10)]


@pytest.mark.parametrize("protocol", [GREEDY, ELASTIC])
@pytest.mark.parametrize("clock", [8, 12])
def test_after_the_share_nothing_is_done(protocol: Switch, clock: int) -> None:
    """Nor if somebody is flagged at the very moment of the switch."""
    worker = Scripted({clock: {1}, clock + 3: set()})
    assert worker.drive(protocol) == [*bsp(8), *settle("asp"), *asp(12)]


def test_greedy_takes_what_comes_next_in_the_plan_for_a_detour() -> None:
    """Positions count from the job's beginning, the share by what was done: a detour may go past them."""
    plan = Stragglers("greedy").apply(parse("bsp:32u asp:48u local(period=100)"))
    local = ["gradient", "step"]
    assert Scripted({3: {1}, 14: set()}).drive(plan) == [
        *[*bsp(3), *settle("asp")],
        *[*asp(9), *settle("local(period=100)")],  # at 48 units
        *[*local * 2, *settle("bsp")],
        *[*bsp(5), *settle("local(period=100)")],
        *local,
    ]


def test_elastic_goes_on_without_a_straggler_to_the_end_of_the_share() -> None:
    """12 units by four, 21 by three (one too many). That it has recovered meanwhile makes no difference."""
    told = [*bsp(3), *exclude(1), *bsp(7), *READMIT, *settle("asp"), *asp(12)]
    assert Scripted(ONCE).drive(ELASTIC) == told
    assert Scripted({3: {1}}).drive(ELASTIC) == told
    assert Scripted({3: {1}}).drive(Elastic(BSP(), ASP(), 0.4)) == told
    assert Scripted({12: {1}}, by="units").drive(ELASTIC) == told


def test_elastic_with_two_stragglers() -> None:
    told = [*bsp(2), *exclude(1, 3), *bsp(12), *READMIT, *settle("asp"), *asp(12)]
    assert Scripted({2: {1, 3}}).drive(ELASTIC) == told
    one_by_one = [*bsp(2), *exclude(3), *bsp(4), *exclude(0), *bsp(6), *READMIT, *settle("asp"), *asp(12)]
    assert Scripted({2: {3}, 6: {0, 3}}).drive(ELASTIC) == one_by_one


def test_elastic_may_try_whether_a_straggler_is_fast_again() -> None:
    """Every 5 steps: 12 units by four, 6 by three, and from 18 units on by all."""
    tries = Elastic(BSP(), ASP(), 32, trial=5)
    away = [*bsp(3), *exclude(1), *bsp(2), *READMIT]
    assert Scripted({3: {1}, 5: set()}).drive(tries) == [*away, *bsp(4), *settle("asp"), *asp(12)]
    again = [*away, *bsp(2), *exclude(1), *bsp(2), *READMIT, *settle("asp"), *asp(12)]
    assert Scripted({3: {1}, 5: set(), 7: {1}}).drive(tries) == again
    assert Scripted({}).drive(tries) == [*bsp(8), *settle("asp"), *asp(12)]
    new = [*bsp(3), *exclude(1), *bsp(2), *exclude(2), *bsp(5), *READMIT, *bsp(1), *settle("asp"), *asp(12)]
    assert Scripted({3: {1}, 5: {1, 2}, 10: set()}).drive(tries) == new


def test_elastic_keeps_the_least_members() -> None:
    three, four = (Elastic(BSP(), ASP(), 32, least) for least in (3, 4))
    rest = [*READMIT, *settle("asp"), *asp(12)]
    assert Scripted({3: {1, 2}}).drive(three) == [*bsp(3), *exclude(2), *bsp(7), *rest]
    assert Scripted({3: {2}, 4: {0, 1}}).drive(three) == [*bsp(3), *exclude(2), *bsp(7), *rest]
    assert Scripted({3: {0, 1, 2, 3}}).drive(ELASTIC) == [*bsp(3), *exclude(2, 3), *bsp(10), *rest]
    for least in (four, Elastic(BSP(), ASP(), 32, 5)):
        assert Scripted({3: {1, 2}}).drive(least) == [*bsp(8), *settle("asp"), *asp(12)]


@pytest.mark.parametrize("protocol", [GREEDY, ELASTIC])
@pytest.mark.parametrize("slow", [ONCE, {0: {2}, 1: set()}, {2: {0}, 4: set(), 5: {3}, 6: set()}, {3: {1}}])
def test_an_interruption_at_any_step_goes_on_where_it_was(
    protocol: Switch, slow: dict[int, set[int]]
) -> None:
    """A checkpoint, under BSP, in a detour and at each of their boundaries: nothing is told twice, nor left
    out."""
    whole = Scripted(slow)
    whole.drive(protocol)
    for clock in range(whole.clock + 1):
        worker = Scripted(slow, interrupt=clock)
        before = list(worker.drive(protocol))
        assert worker.clock == clock
        assert before == whole.told[: len(before)]
        worker.interrupt = None
        assert worker.drive(protocol) == whole.told
        assert worker.steps == whole.steps


def test_an_interruption_that_called_the_excluded_back() -> None:
    worker = Scripted({3: {1}}, interrupt=5)
    assert worker.drive(ELASTIC) == [*bsp(3), *exclude(1), *bsp(2)]
    worker.interrupt, worker.members = None, worker.everybody
    assert worker.drive(ELASTIC) == [
        *[*bsp(3), *exclude(1), *bsp(2)],
        *[*exclude(1), *bsp(5), *READMIT, *settle("asp"), *asp(12)],
    ]


@pytest.mark.parametrize("policy", ["greedy", "elastic"])
@pytest.mark.parametrize(
    "plan",
    [
        *[Switch(BSP(), ASP(), at) for at in (0, 0.0, 1, 30, 32, 0.4, 80, 1.0, 81)],
        parse("bsp:32u asp:48u bsp"),
        parse("bsp:10% local(2):50% dasgd(4,2)"),
        Switch(Switch(BSP(), LocalSGD(2), 0.1), DaSGD(4, 2), 0.5),
        Switch(LocalSGD(2), BSP(), 0.5),
        BSP(),
    ],
    ids=repr,
)
def test_without_stragglers_all_is_as_in_a_switch(policy: str, plan: Protocol) -> None:
    applied = Stragglers(policy).apply(plan)
    whole = Scripted().drive(plan)
    assert Scripted().drive(applied) == whole
    for clock in (0, 2, 8, 11):
        worker, other = Scripted(interrupt=clock), Scripted(interrupt=clock)
        assert worker.drive(applied) == other.drive(plan)


tables = st.dictionaries(st.integers(0, 25), st.frozensets(st.integers(0, 3)), max_size=8)


@settings(max_examples=40)
@given(tables)
@example({3: {1}, 6: set()})
def test_greedy_has_bsp_only_without_stragglers_and_serves_its_share(slow: dict[int, frozenset[int]]) -> None:
    worker = Scripted(slow)
    worker.drive(GREEDY)
    assert worker.clock == 20
    served = 0
    for protocol, members, stragglers in worker.steps:
        assert protocol == ("asp" if stragglers or served >= 32 else "bsp")
        assert len(members) == 4
        served += 4 * (protocol == "bsp")
    words = [told.split()[-1] for told in worker.told if told.startswith("settle")]
    first = worker.steps[0][0]
    assert words == [("asp", "bsp")[(k + (first == "asp")) % 2] for k in range(len(words))]
    assert served == 32 or worker.steps[-1][2] or len([s for s in worker.steps if not s[2]]) < 8


@settings(max_examples=40)
@given(tables, st.integers(1, 5))
def test_elastic_has_no_removable_straggler_and_readmits_once(
    slow: dict[int, frozenset[int]], least: int
) -> None:
    worker = Scripted(slow)
    worker.drive(Elastic(BSP(), ASP(), 32, least))
    assert worker.members == worker.everybody
    for protocol, members, stragglers in worker.steps:
        assert len(members) >= min(least, 4)
        assert protocol == "bsp" or len(members) == 4
        if protocol == "bsp":
            assert not members & stragglers or len(members) <= least
    assert 32 <= worker.under_bsp < 36
    excluded = any(told.startswith("exclude") for told in worker.told)
    assert worker.told.count("readmit") == excluded
    settled = worker.told.index("settle then asp")
    assert worker.told[settled - 2 : settled] == (READMIT if excluded else ["gradient(mean)", "step"])
    assert sum(told.startswith("settle") for told in worker.told) == 1


def test_an_engine_whose_members_dont_change_says_so() -> None:
    class Rigid(Scripted):
        exclude, readmit = Worker.exclude, Worker.readmit
        served, stragglers = Worker.served, Worker.stragglers

    for worker in (Rigid(), Until(Rigid(), 40)):
        with pytest.raises(NotImplementedError, match="the members of Rigid don't change"):
            worker.exclude(frozenset({1}))
        assert isinstance(worker.readmit(), Ready)
        assert worker.stragglers == frozenset()
    for protocol in (GREEDY, ELASTIC):
        assert Rigid().drive(protocol) == Scripted().drive(PLAN)


# Plans with a policy


@pytest.mark.parametrize(
    "text",
    [
        "bsp:6.25% asp",
        "bsp:4000u local:50% dasgd",
        "bsp:12.5% asp:50% ssp(bound=1):75% bsp",
    ],
)
@pytest.mark.parametrize(("policy", "kind"), [("greedy", Greedy), ("elastic", Elastic)])
def test_a_plans_first_switch_gets_the_policy(text: str, policy: str, kind: type[Switch]) -> None:
    plan = parse(text)
    assert isinstance(plan, Switch)
    applied = Stragglers(policy, min_members=3).apply(plan)
    assert type(applied) is kind
    assert isinstance(applied, Switch)
    assert (applied.first, applied.then, applied.at) == (plan.first, plan.then, plan.at)
    assert str(applied) == str(plan) == text
    assert parse(str(applied)) == plan
    if isinstance(applied, Elastic):
        assert applied.least == 3


@pytest.mark.parametrize("policy", ["greedy", "elastic"])
def test_plans_nested_to_the_left_are_turned(policy: str) -> None:
    """Else a position of the outer switch would cut greedy's share off."""
    plan: Protocol = BSP()
    for then, at in ((LocalSGD(2), 0.2), (DaSGD(4, 2), 0.4), (ASP(), 0.6)):
        plan = Switch(plan, then, at)
    applied = Stragglers(policy).apply(plan)
    assert applied == Stragglers(policy).apply(parse(str(plan)))
    assert str(applied) == str(plan)
    assert isinstance(applied, Switch)
    assert applied.first == BSP()
    left = Switch(PLAN, LocalSGD(100), 48)
    if policy == "greedy":
        worker = Scripted({3: {1}, 14: set()})
        worker.drive(Stragglers(policy).apply(left))
        assert worker.under_bsp == 32


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("text", ["bsp", "asp", "local:50% bsp", "asp:10% bsp:50% asp"])
def test_plans_without_a_switch_from_bsp_at_their_beginning_stay_as_they_are(policy: str, text: str) -> None:
    plan = parse(text)
    assert not begins_with_bsp(plan)
    assert Stragglers(policy).apply(plan) is plan


@pytest.mark.parametrize("policy", ["off", "observe"])
def test_policies_that_do_nothing_leave_the_plan_alone(policy: str) -> None:
    assert begins_with_bsp(PLAN)
    assert Stragglers(policy).apply(PLAN) is PLAN


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Stragglers("best"), "--stragglers is one of off, observe, greedy, elastic; got 'best'"),
        (lambda: Stragglers(min_members=0), "min_members is a whole number from 1; got 0"),
        (lambda: Stragglers(min_members=True), "got True"),
        (lambda: Stragglers.parse("elastic count=3"), "--stragglers 'elastic count=3': write off"),
        (lambda: Stragglers.parse("elastic(c=3)"), "'c=3' is no setting; valid are rule, window"),
        (lambda: Stragglers.parse("elastic(3)"), "'3' is no setting"),
        (lambda: Stragglers.parse("elastic(count=3.5)"), "count is a whole number; got '3.5'"),
        (lambda: Stragglers.parse("elastic(count=0)"), "count is a whole number from 1; got 0"),
        (lambda: Stragglers.parse("elastic(spread=wide)"), "spread is a number; got 'wide'"),
        (lambda: Stragglers.parse("lazy(count=3)"), "got 'lazy'"),
        (lambda: Stragglers(trial=-1), "trial is a whole number of steps, or 0 for never; got -1"),
    ],
)
def test_wrong_policies(make: Callable[[], Stragglers], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        make()


@given(
    st.builds(
        Stragglers,
        st.sampled_from(POLICIES),
        st.builds(
            Detection,
            st.sampled_from(RULES),
            st.integers(1, 99),
            st.integers(1, 9),
            st.floats(1.01, 9),
            st.floats(0, 9),
            st.floats(0, 1),
        ),
        st.integers(1, 9),
        st.integers(0, 9),
    )
)
def test_a_policys_text_means_the_policy(policy: Stragglers) -> None:
    assert Stragglers.parse(str(policy)) == policy
    assert Stragglers.parse(f" {str(policy).replace(',', ' , ')} ") == policy


def test_texts_of_policies() -> None:
    assert str(Stragglers("greedy")) == "greedy"
    assert Stragglers.parse("elastic(min_slowdown=1.3, count=5, min_members=3)") == Stragglers(
        "elastic", Detection(min_slowdown=1.3, count=5), 3
    )
