"""Hyper-parameters as functions of the job's progress: learning rate schedules, and Sync-Switch's
configuration policy, which carries learning rate and momentum over a switch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from offbeat.protocols import BSP, Protocol

LR_REFERENCES = ("global", "worker")
MOMENTA = ("keep", "zero", "scale", "ramp")


@dataclass(frozen=True)
class Configuration:
    """Sync-Switch's configuration policy (its section on hyper-parameters; DESIGN 4.1 and 4.2).

    lr_reference: what the user's learning rate is tuned for. `"global"`: for BSP, as with DDP; BSP uses
        lr, ASP and SSP over n members lr/n. `"worker"`: for one worker, as the paper states it; BSP uses
        n·lr (linear scaling), ASP and SSP lr. BSP's is always n times theirs, since BSP applies the mean
        of n gradients and they apply each. Local protocols use lr as given.
    warmup: share of the progress over which the factor n of `"worker"` rises from 1.
    momentum: what a protocol other than BSP, on replicas or on shards, does with the momentum β after a
        switch from BSP: `"keep"` it, `"zero"`, `"scale"` it to β/n, or `"ramp"` it from 0 back to β over
        `ramp` of the progress. The momentum buffers are kept.
    """

    lr_reference: str = "global"
    warmup: float = 0.0
    momentum: str = "keep"
    ramp: float = 0.05

    def __post_init__(self) -> None:
        if self.lr_reference not in LR_REFERENCES:
            raise ValueError(f"lr_reference is 'global' or 'worker'; got {self.lr_reference!r}")
        if self.momentum not in MOMENTA:
            raise ValueError(f"momentum at a switch is one of {', '.join(MOMENTA)}; got {self.momentum!r}")
        if not 0 <= self.warmup <= 1:
            raise ValueError(f"warmup is a share of the progress, 0 to 1; got {self.warmup!r}")
        if not 0 < self.ramp <= 1:
            raise ValueError(f"ramp is a share of the progress, above 0 and at most 1; got {self.ramp!r}")

    def lr_factor(self, protocol: Protocol, members: int, progress: float, excluded: int = 0) -> float:
        """What the user's learning rate is multiplied by in a step, or a push, under `protocol`. excluded:
        workers that BSP goes on without for a while (Elastic); a `"global"` rate is tuned for a step with
        them."""
        if protocol.home == "shards":
            return 1 / (members + excluded) if self.lr_reference == "global" else 1.0
        if not isinstance(protocol, BSP):
            return 1.0
        if self.lr_reference == "global":
            return members / (members + excluded)
        risen = 1.0 if progress >= self.warmup else progress / self.warmup
        return 1 + (members - 1) * risen

    def momentum_factor(self, protocol: Protocol, members: int, since_bsp: float | None) -> float:
        """What the momentum is multiplied by; `since_bsp` is the progress made since the switch away
        from BSP, None when BSP never ran."""
        if isinstance(protocol, BSP) or since_bsp is None or self.momentum == "keep":
            return 1.0
        if self.momentum == "zero":
            return 0.0
        return 1 / members if self.momentum == "scale" else min(since_bsp / self.ramp, 1.0)


@contextlib.contextmanager
def applied(optimizers: Sequence[Optimizer], lr: float, momentum: float) -> Iterator[None]:
    """Inside, the optimizers' learning rates and momenta (β₁ of Adam and its kin) are multiplied; the
    user's own values are back afterwards, so that schedulers never see ours."""
    if lr == 1 and momentum == 1:
        yield
        return
    kept: list[tuple[dict[str, Any], str, Any]] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            changes: dict[str, Any] = {"lr": group["lr"] * lr} if lr != 1 else {}
            if momentum != 1 and "momentum" in group:
                changes["momentum"] = group["momentum"] * momentum
            elif momentum != 1 and "betas" in group:
                changes["betas"] = (group["betas"][0] * momentum, *group["betas"][1:])
            for key, value in changes.items():
                kept.append((group, key, group[key]))
                group[key] = value
    try:
        yield
    finally:
        for group, key, value in kept:
            group[key] = value


