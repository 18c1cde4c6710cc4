"""Offbeat decides when data-parallel PyTorch workers wait for each other."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offbeat.checkpoint import CheckpointError as CheckpointError
    from offbeat.cluster.epoch import PeerLost as PeerLost
    from offbeat.guard import Diverged as Diverged
    from offbeat.job import device as device
    from offbeat.job import init as init
    from offbeat.job import rank as rank
    from offbeat.job import world_size as world_size
    from offbeat.loop import BelowMinimum as BelowMinimum
    from offbeat.plan import PlanError as PlanError
    from offbeat.plan import parse as parse_plan  # noqa: F401
    from offbeat.policies.detector import Detection as Detection
    from offbeat.policies.switches import Stragglers as Stragglers
    from offbeat.protocols import ASP as ASP
    from offbeat.protocols import BSP as BSP
    from offbeat.protocols import SSP as SSP
    from offbeat.protocols import DaSGD as DaSGD
    from offbeat.protocols import LocalSGD as LocalSGD
    from offbeat.protocols import Protocol as Protocol
    from offbeat.protocols import Switch as Switch
    from offbeat.sync import Synchronizer as Synchronizer
    from offbeat.worker import Handle as Handle
    from offbeat.worker import Worker as Worker

__version__ = "0.1.0.dev0"

# Names are resolved on first use, so that the command line answers without importing torch.
_HOME = {
    "ASP": "offbeat.protocols",
    "BSP": "offbeat.protocols",
    "BelowMinimum": "offbeat.loop",
    "CheckpointError": "offbeat.checkpoint",
    "DaSGD": "offbeat.protocols",
    "Detection": "offbeat.policies.detector",
    "Diverged": "offbeat.guard",
    "Handle": "offbeat.worker",
    "LocalSGD": "offbeat.protocols",
    "PeerLost": "offbeat.cluster.epoch",
    "PlanError": "offbeat.plan",
    "Protocol": "offbeat.protocols",
    "SSP": "offbeat.protocols",
    "Stragglers": "offbeat.policies.switches",
    "Switch": "offbeat.protocols",
    "Synchronizer": "offbeat.sync",
    "Worker": "offbeat.worker",
    "device": "offbeat.job",
    "init": "offbeat.job",
    "parse_plan": "offbeat.plan",
    "rank": "offbeat.job",
    "world_size": "offbeat.job",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'offbeat' has no attribute {name!r}")
    module = importlib.import_module(_HOME[name])
    value = getattr(module, "parse" if name == "parse_plan" else name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
