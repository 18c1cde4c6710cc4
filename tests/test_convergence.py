"""What asynchrony does to accuracy: scikit-learn's digits, and a worker that is slower than the others."""

from __future__ import annotations

import importlib.util
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import offbeat
from offbeat import journal
from tests.engines import RealEngine

WORKERS, EPOCHS = 4, 12
PAUSE, SLOWED = 0.01, 0.04
"""Seconds that a step takes beside its computing, and that of the last worker."""


def digits() -> Any:
    """The example's model and data."""
    path = Path(__file__).parent.parent / "examples" / "digits.py"
    spec = importlib.util.spec_from_file_location("digits", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["digits"] = module
    spec.loader.exec_module(module)
    return module


def trained(plan: str, seed: int) -> float:
    """Test accuracy after training under the plan."""
    example = digits()
    offbeat.init(seed=seed)
    train_x, train_y, test_x, test_y = example.load()
    model = example.cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sync = offbeat.Synchronizer(model, optimizer, plan=plan, epochs=EPOCHS)
    sync.scheduler(lambda progress: 1 - progress)
    for x, y in sync.batches((train_x, train_y), batch_size=32):
        time.sleep(SLOWED if offbeat.rank() == WORKERS - 1 else PAUSE)
        F.cross_entropy(model(x), y).backward()
        sync.step()
    sync.close()
    return float(example.evaluate(model, test_x, test_y)["accuracy"])


@pytest.mark.slow
def test_bsp_then_asp_is_as_accurate_as_bsp(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    engine = RealEngine(tmp_path)
    accuracy: dict[str, list[float]] = {"bsp": [], "bsp:12.5% asp": []}
    for seed in range(3):
        for plan, found in accuracy.items():
            values = engine.run(WORKERS, trained, plan, seed, timeout=200)
            assert len(set(values)) == 1  # all hold the same model
            found.append(values[0])
            if plan != "bsp":
                (row,) = [row for row in journal.read(engine.out) if row["type"] == "pushes"]
                assert row["mean_staleness"] >= 1  # 3 where nobody's processor is busy otherwise
                slowed = row["workers"][-1]["pushes"]
                assert slowed < min(worker["pushes"] for worker in row["workers"][:-1])
    means = {plan: statistics.mean(found) for plan, found in accuracy.items()}
    print(accuracy)
    assert means["bsp:12.5% asp"] >= means["bsp"] - 0.01
    assert means["bsp"] > 0.95
