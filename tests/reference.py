"""The protocols once more, as slow loops over plain modules in one process. Nothing of offbeat is here:
agreement with it is evidence."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.models import flat, loss_of, slots, unit


@dataclass(frozen=True)
class Phase:
    """One protocol's turn, up to `end`: a share of the progress (float), or units (int)."""

    kind: str
    period: int = 1
    delay: int = 0
    keep: float = 0.25
    merge: str = "mix"
    end: float | int | None = None

    @property
    def text(self) -> str:
        settings = {
            "bsp": "",
            "local": f"(period={self.period})",
            "dasgd": f"(period={self.period},delay={self.delay},keep={self.keep},merge={self.merge})",
        }[self.kind]
        if self.end is None:
            return self.kind + settings
        return f"{self.kind}{settings}:" + (
            f"{self.end}u" if isinstance(self.end, int) else f"{100 * self.end}%"
        )


def text(phases: Sequence[Phase]) -> str:
    return " ".join(phase.text for phase in phases)


@dataclass
class Outcome:
    """`trace[k][j]` is replica j after step k + 1, with all that follows the step."""

    models: list[nn.Module]
    optimizers: list[Optimizer]
    trace: list[list[Tensor]] = field(default_factory=list)
    units: int = 0

    @property
    def slots(self) -> list[list[dict[str, Any]]]:
        return [slots(optimizer) for optimizer in self.optimizers]


Hyper = Callable[[int, int, Phase], tuple[float, float]]
Losses = Callable[[nn.Module, int, int], Tensor]


def usual(model: nn.Module, rank: int, step: int) -> Tensor:
    """The loss of a rank's step on its unit of `models.unit`."""
    dtype = next(model.parameters()).dtype
    return loss_of(model, *unit(rank, step, dtype))


def train(
    phases: Sequence[Phase],
    total: int,
    workers: int,
    make: Callable[[], tuple[nn.Module, Optimizer]],
    loss: Losses = usual,
    hyper: Hyper | None = None,
    skip: Callable[[int, int], bool] = lambda rank, step: False,
) -> Outcome:
    """Trains `workers` replicas for `total` units.

    hyper: from units, step and phase to the lr and momentum of a step. skip: whether a rank's optimizer
    leaves a step out.
    """
    model, optimizer = make()
    models = [model] + [make()[0] for _ in range(workers - 1)]
    optimizers = [optimizer]
    for other in models[1:]:
        other.load_state_dict(model.state_dict())
        twin = copy.deepcopy(optimizer.param_groups)
        kind = type(optimizer)(other.parameters(), lr=0.1)
        for group, settings in zip(kind.param_groups, twin, strict=True):
            group.update({key: value for key, value in settings.items() if key != "params"})
        optimizers.append(kind)
    out = Outcome(models, optimizers)
    clock, differ = 0, False
    for phase in phases:
        flying: tuple[int, list[Tensor], list[list[Tensor]]] | None = None

        def over(phase: Phase = phase) -> bool:
            if out.units >= total:
                return True
            if phase.end is None:
                return False
            return out.units >= phase.end if isinstance(phase.end, int) else out.units / total >= phase.end

        if over():
            continue
        while not over():
            losses = [loss(models[rank], rank, clock) for rank in range(workers)]
            for one in losses:
                one.backward()
            if phase.kind == "bsp":
                _mean_gradients(models)
            for rank in range(workers):
                if hyper is not None:
                    for group in optimizers[rank].param_groups:
                        group["lr"], group["momentum"] = hyper(out.units, clock, phase)
                if not skip(rank, clock):
                    optimizers[rank].step()
                optimizers[rank].zero_grad()
            clock += 1
            out.units += workers
            differ = differ or phase.kind != "bsp"
            if phase.kind in ("local", "dasgd") and clock % phase.period == 0:
                flying = (clock + phase.delay, _means(models), [_copies(m) for m in models])
            if flying and flying[0] == clock:
                _merge(models, flying, phase)
                flying = None
            ended = over()
            if ended:
                if flying:
                    _merge(models, flying, phase)
                if workers > 1:
                    _settle(models, optimizers, differ)
                differ = False
            out.trace.append([flat(m) for m in models])
        if out.units >= total:
            break
    return out


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())]


def _copies(model: nn.Module) -> list[Tensor]:
    return [t.detach().clone() for t in _tensors(model)]


def _means(models: Sequence[nn.Module]) -> list[Tensor]:
    rows = zip(*(_copies(m) for m in models), strict=True)
    return [sum(row[1:], row[0].clone()) / len(models) for row in rows]


def _mean_gradients(models: Sequence[nn.Module]) -> None:
    for row in zip(*(m.parameters() for m in models), strict=True):
        if all(p.grad is None for p in row):
            continue
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in row]
        mean = sum(grads[1:], grads[0].clone()) / len(models)
        for p in row:
            p.grad = mean.clone()


def _merge(
    models: Sequence[nn.Module], flying: tuple[int, list[Tensor], list[list[Tensor]]], phase: Phase
) -> None:
    _, means, sent = flying
    keep = 0.0 if phase.kind == "local" else phase.keep
    with torch.no_grad():
        for model, own in zip(models, sent, strict=True):
            for x, mean, old in zip(_tensors(model), means, own, strict=True):
                if phase.merge == "delta" and phase.kind == "dasgd":
                    x.copy_(x + (1 - keep) * (mean - old))
                else:
                    x.copy_(keep * x + (1 - keep) * mean)


def _settle(models: Sequence[nn.Module], optimizers: Sequence[Optimizer], differ: bool) -> None:
    """Buffers become their mean; parameters and optimizer state too, where replicas differ."""
    with torch.no_grad():
        means = _means(models)
        for model in models:
            for x, mean in zip(_tensors(model), means, strict=True):
                if differ or not isinstance(x, nn.Parameter):
                    x.copy_(mean)
        if not differ:
            return
        lists = [[p for group in o.param_groups for p in group["params"]] for o in optimizers]
        for row in zip(*lists, strict=True):
            states = [o.state.get(p, {}) for o, p in zip(optimizers, row, strict=True)]
            for key in sorted({key for state in states for key in state}):
                values = [state.get(key) for state in states]
                known = next(v for v in values if v is not None)
                if not isinstance(known, Tensor):
                    continue
                missing = known if key == "step" else torch.zeros_like(known)
                filled = [missing if v is None else v for v in values]
                mean = sum(filled[1:], filled[0].clone()) / len(filled)
                for o, p in zip(optimizers, row, strict=True):
                    o.state[p][key] = mean.clone()
