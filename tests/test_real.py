"""The contract suite over real processes, and what only processes have: a launcher's environment, and DDP
beside them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests import scripts
from tests.contract import Contract
from tests.contract_misuse import wrong
from tests.contract_parity import apart
from tests.engines import RealEngine
from tests.scripts import Setup


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> RealEngine:
    return RealEngine(tmp_path_factory.mktemp("runs"))


class TestReal(Contract):
    @pytest.mark.parametrize("workers", [2, 3])
    @pytest.mark.parametrize("model", ["mlp", "pictures"])
    def test_bsp_has_the_parameters_of_ddp(self, engine: Any, workers: int, model: str) -> None:
        setup = Setup("bsp", 50 * workers, model, momentum=0.9, decay=5e-4, dtype=torch.float32)
        for ours, theirs in engine.run(workers, scripts.beside_ddp, setup, 50):
            assert apart(ours, theirs) <= 1e-6

    def test_zero_workers(self, engine: Any) -> None:
        wrong(engine, 1, Setup(), "every", "ValueError", "WORLD_SIZE=0", env={"WORLD_SIZE": "0"})

    def test_a_dead_port(self, engine: Any) -> None:
        env = {"MASTER_PORT": "9", "OFFBEAT_RDZV_TIMEOUT": "1"}
        wrong(engine, 2, Setup(), "every", "ConnectionError", "127.0.0.1:9", env=env)
