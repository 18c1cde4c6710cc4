"""What the jobs of recovery.py and switching.py have in common: a model, and a line for each step."""

from __future__ import annotations

import os
import time
from itertools import pairwise
from pathlib import Path
from typing import Any


def net(parameters: str = "0.3M") -> tuple[Any, Any]:
    """0.3 or 9.9 million parameters, with SGD and momentum."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(0)
    widths = {"0.3M": (274,) * 5, "9.9M": (3072, 2048, 1536, 256)}[parameters]
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.Tanh())]
    model = nn.Sequential(*layers)
    return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def loss_of(model: Any) -> Any:
    """Of a batch; the rest of a step of some 20 ms is slept."""
    import torch

    time.sleep(0.02)
    return model(torch.randn(4, next(model.parameters()).shape[1])).square().mean()


class Steps:
    """Appends "time rank pid step" to a file, all workers to the same."""

    def __init__(self, rank: int):
        path = Path(os.environ["OFFBEAT_BENCHMARK_STEPS"])
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._rank = rank

    def write(self, step: int) -> None:
        os.write(self._file, f"{time.time():.4f} {self._rank} {os.getpid()} {step}\n".encode())


def read(path: Path) -> list[tuple[float, int, int, int]]:
    """The lines of all workers, in the order of time."""
    if not path.exists():
        return []
    rows = [line.split() for line in path.read_text().splitlines()]
    return sorted((float(r[0]), int(r[1]), int(r[2]), int(r[3])) for r in rows if len(r) == 4)
