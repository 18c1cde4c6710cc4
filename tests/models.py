"""Small models, their data and optimizers, without a line of offbeat: what workers and references share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, CLASSES, SIZE = 6, 3, 4
"""Features of a sample, values to predict, samples in a unit."""


class Branches(nn.Module):
    """Which branch is used depends on the batch; one is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(WIDTH, 5)
        self.branches = nn.ModuleList([nn.Linear(5, CLASSES) for _ in range(2)])
        self.never = nn.Linear(5, CLASSES)
        self.use = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.branches[self.use](torch.tanh(self.trunk(x)))


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.two.weight = self.one.weight
        self.out = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.two(torch.tanh(self.one(x)))))


class Checkpointed(nn.Module):
    """Its middle is computed twice, to save memory."""

    def __init__(self, reentrant: bool):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES)
        self.middle = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        hidden = torch.tanh(self.first(x))
        return self.last(torch.tanh(checkpoint(self.middle, hidden, use_reentrant=self.reentrant)))


class Pictures(nn.Module):
    """A convolution with BatchNorm over samples folded into pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 2), nn.BatchNorm2d(4)
        self.out = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(x.view(-1, 2, 3, 1).expand(-1, 2, 3, 2).contiguous())))
        return self.out(x.flatten(1))


def build(name: str, seed: int = 3, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The model of this name, its parameters drawn from `seed`."""
    torch.manual_seed(seed)
    made: nn.Module
    if name == "linear":
        made = nn.Linear(WIDTH, CLASSES)
    elif name == "mlp":
        made = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, CLASSES))
    elif name == "dropout":
        made = nn.Sequential(
            nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, CLASSES)
        )
    elif name == "plain":
        made = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    elif name in ("checkpoint", "reentrant"):
        made = Checkpointed(name == "reentrant")
    elif name == "channels_last":
        made = Pictures().to(memory_format=torch.channels_last)
    else:
        made = {"branches": Branches, "tied": Tied, "pictures": Pictures}[name]()
    return made.to(dtype)


class SpySGD(torch.optim.SGD):
    """Writes down the learning rate and momentum that each step really used."""

    def __init__(self, *args: Any, **settings: Any):
        super().__init__(*args, **settings)
        self.used: list[tuple[float, float]] = []

    def step(self, closure: Any = None) -> Any:
        self.used.append((self.param_groups[0]["lr"], self.param_groups[0]["momentum"]))
        return super().step(closure)


def optimize(
    name: str, parameters: Iterable[Any], lr: float, momentum: float, decay: float
) -> torch.optim.Optimizer:
    if name == "sgd":
        return SpySGD(parameters, lr=lr, momentum=momentum, weight_decay=decay)
    if name == "nesterov":
        return SpySGD(parameters, lr=lr, momentum=momentum, weight_decay=decay, nesterov=True)
    kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "rmsprop": torch.optim.RMSprop}
    return kinds[name](parameters, lr=lr, weight_decay=decay)


def unit(rank: int, step: int, dtype: torch.dtype = torch.float64, size: int = SIZE) -> tuple[Tensor, Tensor]:
    """The samples of a rank's step (0, 1, …)."""
    source = torch.Generator().manual_seed(7919 * rank + step)
    x = torch.randn(size, WIDTH, generator=source, dtype=torch.float64)
    y = torch.randn(size, CLASSES, generator=source, dtype=torch.float64) + 0.3 * rank
    return x.to(dtype), y.to(dtype)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


def flat(model: nn.Module, buffers: bool = True) -> Tensor:
    """Parameters, and floating-point buffers, as one vector."""
    parts = [p.detach().reshape(-1) for p in model.parameters()]
    if buffers:
        parts += [b.reshape(-1) for b in model.buffers() if b.is_floating_point()]
    return torch.cat(parts).clone()


def slots(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The optimizer's state, for each parameter in order, as copies."""
    rows = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            row = optimizer.state.get(p, {})
            rows.append({k: v.clone() if isinstance(v, Tensor) else v for k, v in sorted(row.items())})
    return rows
