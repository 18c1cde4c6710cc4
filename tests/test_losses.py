"""Losses over real processes."""

from __future__ import annotations

import pytest

from tests.contract_losses import Losses
from tests.engines import RealEngine


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> RealEngine:
    return RealEngine(tmp_path_factory.mktemp("losses"))


class TestLosses(Losses):
    pass
