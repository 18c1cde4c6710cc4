"""Sync-Switch's policies for transient stragglers: what a switch from BSP does about them before its time.

Both read like the paper's section on them. A worker's `stragglers` are those that the detector has flagged,
the same on every member. After the switch nobody waits for a straggler, and nothing is done about it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from offbeat.policies.detector import Detection
from offbeat.protocols import BSP, Program, Protocol, Switch
from offbeat.worker import While, Worker, passed

POLICIES = ("off", "observe", "greedy", "elastic")

_TEXT = re.compile(r"(?P<policy>\w+)\s*(?:\((?P<settings>[^()]*)\))?")
_LIKE = '"elastic(min_slowdown=1.3,count=5)"'
_KINDS: dict[type, str] = {str: "a word", int: "a whole number", float: "a number"}
_SETTINGS: dict[str, type] = {
    "rule": str,
    "window": int,
    "count": int,
    "min_slowdown": float,
    "spread": float,
    "recovery": float,
    "min_members": int,
    "trial": int,
}
_OWN = ("min_members", "trial")
"""Settings of the policy; the others are the detector's."""


@dataclass(frozen=True)
class Stragglers:
    """What is done about stragglers: `--stragglers`.

    policy: `"off"`; `"observe"`, which only tells; `"greedy"` and `"elastic"`, which see to it before the
        plan's switch from BSP.
    detection: how they are told.
    min_members: how many BSP keeps at least under elastic; of more stragglers the lowest ranks stay.
    trial: every so many steps whoever is outside under elastic may come back, and stays if it is fast again;
        0, the paper's: only at the switch.
    """

    policy: str = "off"
    detection: Detection = field(default_factory=Detection)
    min_members: int = 2
    trial: int = 0

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"--stragglers is one of {', '.join(POLICIES)}; got {self.policy!r}")
        least = self.min_members
        if isinstance(least, bool) or not isinstance(least, int) or least < 1:
            raise ValueError(f"min_members is a whole number from 1; got {least!r}")
        if isinstance(self.trial, bool) or not isinstance(self.trial, int) or self.trial < 0:
            raise ValueError(f"trial is a whole number of steps, or 0 for never; got {self.trial!r}")

    @classmethod
    def parse(cls, text: str) -> Stragglers:
        """What a text such as `elastic` or `greedy(rule=paper,count=5)` means.

        Raises ValueError, which names the part that cannot be meant and what would be valid."""
        found = _TEXT.fullmatch(text.strip())
        if not found:
            raise ValueError(
                f"--stragglers {text!r}: write {' | '.join(POLICIES)}, with settings as in {_LIKE}"
            )
        given: dict[str, dict[str, Any]] = {"here": {}, "detection": {}}
        for part in filter(None, map(str.strip, (found["settings"] or "").split(","))):
            name, equals, value = (piece.strip() for piece in part.partition("="))
            if not equals or name not in _SETTINGS:
                raise ValueError(
                    f"--stragglers {text!r}: {part!r} is no setting; valid are {', '.join(_SETTINGS)}"
                )
            kind = _SETTINGS[name]
            try:
                given["here" if name in _OWN else "detection"][name] = kind(value)
            except ValueError:
                raise ValueError(f"--stragglers {text!r}: {name} is {_KINDS[kind]}; got {value!r}") from None
        return cls(found["policy"], Detection(**given["detection"]), **given["here"])

    def __str__(self) -> str:
        parts = [
            f"{name}={getattr(own, name)}"
            for own, default in ((self.detection, Detection()), (self, Stragglers()))
            for name in _SETTINGS
            if hasattr(default, name) and getattr(own, name) != getattr(default, name)
        ]
        return self.policy + (f"({','.join(parts)})" if parts else "")

    def apply(self, plan: Protocol) -> Protocol:
        """The plan with the policy in its switch from BSP; the plan itself where there is none."""
        if not begins_with_bsp(plan) or self.policy not in ("greedy", "elastic"):
            return plan
        assert isinstance(plan, Switch)
        if isinstance(first := plan.first, Switch):  # nested to the right instead, so that BSP comes first
            return self.apply(Switch(first.first, Switch(first.then, plan.then, plan.at), first.at))
        assert isinstance(plan.first, BSP)
        if self.policy == "greedy":
            return Greedy(plan.first, plan.then, plan.at)
        return Elastic(plan.first, plan.then, plan.at, self.min_members, self.trial)


def begins_with_bsp(plan: Protocol) -> bool:
    """Whether the plan is BSP first and something else then."""
    while isinstance(plan, Switch):
        if isinstance(plan.first, BSP):
            return True
        plan = plan.first
    return False


@dataclass(frozen=True)
class Greedy(Switch):
    """Sync-Switch's greedy policy: it "simply switches to ASP when a straggler is detected; once the cluster
    is free of any stragglers and the aggregate BSP training has not been satisfied, it will switch back to
    training with BSP".

    What counts for the switch's place are the units done under BSP, so a detour moves it. A second straggler
    during a detour changes nothing.
    """

    def current(self, w: Worker) -> Protocol:
        return (self.then if w.stragglers or w.served(self.first, self.at) else self.first).current(w)

    def run(self, w: Worker) -> Program:
        slow = bool(w.stragglers)  # at a phase's begin: on shards `running` may be the first to know better
        while w.running and not w.served(self.first, self.at):
            turn = While(w, partial(self._unchanged, w, slow))
            yield from (self.then if slow else self.first).run(turn)
            if not self._unchanged(w, slow):  # else a checkpoint interrupts it, or the job is over
                yield w.settle(then=self)
                slow = bool(w.stragglers)
        yield from self.then.run(w)

    def _unchanged(self, w: Worker, slow: bool) -> bool:
        """Whether there is no reason to switch."""
        return bool(w.stragglers) == slow and not w.served(self.first, self.at)


@dataclass(frozen=True)
class Elastic(Switch):
    """Sync-Switch's elastic policy: it "removes any detected stragglers from the current cluster so as to
    complete the specified amount of BSP training free of stragglers. Once the designated BSP workload is
    fulfilled, it will then restore the cluster size and train the remaining workload with ASP".

    least: members that stay at least. trial: every so many steps those outside come back (0: never before
    the switch); one that is still slow is flagged again. A checkpoint just then makes it the next time.
    """

    least: int = 2
    trial: int = 0

    def run(self, w: Worker) -> Program:
        while not passed(w, self.at):
            while w.running and not passed(w, self.at):
                if slow := self._removable(w):
                    yield w.exclude(slow)
                    continue
                since = w.clock
                yield from self.first.run(While(w, partial(self._undisturbed, w, since)))
                if self._due(w, since) and self._going_on(w):
                    yield w.readmit()
            if not passed(w, self.at):  # a checkpoint interrupts it, or the job is over
                break
            yield w.readmit()
            yield w.settle(then=self)
        yield from self.then.run(w)

    def _undisturbed(self, w: Worker, since: int) -> bool:
        return self._going_on(w) and not self._due(w, since)

    def _going_on(self, w: Worker) -> bool:
        """Whether there is no reason to change the members, or to end."""
        return w.running and not self._removable(w) and not passed(w, self.at)

    def _due(self, w: Worker, since: int) -> bool:
        """Whether those outside are to be tried, by members that have been the same since a clock."""
        return self.trial > 0 and w.clock > since and w.clock % self.trial == 0

    def _removable(self, w: Worker) -> frozenset[int]:
        """The stragglers among the members, as many as may go."""
        slow = sorted(w.stragglers & set(w.members))
        return frozenset(slow[max(len(slow) - max(len(w.members) - self.least, 0), 0) :])
