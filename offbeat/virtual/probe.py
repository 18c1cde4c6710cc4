"""Timing-only runs of a user's script: it runs up to its first gradient, which tells the plan, the job's
length and the model's size, and no further."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from offbeat.job import Job, seed_of
from offbeat.site import Site
from offbeat.virtual.clock import Clock
from offbeat.virtual.footprint import state_size
from offbeat.virtual.timing import Model

if TYPE_CHECKING:
    from offbeat.cluster.state import State
    from offbeat.sync import Synchronizer


class Found(BaseException):
    """The script has told what it would train."""


class ProbeSite(Site):
    """The only worker of a job that ends before its first gradient."""

    virtual = True

    def __init__(self) -> None:
        super().__init__()
        self.sync: Synchronizer | None = None

    def now(self) -> float:
        return 0.0

    def unix(self) -> float:
        return 0.0

    def make_job(self, seed: int | None, out: Any) -> Job:
        return Job(0, 1, 0, torch.device("cpu"), seed_of(seed), None, 0.0, backend="virtual")

    def begins(self, sync: Synchronizer, data: bool) -> None:
        self.sync = sync
        if data and sync.total is not None:
            raise Found

    def computed(self) -> None:
        raise Found


class TimingSite(Site):
    """Where a timing-only run keeps its journal: its clock is the simulation's."""

    virtual = True

    def __init__(self, clock: Clock):
        super().__init__()
        self._clock = clock

    def now(self) -> float:
        return self._clock.now

    def unix(self) -> float:
        return self._clock.now


def model_of(state: State) -> Model:
    """The model, as far as time is concerned. Parameters of several kinds count as of the first one's."""
    width = state.parameters[0].element_size()
    size = sum(p.numel() * p.element_size() for p in state.parameters)
    return Model(
        sizes=tuple(p.numel() for p in state.parameters),
        width=width,
        buffers=sum(b.numel() * b.element_size() for b in state.buffers(floating=True)),
        state=state_size(state) / size,
    )
