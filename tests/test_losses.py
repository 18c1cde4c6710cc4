"""Losses over real processes, and over virtual workers."""

from __future__ import annotations

import pytest

from tests.contract_losses import Losses
from tests.engines import RealEngine, VirtualEngine


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


class TestVirtualLosses(Losses):
    @pytest.fixture
    def engine(self, virtual: VirtualEngine) -> VirtualEngine:
        return virtual
