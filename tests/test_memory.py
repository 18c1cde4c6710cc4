"""What averages cost in memory, measured on the process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import offbeat
from offbeat.cluster.shards import place_text
from tests.engines import RealEngine

MEGABYTES = 96


def resident() -> float:
    """Megabytes of this process that are in memory now."""
    text = Path("/proc/self/status").read_text()
    return int(text.split("VmRSS:")[1].split()[0]) / 1024


def grow(plan: str) -> float:
    """Megabytes that training under `plan` adds to plain steps of a large model."""
    model = torch.nn.Linear(1024, MEGABYTES * 256, bias=False)  # MEGABYTES of float32
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = offbeat.Synchronizer(model, optimizer, plan=plan, total=24)
    x = torch.randn(1, 1024)
    most, plain = 0.0, 0.0
    for number in range(12):
        model(x).sum().backward()
        most = max(most, resident())
        sync.step()
        most = max(most, resident())
        if number == 2:
            plain, most = most, 0.0  # three steps without an average: gradient, parameters, batch
    sync.close()
    return most - plain


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "copies"),
    [("local(period=4)", 1), ("dasgd(period=4,delay=2)", 1), ("dasgd(period=4,delay=2,merge=delta)", 2)],
)
def test_an_average_adds_at_most_two_flat_copies(plan: str, copies: int, tmp_path: Path) -> None:
    for grown in RealEngine(tmp_path).run(2, grow, plan):
        assert grown < (copies + 0.15) * MEGABYTES, f"{grown:.0f} MB more for a model of {MEGABYTES} MB"


def test_what_is_told_of_a_memory_is_as_long_for_every_process():
    """Virtual workers' words take virtual time, by their length."""
    told = [place_text({"path": f"/proc/{pid}/fd/{fd}", "base": 0}) for pid, fd in ((7, 3), (4_194_304, 99))]
    assert len(told[0]) == len(told[1])
    assert json.loads(told[1])["path"] == "/proc/4194304/fd/99"
