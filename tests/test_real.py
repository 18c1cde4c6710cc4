"""The contract suite over real processes."""

from __future__ import annotations

import pytest

from tests.contract import Contract
from tests.engines import RealEngine


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> RealEngine:
    return RealEngine(tmp_path_factory.mktemp("runs"))


class TestReal(Contract):
    pass
