"""`offbeat profile`: fits, the file that it writes, and a real one."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest
from commands import Command
from hypothesis import given
from hypothesis import strategies as st

from offbeat.planner import writing
from offbeat.planner.devices import DEVICES
from offbeat.planner.fit import KEPT, Fit, Kind, Point, line
from offbeat.planner.forms import Forms
from offbeat.planner.known import environment, text_of
from offbeat.protocols import BSP, DaSGD
from offbeat.virtual.cluster import Allreduce, Cluster, Compute, Group, Link, ShardService
from offbeat.virtual.cost import Costs
from offbeat.virtual.description import read
from offbeat.virtual.model import Model

MODEL = Model((60_000, 300, 40_000), buffers=80, state=2.0)
ABOUT = writing.About(
    script="train.py",
    model=MODEL,
    passed=(1.0, 0.6, 0.4),
    wire=1.0,
    batch=32,
    samples=1000,
    forward=2e6,
    backward=4e6,
    device="NVIDIA A100-SXM4-80GB",
    known=DEVICES["A100"],
    in_flight=1,
    notes=[],
)


def fit(nodes: tuple[int, ...] = (0, 1, 2, 3), slow: tuple[float, ...] = ()) -> Fit:
    """What would be measured on a cluster whose all-reduces are rings with an overhead of 3 ms."""
    link = Link(25e6, 2e-3)
    group = Group(len(nodes), len(nodes) // len(set(nodes)), 1.0, Compute(0.1), link)
    inside = Link(1e12, 0.0)
    found = Cluster(
        "x", "x", len(nodes), (group,), 0.6, inside, Allreduce("ring", 3e-3), ShardService(2e9, 1e-4)
    )
    costs = Costs(found, 0)
    members = tuple(range(len(nodes)))
    points = [Point(size, costs.allreduce(size, members, 0.0)) for size in (100_000, 400_000, 800_000)]
    scales = slow or (1.0,) * len(nodes)
    units = [[scale * unit for unit in (0.09, 0.1, 0.1, 0.11)] for scale in scales]
    apart = len(set(nodes)) > 1
    return Fit(
        nodes, units, 0.002, 0.6, None if apart else 0.0, link.latency if apart else None, points, 0.02, 0.03
    )


def test_a_fit_finds_the_links_again() -> None:
    found = fit()
    assert found.rate == pytest.approx(25e6)
    assert found.overhead == pytest.approx(3e-3)
    assert (found.hosts, found.per_host) == (4, 1)


@given(fixed=st.floats(0, 1), slope=st.floats(1e-9, 1e-3), sizes=st.sets(st.integers(1, 10**7), min_size=2))
def test_a_line_through_points_on_a_line(fixed: float, slope: float, sizes: set[int]) -> None:
    found = line([Point(size, fixed + slope * size) for size in sorted(sizes)])
    assert found.per_byte == pytest.approx(slope, rel=1e-3, abs=1e-12)


def test_one_outlier_does_not_move_a_line() -> None:
    points = [Point(size, 1e-3 + 1e-8 * size) for size in range(10**5, 10**6, 10**5)]
    points[4] = Point(points[4].size, 1.0)
    assert line(points).per_byte == pytest.approx(1e-8, rel=0.05)


def test_workers_that_differ_are_groups_of_their_own() -> None:
    assert fit().kinds() == [Kind(None, 1.0)]
    assert fit(slow=(1.0, 1.05, 1.0, 2.0)).kinds() == [Kind(None, 1.0), Kind(1, 2.0)]
    assert fit(slow=(3.0, 1.0, 1.0, 1.0)).kinds() == [Kind(1, 3.0), Kind(None, 1.0)]
    # On one host there are no groups: the distribution has the differences.
    shared = fit(nodes=(0, 0, 1, 1), slow=(1.0, 2.0, 1.0, 1.0))
    assert shared.kinds() == [Kind(None, 1.0)]
    assert max(shared.samples()) == pytest.approx(0.22)


def test_many_samples_become_few_of_the_same_mean() -> None:
    units = [[0.1 + 0.001 * ((7 * i) % 101) for i in range(1000)]]
    found = Fit([0], units, 0.0, 0.5, None, None, (), None, None).samples()
    assert len(found) == KEPT
    assert fmean(found) == pytest.approx(fmean(units[0]))


def test_round_trip(tmp_path: Path) -> None:
    """What is written is a cluster, and it costs what was measured."""
    path = tmp_path / "profile.toml"
    measured = fit(slow=(1.0, 1.0, 1.0, 2.0))
    path.write_text(writing.toml(measured, ABOUT))
    found = read(path)
    assert (found.size, found.backward) == (4, 0.6)
    assert [group.slow for group in found.groups] == [1.0, 2.0]
    assert found.model is not None
    assert Model.of(found.model) == Model(MODEL.sizes, 4, 80, 2.0, (1.0, 0.6, 0.4))
    profile = found.profile
    assert profile is not None
    assert (profile.batch, profile.samples, profile.flop) == (32, 1000, 6e6)
    assert profile.units == pytest.approx((0.1, 0.1, 0.1, 0.2))
    assert profile.efficiency == pytest.approx(32 * 6e6 / 0.1 / 19.5e12, abs=1e-4)
    assert found.allreduce.in_flight == 1
    costs = Costs(found, 0)
    for size, seconds in measured.points:
        assert costs.allreduce(size, tuple(range(4)), 0.0) == pytest.approx(seconds, rel=1e-4)
    traffic = costs.traffic()
    _, arrived = traffic.pull(0, MODEL.size, traffic.push(0, MODEL.size, 0.0))
    assert arrived == pytest.approx(0.05, rel=0.02)  # push and pull, as measured
    assert found.sized(64).size == 64


def test_a_model_of_one_tensor_and_one_worker(tmp_path: Path) -> None:
    from dataclasses import replace

    path = tmp_path / "profile.toml"
    alone = Fit([0], [[0.1, 0.2]], 0.0, 0.5, None, None, (), None, None)
    path.write_text(writing.toml(alone, replace(ABOUT, model=Model((9,)), passed=(1.0,), known=None)))
    found = read(path)
    assert found.model is not None
    assert found.model.sizes == (9,)
    assert found.profile is not None
    assert found.profile.efficiency is None
    assert found.sized(1).groups[0].compute.unit == pytest.approx(0.15)


def test_the_plan_under_which_a_script_is_profiled() -> None:
    assert environment("p.toml", 20, 4)["OFFBEAT_PLAN"] == "local(period=1000000000):80u asp"
    assert environment("p.toml", 20, 4, shards=False)["OFFBEAT_PLAN"] == "local(period=1000000000)"
    assert environment("p.toml", 20, 1)["OFFBEAT_PLAN"] == "local(period=1000000000)"


TRAIN = """
import sys, time, torch, offbeat
offbeat.init(seed=0, out=False)
model = torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.Linear(50, 3))
sync = offbeat.Synchronizer(model, torch.optim.SGD(model.parameters(), 0.01, momentum=0.9), epochs=1)
for x, y in sync.batches((torch.randn(64, 40), torch.zeros(64, dtype=int)), batch_size=16):
    loss = torch.nn.functional.cross_entropy(model(x), y)
    time.sleep(0.02)
    loss.backward()
    sync.step()
sys.exit("went on training")
"""


@pytest.mark.parametrize("workers", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_a_real_profile(workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(TRAIN)
    code, out, err = Command("profile", "-n", workers, "--steps", 12, "train.py").end()
    assert code == 0, err
    assert "wrote profile.toml" in out
    found = read("profile.toml")
    assert found.size == workers
    assert found.groups[0].compute.unit >= 0.02
    assert found.model is not None
    assert found.model.sizes == (2000, 50, 150, 3)
    profile = found.profile
    assert profile is not None
    assert profile.text == text_of("train.py")
    assert (profile.batch, profile.samples) == (16, 64)
    assert profile.flop == 2 * (2 * 2000 + 3 * 150)
    assert len(profile.units) == workers
    assert (profile.push is None) == (workers == 1)
    forms = Forms(found.sized(8), Model.of(found.model))
    assert forms.of(BSP()).seconds >= forms.of(DaSGD(2, 1)).computing
    assert not Path("runs").exists()


def test_errors_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from offbeat.cli import app

    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["profile", "none.py"])
    assert (done.exit_code, "there is no script none.py" in done.output) == (2, True)
    done = CliRunner().invoke(app, ["profile", "--steps", "3", "none.py"])
    assert "--steps 3: at least 10" in done.output
