"""Small models, their data and optimizers, without a line of offbeat: what workers and references share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
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


class Odd(nn.Module):
    """Parameters of odd shapes: a single number, one element, a transposed weight."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.shift = nn.Parameter(torch.randn(1))
        self.weight = nn.Parameter(torch.randn(CLASSES, WIDTH).t())
        self.last = nn.Linear(CLASSES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(x @ self.weight * self.scale + self.shift))


class Wide(nn.Module):
    """More elements than are stepped, sent or locked at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, 30_000), nn.Linear(30_000, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.tanh(self.one(x)))


class Mixed(nn.Module):
    """Parameters of three dtypes, the middle ones of another."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 7).double()
        self.middle = nn.Linear(7, 5).float()
        self.gain = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
        self.last = nn.Linear(5, CLASSES).double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.middle(torch.tanh(self.first(x.double())).float()))
        return self.last(hidden.double() * self.gain.double()).to(x.dtype)


def frozen() -> nn.Module:
    """Its first layer is not trained."""
    made = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, CLASSES))
    made[0].requires_grad_(False)
    return made


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
    elif name == "mixed":
        return Mixed()
    elif name == "channels_last":
        made = Pictures().to(memory_format=torch.channels_last)
    else:
        made = {
            "branches": Branches,
            "tied": Tied,
            "pictures": Pictures,
            "odd": Odd,
            "wide": Wide,
            "frozen": frozen,
        }[name]()
    return made.to(dtype)


class SpySGD(torch.optim.SGD):
    """Writes down the learning rate and momentum that each step really used."""

    def __init__(self, *args: Any, **settings: Any):
        super().__init__(*args, **settings)
        self.used: list[tuple[float, float]] = []

    def step(self, closure: Any = None) -> Any:
        self.used.append((self.param_groups[0]["lr"], self.param_groups[0]["momentum"]))
        return super().step(closure)


class Lars(torch.optim.Optimizer):
    """Layer-wise adaptive rates: a step reads the norms of whole tensors."""

    def __init__(self, params: Any, lr: float, momentum: float = 0.9, weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                g = p.grad + group["weight_decay"] * p
                trust = 0.1 * p.norm() / (g.norm() + 1e-3)
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                state["momentum_buffer"].mul_(group["momentum"]).add_(g * trust, alpha=group["lr"])
                p.sub_(state["momentum_buffer"])


class Muon(torch.optim.Optimizer):
    """Orthogonalized momentum for matrices, plain momentum for the rest. It counts its steps in a plain
    number, keeps the norms of rows, and puts new tensors into its state at every step."""

    def __init__(self, params: Any, lr: float, momentum: float = 0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["count"] = 0
                    state["buffer"] = torch.zeros_like(p)
                    state["rows"] = torch.zeros(p.shape[0] + 1 if p.dim() else 2, dtype=p.dtype)
                state["count"] += 1
                state["buffer"] = state["buffer"] * group["momentum"] + p.grad
                update = state["buffer"]
                if p.dim() >= 2 and p.numel():
                    x = update.reshape(p.shape[0], -1)
                    x = x / (x.norm() + 1e-3)
                    for _ in range(3):
                        x = 1.5 * x - 0.5 * x @ x.T @ x
                    state["rows"] = torch.cat([x.norm(dim=1), x.norm().reshape(1)])
                    update = x.reshape(p.shape)
                p.sub_(update, alpha=group["lr"] / (1 + 0.01 * state["count"]))


Made = Callable[..., torch.optim.Optimizer]

_PLAIN: dict[str, Made] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
    "adamax": torch.optim.Adamax,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adagrad": partial(torch.optim.Adagrad, lr_decay=0.01, initial_accumulator_value=0.1),
    "adadelta": torch.optim.Adadelta,
    "asgd": partial(torch.optim.ASGD, t0=5),
    "amsgrad": partial(torch.optim.Adam, amsgrad=True),
    "adam foreach": partial(torch.optim.Adam, foreach=True),
    "adam fused": partial(torch.optim.Adam, fused=True),
    "adafactor": torch.optim.Adafactor,
    "adamw tensor lr": lambda params, lr, **more: torch.optim.AdamW(
        params, lr=torch.tensor(lr, dtype=torch.float64), **more
    ),
}

_WITH_MOMENTUM: dict[str, Made] = {
    "sgd": SpySGD,
    "nesterov": partial(SpySGD, nesterov=True),
    "torch sgd": torch.optim.SGD,
    "torch nesterov": partial(torch.optim.SGD, nesterov=True),
    "torch dampened": partial(torch.optim.SGD, dampening=0.3),
    "torch maximize": partial(torch.optim.SGD, maximize=True),
    "torch fused": partial(torch.optim.SGD, fused=True),
    "rmsprop centered": partial(torch.optim.RMSprop, centered=True),
    "lars": Lars,
}


def optimize(
    name: str, parameters: Iterable[Any], lr: float, momentum: float, decay: float
) -> torch.optim.Optimizer:
    if name in _WITH_MOMENTUM:
        return _WITH_MOMENTUM[name](parameters, lr=lr, momentum=momentum, weight_decay=decay)
    if name == "muon":
        return Muon(parameters, lr=lr, momentum=momentum)
    if name == "rprop":
        return torch.optim.Rprop(parameters, lr=lr)
    return _PLAIN[name](parameters, lr=lr, weight_decay=decay)


def compose(
    kind: str, name: str, optimizer: str, lr: float, momentum: float, decay: float, dtype: Any, seed: int
) -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
    """A model and its optimizer ("one"), with two parameter groups of different settings ("groups"), with an
    optimizer for every second parameter only ("part"), or two models that train together, each with an
    optimizer ("pair")."""
    model = build(name, seed, dtype)
    settings = (lr, momentum, decay)
    if kind == "one":
        return [model], [optimize(optimizer, model.parameters(), *settings)]
    if kind == "part":
        return [model], [optimize(optimizer, list(model.parameters())[::2], *settings)]
    if kind == "groups":
        trained = list(model.parameters())
        groups = [
            {"params": trained[1::2]},
            {"params": trained[::2], "lr": 3 * lr, "weight_decay": decay + 0.01},
        ]
        return [model], [optimize(optimizer, groups, *settings)]
    other = build("linear", seed + 50, dtype)
    return [model, other], [
        optimize(optimizer, model.parameters(), *settings),
        torch.optim.Adam(other.parameters(), lr=lr / 2),
    ]


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
