"""What a person may ask of a running job (`offbeat ctl`): met by all members together, at a place where all
hold the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat.checkpoint import CheckpointError
from offbeat.cluster.roll import names_of
from offbeat.plan import PlanError, parse
from offbeat.plan import check as plan_check
from offbeat.policies.switches import Greedy
from offbeat.protocols import Protocol, Switch
from offbeat.worker import Worker, passed

if TYPE_CHECKING:
    from offbeat.loop import Loop


class Refused(Exception):
    """It can't be done; the text says why."""


def meet(loop: Loop, request: dict[str, Any]) -> None:
    """Does what is asked and answers. Collective. The worker that is dropped doesn't return."""
    worker, desk = loop.worker, loop.worker.team.desk
    assert desk is not None
    ways: dict[str, Callable[[Loop, dict[str, Any]], str]] = {
        "drop": _drop,
        "switch": _switch,
        "checkpoint": _checkpoint,
    }
    try:
        ok, text = True, ways[request["do"]](loop, request)
    except (Refused, PlanError, OSError, CheckpointError) as error:
        ok, text = False, str(error)
    loop.journal.record("request", do=request["do"], ok=ok, text=text, units=worker.units)
    if worker.rank == worker.members[0]:
        desk.answer(request, ok, text)


def _drop(loop: Loop, request: dict[str, Any]) -> str:
    worker, rank = loop.worker, request["rank"]
    if rank not in worker.members:
        raise Refused(f"rank {rank} is no member; members are {names_of(worker.members)}")
    left = len(worker.members) - 1
    if left < loop.minimum:
        raise Refused(f"without rank {rank} the job would have {left} left; --min is {loop.minimum}")
    if worker.team.drop(rank):
        loop.dismiss()
    return f"rank {rank} has ended; members are {names_of(worker.members)}"


def _switch(loop: Loop, request: dict[str, Any]) -> str:
    if (text := request.get("plan")) is not None:
        plan = loop.policy.apply(parse(text))
        plan_check(plan, loop.worker.whole())
    else:
        after = following(loop.plan, loop.worker)
        if after is None:
            raise Refused(f"nothing comes after {loop.protocol} in {loop.plan}; say what: switch PLAN")
        plan = after
    loop.replan(plan)
    return f"{plan.current(loop.worker)} from {loop.worker.units:,} units on"


def following(plan: Protocol, w: Worker) -> Protocol | None:
    """The plan without the protocol in charge: what comes after it now. None if nothing does."""
    if not isinstance(plan, Switch):
        return None
    if w.served(plan.first, plan.at) if isinstance(plan, Greedy) else passed(w, plan.at):
        return following(plan.then, w)
    rest = following(plan.first, w)
    return plan.then if rest is None else replace(plan, first=rest)


def _checkpoint(loop: Loop, request: dict[str, Any]) -> str:
    path = Path(request["path"])
    loop.save_here(path)
    return f"saved {path} at {loop.worker.units:,} units"
