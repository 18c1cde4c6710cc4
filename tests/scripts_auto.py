"""Loops for the plan auto."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import offbeat
from tests.models import flat
from tests.scripts import Result, Setup, result, seeds

SAMPLES, WIDTH = 60, 5


class Noisy(nn.Module):
    """With all that a look must put back: statistics, their counters, random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm = nn.Linear(WIDTH, 8), nn.BatchNorm1d(8)
        self.drop, self.two = nn.Dropout(0.3), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.drop(torch.relu(self.norm(self.one(x)))))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(11)
    x = torch.randn(SAMPLES, WIDTH, generator=source, dtype=torch.float64)
    x *= torch.linspace(0.3, 2.0, WIDTH, dtype=torch.float64)
    return x, x.sum(1, keepdim=True) + 0.1 * torch.randn(SAMPLES, 1, generator=source, dtype=torch.float64)


def noisy(setup: Setup, micro: int = 1) -> Result:
    torch.manual_seed(2)
    model = Noisy().to(setup.dtype)
    optimizer = torch.optim.SGD(model.parameters(), setup.lr, momentum=setup.momentum)
    sync = offbeat.Synchronizer(model, optimizer, setup.plan, setup.total, **setup.options)
    seeds(100 + offbeat.rank())
    calls = 0
    x, y = (column.to(setup.dtype) for column in data())
    for a, b in sync.batches((x, y), 4, micro_batches=micro):
        (nn.functional.mse_loss(model(a), b) / micro).backward()
        sync.step()
        calls += 1
    return result(model, optimizer, sync, notes={"calls": calls, "looks": list(sync._loop.worker.looks)})


def quadratic(
    setup: Setup, shape: Any = None, save: tuple[str, str] | None = None, load: str | None = None
) -> Result:
    """Every unit is the whole data set, so the curvature is the same in all steps."""
    model = nn.Linear(WIDTH, 1, bias=False).double()
    optimizer = torch.optim.SGD(model.parameters(), setup.lr, momentum=setup.momentum)
    sync = offbeat.Synchronizer(model, optimizer, setup.plan, setup.total, **setup.options)
    if shape is not None:
        sync.scheduler(shape)
    if load is not None:
        sync.restore(load)
    rates = []  # as applied, and the units before
    for a, b in sync.batches(data(), SAMPLES):
        nn.functional.mse_loss(model(a), b).backward()
        units = sync.units
        sync.step()
        rates.append((units, sync._loop.worker.meter.lr))
        if save is not None and not sync.done and sync.every(save[0]):
            sync.save(save[1])
    return result(model, optimizer, sync, trace=[flat(model)], notes={"rates": rates})
