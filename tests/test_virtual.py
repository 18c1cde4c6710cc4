"""The contract suite over virtual workers, and their parity with processes and with timing-only runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from offbeat import journal
from offbeat.plan import parse
from offbeat.policies.switches import Stragglers
from offbeat.virtual.timing import Model, simulate
from tests import scripts
from tests.contract import Contract
from tests.contract_parity import apart
from tests.engines import RealEngine, VirtualEngine, costs_of
from tests.scripts import Setup
from tests.test_timing import Notes

FOUR_HOSTS = Path(__file__).with_name("hosts.toml").read_text()

PLANS = ["bsp", "local(4)", "dasgd(4,2)", "dasgd(4,3,0.5,delta)", "bsp:25% dasgd(3,1):75% local(2)"]


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> VirtualEngine:
    return VirtualEngine(tmp_path_factory.mktemp("virtual"))


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory) -> RealEngine:
    return RealEngine(tmp_path_factory.mktemp("real"))


class TestVirtual(Contract):
    pass


@pytest.mark.parametrize("plan", [*PLANS, "ssp(0)", "bsp:25% ssp(0):75% bsp"])
@pytest.mark.parametrize("workers", [2, 3])
def test_parameters_are_those_of_processes(
    engine: VirtualEngine, real: RealEngine, plan: str, workers: int
) -> None:
    momentum = 0.0 if "ssp" in plan else 0.9  # pushes of one round come in any order
    setup = Setup(plan, 12 * workers, "plain" if "ssp" in plan else "mlp", momentum=momentum)
    found = (one.run(workers, scripts.train, setup) for one in (engine, real))
    for one, other in zip(*found, strict=True):
        assert apart(one.final, other.final) <= 1e-12


@pytest.mark.parametrize("plan", PLANS)
def test_two_workers_have_the_bits_of_two_processes(
    engine: VirtualEngine, real: RealEngine, plan: str
) -> None:
    setup = Setup(plan, 24, "pictures", momentum=0.9, decay=5e-4, dtype=torch.float32)
    found = (one.run(2, scripts.train, setup) for one in (engine, real))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one.final, other.final)


STRAGGLER = """
[[stragglers]]
worker = 3
at = 0
seconds = "inf"
slow = 3
"""


@pytest.mark.parametrize("extra", ["", STRAGGLER], ids=["equal", "straggler"])
@pytest.mark.parametrize(
    "plan", [*PLANS, "dasgd(2,1)", "asp", "ssp(1)", "bsp:50% asp", "asp:24u bsp", "local(3):50% ssp(2)"]
)
def test_with_gradients_and_without_takes_the_same_time(tmp_path: Path, plan: str, extra: str) -> None:
    cluster = tmp_path / "four.toml"
    cluster.write_text(FOUR_HOSTS + extra)
    one = VirtualEngine(tmp_path, cluster)
    one.run(4, scripts.weighty, Setup(plan, 60, momentum=0.9), hosts=range(4))
    (end,) = [row for row in journal.read(one.out) if row["type"] == "end"]
    outcome = simulate(parse(plan), 60, costs_of(cluster, range(4)), Model(sizes=scripts.WEIGHTY))
    assert end["units"] == outcome.units
    assert end["seconds"] == pytest.approx(outcome.seconds, rel=0.01)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_buckets_under_way_at_a_time_take_the_same_time(tmp_path: Path, in_flight: int) -> None:
    """Three buckets over a link whose latency and bytes take about as long."""
    cluster, width = tmp_path / "four.toml", 14_000
    text = '[compute]\nunit = "100 ms"\n[link]\nrate = "20 MB/s"\nlatency = "20 ms"\n'
    cluster.write_text(f"{text}[allreduce]\nin_flight = {in_flight}\n")
    one, model = VirtualEngine(tmp_path, cluster), Model((30 * width, width, 5 * width, 5))
    one.run(4, scripts.weighty, Setup("bsp", 24), width, hosts=range(4))
    (end,) = [row for row in journal.read(one.out) if row["type"] == "end"]
    seconds = simulate(parse("bsp"), 24, costs_of(cluster, range(4)), model).seconds
    assert len(model.buckets()) == 3
    assert end["seconds"] == pytest.approx(seconds, rel=0.001)
    assert (seconds < 2.9) == (in_flight == 2), seconds


SLOW_FOR_A_WHILE = """
[membership]
seconds = "0.3 s"

