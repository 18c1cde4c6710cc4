"""The contract suite over virtual workers."""

from __future__ import annotations

import pytest

from tests.contract import Contract
from tests.engines import VirtualEngine


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> VirtualEngine:
    return VirtualEngine(tmp_path_factory.mktemp("virtual"))


class TestVirtual(Contract):
    pass
