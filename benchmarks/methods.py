"""The methods that are compared: Offbeat's plans, PyTorch's own and the peers', by name."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from peers import local
from peers.local import Builder, Trained
from record import ROOT
from torch import nn

import offbeat

sys.path.insert(0, str(ROOT / "examples"))
from models import resnet8

BACKWARD = 2 / 3
"""Of a step of fixed duration, backward's share."""


@dataclass(frozen=True)
class Work:
    """What a worker computes in a step: a model ("resnet8", or "mlp" with 9.9 M parameters) on batches of
    `batch` random images; with `seconds` it sleeps between the parts of a short real backward instead,
    since many workers share few cores."""

    model: str
    batch: int
    seconds: float = 0.0


def ours(plan: str, wire: str | None = None) -> Builder:
    def build(model: nn.Module, optimizer: torch.optim.Optimizer) -> Trained:
        return Trained(model, offbeat.Synchronizer(model, optimizer, plan=plan, total=10**9, wire=wire).step)

    return build


METHODS: dict[str, Builder] = {
    "none": local.none,
    "DDP": local.ddp,
    "DDP + PostLocalSGD(4)": local.post_local(4),
    "flat local SGD(4) by hand": local.flat_local(4),
    "accelerate LocalSGD(4)": local.accelerate_local(4),
    "torchft LocalSGD(4)": local.torchft_local(4),
    "torchft DiLoCo(4)": local.torchft_diloco(4),
    "torchft delayed(4,2)": local.torchft_diloco(4, delay=2, alpha=0.25, outer=1.0),
    "bsp": ours("bsp"),
    "local(4)": ours("local(4)"),
    "dasgd(2,1)": ours("dasgd(2,1)"),
    "dasgd(4,2)": ours("dasgd(4,2)"),
    "dasgd(auto)": ours("dasgd(auto)"),
    "asp": ours("asp"),
    "ssp(3)": ours("ssp(3)"),
    "bsp, bf16 wire": ours("bsp", "bf16"),
    "dasgd(4,2), bf16 wire": ours("dasgd(4,2)", "bf16"),
}
DEFAULT = [name for name in METHODS if "wire" not in name and "by hand" not in name]


def network(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "resnet8":
        return resnet8()  # type: ignore[no-any-return]
    layers = [nn.Linear(3072, 2048), nn.ReLU(), nn.Linear(2048, 1750), nn.ReLU(), nn.Linear(1750, 10)]
    return nn.Sequential(nn.Flatten(), *layers)


def step_of(builder: Builder, work: Work) -> Callable[[], None]:
    """One training step, of a model of its own."""
    model = network(work.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if work.seconds:
        return slept(builder, model, optimizer, work)
    x, y = torch.randn(work.batch, 3, 32, 32), torch.randint(0, 10, (work.batch,))
    trained = builder(model, optimizer)

    def step() -> None:
        trained.backward(F.cross_entropy(trained.forward(x), y))
        trained.step()

    return step


class Slept(nn.Module):
    """A model whose output needs no computing, and every parameter."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        self.weights = [torch.randn_like(p) for p in model.parameters()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = zip(self.weights, self.model.parameters(), strict=True)
        return x * torch.stack([(w * p).sum() for w, p in pairs]).sum()


def slept(builder: Builder, model: nn.Module, optimizer: Any, work: Work) -> Callable[[], None]:
    begun = 0.0

    def till(share: float) -> None:
        time.sleep(max(begun + share * work.seconds - time.perf_counter(), 0))

    parameters = list(model.parameters())
    for index, p in enumerate(parameters):
        share = 1 - BACKWARD * index / len(parameters)
        p.register_hook(lambda gradient, share=share: till(share))
    trained, x = builder(Slept(model), optimizer), torch.ones(())

    def step() -> None:
        nonlocal begun
        begun = time.perf_counter()
        loss = trained.forward(x)
        till(1 - BACKWARD)
        trained.backward(loss)
        trained.step()

    return step
