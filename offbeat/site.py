"""What a worker finds around it: its clock, its ways to the others, and what its process keeps for it.

A real worker has a process to itself. Virtual workers (`offbeat.virtual`) share one: each has a site of its
own, found through a context variable. Nothing else in the library knows the difference.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from offbeat.cluster.epoch import Epoch
    from offbeat.cluster.state import State
    from offbeat.job import Job
    from offbeat.loop import Loop

POLL = 20e-6, 1e-3
"""Seconds between two looks at what others write into shared memory: at first, and at most."""
CHECK = 0.2
"""Seconds between two calls of `check` meanwhile."""


class Site:
    """A real worker's: its process. What takes virtual time in a virtual one costs nothing here."""

    virtual = False
    alike = 1  # workers that this one stands for
    dying = False  # it is being killed: nothing of it may be heard any more

    def __init__(self) -> None:
        self.job: Job | None = None
        self.synchronizers = 0  # made so far
        self.listeners: dict[int, Any] = {}  # `offbeat.backward`
        self.depth = 0  # backwards under way, of all threads
        self.open: dict[int, Any] = {}  # `offbeat.exits`

    def now(self) -> float:
        """Seconds, from some fixed moment."""
        return time.perf_counter()

    def unix(self) -> float:
        """Seconds since 1970; in virtual time, since the run's start."""
        return time.time()

    def make_job(self, seed: int | None, out: Any) -> Job:
        """Who this worker is."""
        from offbeat.job import from_environment

        return from_environment(seed, out)

    def part(self, store: Any, name: str) -> Any:
        """A store within the store, whose keys are its own."""
        from torch.distributed import PrefixStore

        return PrefixStore(name, store)

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
        """Joins the members of one stretch of a job. Collective. lossy: one of them may die meanwhile, which
        is found out in a bounded time, or as soon as `gone` says so."""
        from offbeat.cluster.epoch import FORMING, PATIENCE, Epoch

        return Epoch(number, members, rank, store, on, FORMING if lossy else PATIENCE, gone)

    def wait_until(self, ready: Callable[[], bool], check: Callable[[], None]) -> float:
        """Waits for what others write into shared memory; `check` is called now and then and may raise.
        Returns the seconds it took."""
        if ready():
            return 0.0
        begun = time.perf_counter()
        checked, pause = begun, POLL[0]
        while not ready():
            time.sleep(pause)
            pause = min(2 * pause, POLL[1])
            if time.perf_counter() > checked + CHECK:
                check()
                checked = time.perf_counter()
        return time.perf_counter() - begun

    # What takes time in a virtual worker

    def admit(self, state: State) -> None:
        """A job over `state` is about to begin here."""

    def begins(self, loop: Loop, data: bool) -> None:
        """The plan is about to begin, or (`data`) batches to be asked for."""

    def computed(self) -> None:
        """The unit's gradient has been computed; further calls mean the same one until `stepped`."""

    def stepped(self) -> None:
        """The next unit begins."""

    def updated(self) -> None:
        """The optimizer has stepped."""

    def switched(self) -> None:
        """Another protocol takes charge."""

    def pushed(self, size: int) -> None:
        """A gradient of `size` bytes goes to the shards."""

    @contextlib.contextmanager
    def pulling(self, size: int) -> Iterator[None]:
        """Inside, the shards are read; afterwards `size` bytes have come from them."""
        yield

    def gathering(self, sizes: Sequence[int]) -> None:
        """Every member gets all shards, of `sizes` bytes."""


_process = Site()
_current: ContextVar[Site] = ContextVar("offbeat_site", default=_process)


def here() -> Site:
    """The current worker's site. In a process of its own it is the same on all threads."""
    return _current.get()


def now() -> float:
    """The current worker's clock, in seconds."""
    return _current.get().now()


def move_to(site: Site) -> None:
    """The current context is `site`'s from here on."""
    _current.set(site)