class Schedules:
    """The learning rate schedules of a job, all driven by its progress: units done, not steps taken, so
    that no plan shifts them."""

    def __init__(self) -> None:
        self._shapes: list[tuple[Callable[[float], float], Optimizer, list[float]]] = []
        self._steppers: list[tuple[LRScheduler, Fraction, list[int]]] = []

    def add_shape(self, shape: Callable[[float], float], optimizers: Sequence[Optimizer]) -> None:
        """Each group's lr is its first value times `shape(progress)`."""
        value = shape(0.0)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"a schedule's shape maps progress (0 to 1) to a factor; shape(0.0) is {value!r}")
        for optimizer in optimizers:
            # torch's own schedulers keep the first rate under this name, and so do checkpoints.
            firsts = [float(group.setdefault("initial_lr", group["lr"])) for group in optimizer.param_groups]
            self._shapes.append((shape, optimizer, firsts))

    def add_stepper(self, scheduler: LRScheduler, steps: Fraction) -> None:
        """The scheduler is stepped evenly, `steps` times in the whole job."""
        self._steppers.append((scheduler, steps, [0]))

    def move(self, units: int, total: int) -> None:
        """Sets every learning rate to what it is after `units` of `total`."""
        for shape, optimizer, firsts in self._shapes:
            factor = shape(min(units / total, 1.0))
            for group, first in zip(optimizer.param_groups, firsts, strict=True):
                group["lr"] = first * factor
        for scheduler, steps, done in self._steppers:
            due = int(min(units, total) * steps / total)
            while done[0] < due:
                scheduler.step()
                done[0] += 1

    def highest(self, progress: float, points: int = 200) -> float:
        """The largest factor from `progress` on, over the one there, of any schedule that is a function; 1
        where none is: what torch's schedulers will do isn't known."""
        later = [progress + (1 - progress) * k / points for k in range(points + 1)]
        return max(
            (
                max(abs(shape(p)) for p in later) / abs(now)
                for shape, _, _ in self._shapes
                if (now := shape(min(progress, 1.0)))
            ),
            default=1.0,
        )

    def counts(self) -> list[int]:
        """How often each scheduler was stepped."""
        return [done[0] for _, _, done in self._steppers]

    def catch_up(self, rows: Sequence[Sequence[int]]) -> None:
        """Steps each scheduler as often as on the worker where it was stepped most."""
        for (scheduler, _, done), most in zip(self._steppers, map(max, zip(*rows, strict=True)), strict=True):
            while done[0] < most:
                scheduler.step()
                done[0] += 1

    def state_dict(self) -> list[dict[str, Any]]:
        return [
            {"done": done[0], "scheduler": scheduler.state_dict()} for scheduler, _, done in self._steppers
        ]

    def load_state_dict(self, rows: list[dict[str, Any]]) -> None:
        for (scheduler, _, done), row in zip(self._steppers, rows, strict=True):
            scheduler.load_state_dict(row["scheduler"])
            done[0] = row["done"]


def stepper(scheduler: object, steps: float | None, total: int, members: int) -> Fraction:
    """How often a torch scheduler is stepped in a whole job: `steps`, or as often as each worker of a
    BSP job steps.

    Raises TypeError for what cannot be driven by progress."""
    if isinstance(scheduler, ReduceLROnPlateau):
        raise TypeError(
            "ReduceLROnPlateau follows a metric, not the progress: call its step(metric) yourself, under "
            "`if sync.every('5%'):` and with a metric that is the same on every worker"
        )
    if not isinstance(scheduler, LRScheduler):
        raise TypeError(
            f"a scheduler is a function of the progress or a torch.optim.lr_scheduler; got {scheduler!r}"
        )
    if steps is not None and not steps > 0:
        raise ValueError(f"steps is how often the scheduler steps in the whole job; got steps={steps!r}")
    return Fraction(steps) if steps is not None else Fraction(total, members)
