"""A small job for the command line's tests, and what is asked of its end."""

from __future__ import annotations

import socket
import time
from pathlib import Path

from commands import Command

TRAIN = """
import os, time
from pathlib import Path
import torch, offbeat
offbeat.init(seed=3)
mine = Path(f"pid{offbeat.rank()}.{os.environ['TORCHELASTIC_RESTART_COUNT']}")
if EARLY:
    mine.write_text(str(os.getpid()))
    time.sleep(1)
data = torch.randn(4000, 8), torch.randn(4000, 1)
model = torch.nn.Linear(8, 1)
sync = offbeat.Synchronizer(model, torch.optim.SGD(model.parameters(), 0.01), total=TOTAL)
for x, y in sync.batches(data, batch_size=4):
    torch.nn.functional.mse_loss(model(x), y).backward()
    time.sleep(0.02)
    sync.step()
    mine.write_text(str(os.getpid()))
    if offbeat.rank() == 1 and FAILS and sync.units > 30:
        raise ValueError("no luck")
print("ended with", sync.units, float(sum(p.double().sum() for p in model.parameters())))
"""


def job(total: int, *words: object, fails: bool = False, early: bool = False) -> Command:
    text = TRAIN.replace("TOTAL", str(total)).replace("FAILS", str(fails)).replace("EARLY", str(early))
    Path("train.py").write_text(text)
    return Command("run", "-n", 3, "--out", "out", "--all-output", *words, "train.py")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(path: str, seconds: float = 60) -> int:
    """The pid that a worker has written down."""
    end = time.monotonic() + seconds
    while not (Path(path).exists() and Path(path).read_text()):
        assert time.monotonic() < end, f"{path} did not come"
        time.sleep(0.02)
    return int(Path(path).read_text())


def wait_for_file(path: str, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not Path(path).exists():
        assert time.monotonic() < end, f"{path} did not come"
        time.sleep(0.02)


def same_end(out: str, ranks: int) -> None:
    ends = [line.partition("ended with ")[2] for line in out.splitlines() if "ended with" in line]
    assert len(ends) == ranks, out
    assert len(set(ends)) == 1, ends
