"""What a user gave to `Synchronizer`, checked: errors name the value and what would be valid."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from offbeat import plan
from offbeat.cluster.spec import ON_DIVERGE
from offbeat.cluster.state import State
from offbeat.policies.auto import uses_auto as uses_auto
from offbeat.policies.switches import Stragglers
from offbeat.protocols import Protocol

WIRES = {None: None, "fp32": None, "bf16": torch.bfloat16}


def modules_of(model: Any) -> list[nn.Module]:
    modules = [model] if isinstance(model, nn.Module) else list(model)
    for module in modules:
        if not isinstance(module, nn.Module):
            raise TypeError(f"model is a torch.nn.Module or several; got {type(module).__name__}")
        if type(module).__name__ in ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel"):
            raise TypeError(
                f"the model is wrapped in {type(module).__name__}, which would synchronize it a second time: "
                f"give Synchronizer the model itself"
            )
    return modules


def check_parts(state: State) -> None:
    known = {id(p) for p in [*state.parameters, *state.frozen]}
    for p in [*state.parameters, *state.frozen]:
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise ValueError(
                "the model has lazy parameters: run one batch through it before Synchronizer(...)"
            )
    if not state.parameters:
        raise ValueError("the model has no parameter with requires_grad=True: there is nothing to train")
    if not state.optimizers:
        raise ValueError("Synchronizer needs an optimizer")
    for optimizer in state.optimizers:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"optimizer is a torch.optim.Optimizer or several; got {type(optimizer).__name__}"
            )
        if isinstance(optimizer, torch.optim.LBFGS):
            raise TypeError(
                "LBFGS evaluates the model inside its step(closure), which cannot be synchronized"
            )
        for group in optimizer.param_groups:
            if any(id(p) not in known for p in group["params"]):
                raise ValueError(
                    "the optimizer has a parameter that is not the model's: it would not be synchronized; "
                    "give Synchronizer every module that the optimizer trains"
                )


def plan_of(given: str | Protocol) -> Protocol:
    if isinstance(given, Protocol):
        return given
    if isinstance(given, str):
        return plan.parse(given)
    raise TypeError(f"plan is a text such as 'bsp:6.25% dasgd', or a protocol; got {given!r}")


def length_of(total: int | None, epochs: float | None) -> tuple[int | None, float | None]:
    if text := os.environ.get("OFFBEAT_TOTAL"):
        if not text.replace("_", "").isdigit():
            raise ValueError(f"OFFBEAT_TOTAL is a whole number of units, such as 64000; it is {text!r}")
        total, epochs = int(text), None
    if (total is None) == (epochs is None):
        raise ValueError(
            "Synchronizer needs the job's length: either total= (units, mini-batches of all workers) or "
            "epochs="
        )
    if total is not None and (isinstance(total, bool) or not isinstance(total, int) or total < 1):
        raise ValueError(f"total is a whole number of units from 1; got total={total!r}")
    if epochs is not None and not epochs > 0:
        raise ValueError(f"epochs is a positive number; got epochs={epochs!r}")
    return total, epochs


def share_of(text: str, total: int | None) -> float:
    try:
        if text.endswith("%"):
            share = float(text[:-1]) / 100
        elif text.endswith("u") and total is not None:
            share = int(text[:-1]) / total
        else:
            raise ValueError
        if not share > 0:
            raise ValueError
    except ValueError:
        raise ValueError(
            f"sync.every takes a share such as '5%' or units such as '500u'; got {text!r}"
        ) from None
    return min(share, 1.0)


def wire_of(given: str | None) -> str:
    """The wire's name, "fp32" by default; the command line's comes first."""
    name = os.environ.get("OFFBEAT_WIRE") or given or "fp32"
    if name not in WIRES:
        raise ValueError(f"wire is 'bf16', or 'fp32' for full precision; got {name!r}")
    return name


def on_diverge_of(mode: str) -> str:
    """What to do when training diverges; `--on-diverge` comes first. Raises ValueError."""
    asked = os.environ.get("OFFBEAT_ON_DIVERGE") or mode
    if asked not in ON_DIVERGE:
        raise ValueError(f"on_diverge is one of {', '.join(ON_DIVERGE)}; got {asked!r}")
    return asked


def stragglers_of(given: str | Stragglers) -> Stragglers:
    """What to do about stragglers; `--stragglers` comes first. Raises ValueError or TypeError."""
    asked = os.environ.get("OFFBEAT_STRAGGLERS") or given
    if isinstance(asked, Stragglers):
        return asked
    if isinstance(asked, str):
        return Stragglers.parse(asked)
    raise TypeError(f"stragglers is a text such as 'elastic'; got {asked!r}")


def check_auto(plan: Protocol, optimizers: Sequence[Optimizer]) -> None:
    """Raises ValueError for a plan auto with an optimizer that it knows nothing of."""
    for optimizer in optimizers:
        if uses_auto(plan) and not isinstance(optimizer, SGD):
            raise ValueError(
                f"the plan auto knows when delayed SGD is stable, and nothing of {type(optimizer).__name__}: "
                f"let `offbeat search` find the switch point, or give a share, as in bsp:25% asp"
            )


def traps(plan: Protocol, optimizers: Sequence[Optimizer], begins: bool) -> Iterator[str]:
    """What is allowed under `plan` and seldom meant. begins: the job is at its first step."""
    first, asynchronous = plan.parts()[0], any(part.home == "shards" for part in plan.parts())
    momentum = max((group.get("momentum", 0) for o in optimizers for group in o.param_groups), default=0)
    if begins and first.home == "shards" and momentum:
        yield (
            f"{first} from the job's first step with momentum {momentum}: early on, stale gradients make "
            f'training unstable (Sync-Switch); begin with BSP, as in "bsp:12.5% {first}", or without momentum'
        )
    hooks = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    for optimizer in optimizers:
        if asynchronous and any(getattr(optimizer, name, None) for name in hooks):
            name = type(optimizer).__name__
            yield f"under asp and ssp the shards step, and the step hooks of {name} don't run"
