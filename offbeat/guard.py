"""Whether training still makes sense: the rule by which a job counts as diverged, and the error that says so.

Stale gradients can blow a run up (Sync-Switch: ASP, or too short a BSP phase before it, on 16 workers). A
run that has diverged should say so at once, not train on to its end.
"""

from __future__ import annotations

from dataclasses import replace
from math import isfinite

from offbeat.protocols import ASP, BSP, SSP, Protocol

FIRST = 10
"""Losses at the job's beginning whose mean is the measure."""
TIMES = 10.0
"""How many times that mean counts as exploding."""
SPAN = 20
"""Steps over which the running mean reaches back."""
SKIPS = 10
"""Losses in a row that are no number until a job with a GradScaler counts as diverged: it skips such steps
while it looks for a scale."""


class Diverged(RuntimeError):
    """Training has diverged: a loss is no finite number, or losses have exploded.

    reason: in words. protocol: the one in charge. worker: the rank that noticed. step: its clock.
    loss: its last. staleness: of its last push, None where nothing was pushed.
    """

    def __init__(
        self,
        reason: str,
        protocol: Protocol,
        worker: int,
        step: int,
        loss: float,
        staleness: float | None = None,
    ):
        super().__init__(reason, protocol, worker, step, loss, staleness)
        self.reason, self.protocol, self.worker, self.step = reason, protocol, worker, step
        self.loss, self.staleness = loss, staleness

    def __str__(self) -> str:
        stale = "" if self.staleness is None else f", staleness {self.staleness:g} at its last push"
        return (
            f"training has diverged under {self.protocol}: {self.reason} (rank {self.worker}, its step "
            f"{self.step}, last loss {self.loss:.6g}{stale}). Try {_advice(self.protocol)}"
        )


def _advice(protocol: Protocol) -> str:
    tries = ["a lower learning rate"]
    if protocol.home == "shards":
        tries.append(f"a BSP phase first, or a longer one (bsp:12.5% {protocol})")
    if isinstance(protocol, ASP):
        settings = "bound=3,lr=staleness" if protocol.lr == "staleness" else "bound=3"
        tries.append(f"a bound on the staleness (ssp({settings}))")
    elif isinstance(protocol, SSP) and protocol.bound > 0:
        tries.append("a smaller bound")
    if isinstance(protocol, ASP | SSP) and protocol.lr != "staleness":
        tries.append(str(replace(protocol, lr="staleness")))
    if not isinstance(protocol, BSP):
        tries.append('less momentum after the switch from bsp (momentum="ramp" or "zero")')
        tries.append("--on-diverge rollback, which goes back to the last checkpoint and on with bsp")
    else:
        tries.append("clipped gradients")
    return ", ".join(tries[:-1]) + f", or {tries[-1]}"


class Guard:
    """Looks at one worker's losses, one a step. The rule:

    - A loss that is NaN or infinite: diverged. With an enabled GradScaler (`scaled`), 10 in a row.
    - `exploding` (asked for under asynchronous protocols only): the running mean of the losses (exponential,
      over about 20 steps) is above 10 times the mean of the first 10 losses, if that is positive.

    It keeps four numbers, and may start afresh after a checkpoint: the measure is then the first 10
    losses from there on.
    """

    def __init__(self) -> None:
        self._count = self._bad = 0
        self._first = self._mean = 0.0

    def look(self, loss: float, scaled: bool = False, exploding: bool = False) -> str | None:
        """Takes a step's loss; why the job counts as diverged, or None."""
        if not isfinite(loss):
            self._bad += 1
            if not scaled:
                return f"the loss is {loss}"
            return f"the loss was no finite number {self._bad} times in a row" if self._bad >= SKIPS else None
        self._bad = 0
        if self._count < FIRST:
            self._count += 1
            self._first += (loss - self._first) / self._count
            self._mean = self._first
            return None
        self._mean += (loss - self._mean) / SPAN
        if exploding and self._mean > TIMES * self._first > 0:
            return (
                f"the loss is {self._mean:.4g} on average, {self._mean / self._first:.3g} times the mean of "
                f"the first {FIRST}"
            )
        return None
