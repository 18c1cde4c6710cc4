"""Losses over real processes, and over virtual workers."""

from __future__ import annotations

import pytest

from tests import scripts_losses
from tests.contract_losses import Losses
from tests.engines import RealEngine, RemoteError, VirtualEngine
from tests.scripts_losses import Loss


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> RealEngine:
    return RealEngine(tmp_path_factory.mktemp("losses"))


@pytest.fixture(scope="module")
def virtual(tmp_path_factory: pytest.TempPathFactory) -> VirtualEngine:
    return VirtualEngine(tmp_path_factory.mktemp("virtual"))


class TestLosses(Losses):
    @pytest.fixture
    def engine(self, processes: RealEngine) -> RealEngine:
        return processes

    @pytest.mark.parametrize("plan", ["bsp", "asp"])
    def test_when_all_have_died_those_that_come_say_so(self, engine: RealEngine, plan: str) -> None:
        """Nobody is left to let them in. (A virtual job is over then.)"""
        loss = Loss(plan, 160, momentum=0.5, who=0, too=1, pace=0.01)
        found = engine.outcomes(2, scripts_losses.mortal, loss, minimum=1)
        assert {type(one) for one in found} == {RemoteError}
        text = "all workers that held the job's state have died: go on from a checkpoint"
        assert {one.message for one in found} == {text}


class TestVirtualLosses(Losses):
    @pytest.fixture
    def engine(self, virtual: VirtualEngine) -> VirtualEngine:
        return virtual
