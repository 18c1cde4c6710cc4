"""Timing-only runs of a user's script: it runs up to its first gradient, which tells the plan, the job's
length and the model's size, and no further."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from offbeat.cluster.epoch import Epoch
from offbeat.job import Job, seed_of
from offbeat.site import here, move_to
from offbeat.virtual.ambient import Ambient
from offbeat.virtual.clock import Clock, ClockSite

if TYPE_CHECKING:
    from offbeat.loop import Loop
    from offbeat.virtual.script import Script


class Found(BaseException):
    """The script has told what it would train."""


class ProbeSite(ClockSite):
    """Rank 0 of a job of `workers`, which ends before its first gradient; it never meets the others, who are
    taken to do as it does.

    loaded: names and files of the modules that were there when it ended."""

    def __init__(self, workers: int):
        super().__init__(Clock())
        self.alike = workers
        self.loop: Loop | None = None
        self.loaded: list[tuple[str, str]] = []

    def make_job(self, seed: int | None, out: Any) -> Job:
        return Job(
            rank=0,
            world_size=self.alike,
            local_rank=0,
            device=torch.device("cpu"),
            seed=seed_of(seed),
            out=None,
            started=0.0,
            backend="virtual",
            _store=self,  # nobody meets through it
        )

    def part(self, store: Any, name: str) -> Any:
        return store

    def epoch(
        self,
        number: int,
        members: Sequence[int],
        rank: int,
        store: Any,
        on: torch.device,
        lossy: bool = False,
        gone: Callable[[], bool] | None = None,
    ) -> Epoch:
        return Epoch(number, [rank], rank, None, on)

    def begins(self, loop: Loop, data: bool) -> None:
        self.loop = loop
        if data and loop.total is not None:
            raise Found

    def computed(self) -> None:
        raise Found

    def run(self, script: Script) -> BaseException | None:
        """Runs the script here until it has told what it would train. Returns what else it raised."""
        outside, before, environment = Ambient.of_process(), here(), dict(os.environ)
        move_to(self)
        with script:
            self.ambient = ambient = script.ambient(0)
            ambient.enter()
            try:
                script(0)
            except Found:
                pass
            except BaseException as error:
                return error
            finally:
                for name, module in list(sys.modules.items()):
                    if isinstance(file := getattr(module, "__file__", None), str):
                        self.loaded.append((name, file))
                ambient.leave()
                outside.enter()
                os.environ.clear()
                os.environ.update(environment)
                move_to(before)
        return None
