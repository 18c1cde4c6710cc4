"""`dasgd(auto)`: the choice, and every engine that makes it."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
from commands import Command
from hypothesis import given
from hypothesis import strategies as st

from offbeat.journal import read
from offbeat.plan import PlanError, parse, to_text
from offbeat.planner.auto import FIRST, HEADROOM, MOST, PATIENCE, Auto, Choice, first
from offbeat.planner.forms import Forms
from offbeat.protocols import DaSGD, LocalSGD
from offbeat.virtual.cluster import Straggler
from offbeat.virtual.cost import Costs
from offbeat.virtual.timing import simulate
from tests.test_forms import SMALL, cluster
from tests.test_timing import Notes


def fed(auto: Auto, times: int, t_c: float, t_p: float = 1.0) -> list[Choice]:
    found = [auto.measured(t_c, t_p) for _ in range(times)]
    return [one for one in found if one]


# The plan's word


def test_the_word() -> None:
    plan = parse("bsp:10% dasgd(auto,merge=delta)")
    assert to_text(plan) == "bsp:10% dasgd(period=auto,merge=delta)"
    assert parse(to_text(plan)) == plan
    assert DaSGD("auto").timing(3) == (4, 3)
    assert DaSGD(4, 2).timing(3) == (4, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dasgd(auto,delay=3)", r"dasgd\(auto\) chooses the delay, too: leave out delay=3"),
        ("dasgd(automatic)", "dasgd needs a whole period of at least 1, or auto; got period='automatic'"),
    ],
)
def test_the_words_errors(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        parse(text)


# The choice


def test_the_first_averages_choose_by_the_rule() -> None:
    for t_c, delay in ((0.1, 1), (0.85, 1), (0.95, 2), (2.5, 3), (100.0, MOST)):
        auto = Auto()
        assert fed(auto, FIRST - 1, t_c) == []
        (choice,) = fed(auto, 1, t_c)
        assert (choice.delay, choice.period, auto.delay) == (delay, delay + 1, delay)
        assert first(t_c, 1.0) == delay
    assert "more than 16 steps, the longest delay that is chosen, can hide" in choice.reason


def test_one_slow_average_changes_nothing() -> None:
    auto = Auto()
    fed(auto, FIRST, 0.5)
    for _ in range(10):
        assert fed(auto, PATIENCE - 1, 5.0) == []
        assert fed(auto, 1, 0.5) == []
    assert auto.delay == 1


def test_a_change_for_good_is_followed_both_ways() -> None:
    auto = Auto()
    fed(auto, FIRST, 0.5)
    (up,) = fed(auto, PATIENCE, 2.4)
    assert (up.before, up.delay) == (1, 3)
    (down,) = fed(auto, PATIENCE, 0.5)
    assert (down.before, down.delay) == (3, 1)
    assert fed(auto, 100, 0.5) == []


@given(st.lists(st.floats(0.97, 1.03), min_size=40, max_size=40))
def test_at_a_threshold_it_does_not_go_to_and_fro(noise: list[float]) -> None:
    auto, found = Auto(), []
    for factor in noise:
        found += [one] if (one := auto.measured(factor * 1.0 / HEADROOM, 1.0)) else []
    assert len(found) <= 2  # the first, and one that the noise may ask for


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(0.01, 10)), max_size=60))
def test_a_choice_is_the_same_for_the_same_figures_and_within_bounds(
    figures: list[tuple[float, float]],
) -> None:
    one, two = Auto(), Auto()
    for t_c, t_p in figures:
        assert one.measured(t_c, t_p) == two.measured(t_c, t_p)
        assert 1 <= one.delay <= MOST


def test_figures_that_are_none_are_left_out() -> None:
    auto = Auto()
    assert fed(auto, 10, 1.0, t_p=0.0) == []
    auto.forget()
    assert auto.delay == 1


# Timing only


def test_a_slow_link_is_hidden() -> None:
    found, notes = cluster(4, rate=5e6), Notes()
    simulate(DaSGD("auto"), 4 * 400, Costs(found, 0), SMALL, journal=notes, clock=notes.clock)
    (choice,) = notes.of("delay")
    assert (choice["delay"], choice["before"]) == (first(Forms(found, SMALL).averaging, 0.102), 1)
    seconds = simulate(DaSGD("auto"), 4 * 400, Costs(found, 0), SMALL).seconds
    assert seconds / 400 < 0.102 * 1.05  # the first averages, and the end's settle, are not hidden
    assert Forms(found, SMALL).of(DaSGD("auto")).seconds == pytest.approx(0.102)
    by_hand = simulate(LocalSGD(5), 4 * 400, Costs(found, 0), SMALL).seconds
    assert seconds < 0.7 * by_hand


def test_a_link_that_changes_for_good_is_followed() -> None:
    late = Straggler(inf, latency=0.15, workers=(1,), at=(20.0,))
    found, notes = replace(cluster(2, rate=1e9), stragglers=(late,)), Notes()
    simulate(DaSGD("auto"), 2 * 600, Costs(found, 0), SMALL, journal=notes, clock=notes.clock)
    before, after = notes.of("delay")
    assert (before["delay"], after["before"], after["delay"]) == (1, 1, 4)
    assert before["t"] < 3
    assert 20 < after["t"] < 24
    brief = replace(late, seconds=0.6, at=(5.0, 10.0, 15.0))
    found, notes = replace(cluster(2, rate=1e9), stragglers=(brief,)), Notes()
    simulate(DaSGD("auto"), 2 * 300, Costs(found, 0), SMALL, journal=notes, clock=notes.clock)
    assert [row["delay"] for row in notes.of("delay")] == [1]


# Real gradients

TRAIN = """
import sys, time, torch, offbeat
offbeat.init(seed=0)
model = torch.nn.Sequential(torch.nn.Linear(20, 500), torch.nn.Linear(500, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
sync = offbeat.Synchronizer(model, optimizer, "dasgd(auto)", total=int(sys.argv[1]))
for x, y in sync.batches((torch.randn(512, 20), torch.randn(512, 1)), batch_size=8):
    torch.nn.functional.mse_loss(model(x), y).backward()
    time.sleep(0.004)
    sync.step()
    if len(sys.argv) > 2 and sync.every("50%") and not sync.done:
        sync.save("checkpoint.pt")
print("end", float(sum(p.double().sum() for p in model.parameters())))
"""


@pytest.fixture
def _script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(TRAIN)


def ends(out: str) -> set[str]:
    return {line.partition("end ")[2] for line in out.splitlines() if "end " in line}


@pytest.mark.slow
@pytest.mark.usefixtures("_script")
def test_virtual_workers_choose_together() -> None:
    Path("c.toml").write_text(
        '[compute]\nunit = "100 ms"\n[link]\nrate = "2 Mbit/s"\n'
        '[[stragglers]]\nworker = 2\nat = 12\nseconds = "inf"\nlatency = "0.3 s"\n'
    )
    words = ("run", "--virtual", 3, "--cluster", "c.toml", "--out", "out", "--all-output")
    code, out, err = Command(*words, "train.py", 720, "save").end()
    assert code == 0, err
    rows = [row for row in read("out") if row["type"] == "delay"]
    assert [row["before"] for row in rows] == [1, rows[0]["delay"]]
    assert 1 < rows[0]["delay"] < rows[1]["delay"]
    assert rows[1]["t"] > 12
    assert len(ends(out)) == 1
    assert Path("checkpoint.pt").exists()


@pytest.mark.usefixtures("_script")
def test_processes_choose_together() -> None:
    code, out, err = Command("run", "-n", 2, "--out", "out", "--all-output", "train.py", 160).end()
    assert code == 0, err
    rows = [row for row in read("out") if row["type"] == "delay"]
    assert rows
    assert rows[0]["t_p"] > 0.004
    assert rows[0]["t_c"] > 0
    assert rows[0]["delay"] == first(rows[0]["t_c"], rows[0]["t_p"])
    assert len(ends(out)) == 1
