"""When to switch to ASP, told from one run by the loss's curvature: no search. Experimental
(docs/search.md)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from offbeat.protocols import ASP, BSP, Program, Protocol, Switch
from offbeat.worker import While, Worker


@dataclass(frozen=True)
class Auto(Switch):
    """BSP until asynchrony has become safe, then ASP.

    ASP's gradients are n − 1 updates old, and on a direction of curvature λ such updates are stable only
    while

        n·η·λ < limit(β, n)          (`offbeat.policies.stability`; η: the learning rate of one push)

    Here λ is the largest of the last `count` looks at the members' mean loss, one every `every` steps;
    n·η, BSP's learning rate, the largest that the schedule still has in store; and β the momentum that the
    configuration policy leaves to ASP (`offbeat.hyper.Configuration`). A look is one gradient more, on the
    batch that comes next, a little way along the direction of steepest curvature found so far (a power
    iteration by finite differences); training goes on from where it was, to the bit. `margin` divides the
    limit.

    by: share of the job at which it switches at the latest (1.0: only when it is safe). ASP's learning rate
    is held to what the limit allows at the λ of the switch, until the schedule's is below that.

    Raises ValueError for settings that cannot be meant.
    """

    word: ClassVar[str] = "auto"
    first: Protocol = field(default=BSP(), init=False)
    then: Protocol = field(default=ASP(), init=False)
    at: float | int = field(default=1.0, init=False)
    every: int = 34
    count: int = 3
    margin: float = 1.0
    by: float = 1.0

    def __post_init__(self) -> None:
        for name in ("every", "count"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"auto needs a whole {name} of at least 1; got {name}={value!r}")
        if not (isinstance(self.margin, int | float) and self.margin > 0):
            raise ValueError(f"auto needs a margin above 0; got margin={self.margin!r}")
        if not (isinstance(self.by, int | float) and 0 < self.by <= 1):
            raise ValueError(
                f"auto needs by as a share of the job, above 0 and at most 1; got by={self.by!r}"
            )

    def current(self, w: Worker) -> Protocol:
        return (self.then if self._safe(w) else self.first).current(w)

    def run(self, w: Worker) -> Program:
        turn = While(w, lambda: not self._safe(w))
        while turn.running:
            if w.clock % self.every == 0 and w.looked_at != w.clock:
                yield w.look()
                continue  # a checkpoint may interrupt it
            yield w.gradient(mean=True)
            w.step()
        if self._safe(w):  # else a checkpoint interrupts it, or the job is over
            yield w.settle(then=self)
            yield from self.then.run(w)

    def _safe(self, w: Worker) -> bool:
        return w.asynchrony_is_safe(self.count, self.margin, self.by)


def uses_auto(plan: Protocol) -> bool:
    """Whether the plan, or a part of it, is `Auto`."""
    if isinstance(plan, Switch) and not isinstance(plan, Auto):
        return uses_auto(plan.first) or uses_auto(plan.then)
    return isinstance(plan, Auto)
