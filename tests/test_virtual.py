"""The contract suite over virtual workers, and their parity with processes and with timing-only runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from offbeat import journal
from offbeat.plan import parse
from offbeat.virtual.timing import Model, simulate
from tests import scripts
from tests.contract import Contract
from tests.contract_parity import apart
from tests.engines import RealEngine, VirtualEngine, costs_of
from tests.scripts import Setup

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