[switch]
seconds = "0.5 s"

[[stragglers]]
worker = 2
at = 1.0
seconds = "3 s"
slow = 3
"""

LATE_FOR_A_WHILE = """
[[stragglers]]
worker = 0
at = 1.0
seconds = "10 s"
latency = "120 ms"
"""

DECISIONS = {
    "straggler": ("rank", "action", "protocol"),
    "members": ("epoch", "members", "reason"),
    "phase": ("protocol",),
}

TROUBLES = {"processor": SLOW_FOR_A_WHILE, "link": LATE_FOR_A_WHILE}
FAST = [
    ("observe", "local(3)", "processor"),
    ("elastic", "bsp:50% asp", "processor"),
    ("elastic", "bsp:50% local(2)", "link"),
    ("greedy", "bsp:50% asp", "link"),
    ("greedy", "bsp:50% dasgd(2,1)", "processor"),
]
SLOW = [
    ("observe", "bsp", "link"),
    ("observe", "asp", "processor"),
    ("elastic", "bsp:50% local(2)", "processor"),
    ("elastic", "bsp:50% asp", "link"),
    ("greedy", "bsp:50% asp", "processor"),
]


@pytest.mark.parametrize(
    ("policy", "plan", "slow"), [*FAST, *(pytest.param(*one, marks=pytest.mark.slow) for one in SLOW)]
)
def test_policies_decide_the_same_with_gradients_and_without(
    tmp_path: Path, policy: str, plan: str, slow: str
) -> None:
    cluster, extra = tmp_path / "four.toml", TROUBLES[slow]
    cluster.write_text(FOUR_HOSTS + extra)
    one, notes = VirtualEngine(tmp_path, cluster), Notes()
    policy += "(window=2,count=2)"
    setup = Setup(plan, 240, momentum=0.9, options={"stragglers": policy})
    one.run(4, scripts.weighty, setup, hosts=range(4))
    rows = journal.read(one.out)
    # Timing-only runs have no start, which takes a moment: the straggler comes that much earlier.
    begun = next(row["t"] for row in rows if row["type"] == "phase")
    cluster.write_text(FOUR_HOSTS + extra.replace("at = 1.0", f"at = {1 - begun}"))
    outcome = simulate(
        parse(plan),
        240,
        costs_of(cluster, range(4)),
        Model(sizes=scripts.WEIGHTY),
        journal=notes,
        clock=notes.clock,
        stragglers=Stragglers.parse(policy),
    )
    # What is under way when a detour ends, on shards or in an average, may be a step of all.
    slack = 4 if policy.startswith("greedy") else 0
    for kind, names in DECISIONS.items():
        found = [[row[name] for name in names] for row in rows if row["type"] == kind]
        assert found == [[row[name] for name in names] for row in notes.of(kind)]
        moments = [row["t"] - begun for row in rows if row["type"] == kind]
        assert moments == pytest.approx([row["t"] for row in notes.of(kind)], rel=0.01, abs=0.01)
        units = [row["units"] for row in rows if row["type"] == kind and "units" in row]
        others = [row["units"] for row in notes.of(kind) if "units" in row]
        assert units == pytest.approx(others, abs=slack)
    (end,) = [row for row in rows if row["type"] == "end"]
    assert end["units"] == outcome.units
    assert end["seconds"] == pytest.approx(outcome.seconds, rel=0.01, abs=slack * 0.05)
    acted = "members" if policy.startswith("elastic") else "phase"
    if policy.startswith("elastic") or "asp" in plan:
        assert notes.of("straggler")
        assert policy.startswith("observe") or len(notes.of(acted)) > 1
