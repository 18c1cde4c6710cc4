"""How much memory virtual workers will need: said, and refused where it is not there, before they train."""

from __future__ import annotations

import os
from pathlib import Path

from offbeat.cluster.state import State
from offbeat.cut import way_of
from offbeat.twin import slots


class TooLarge(MemoryError):
    """The workers don't fit into this machine's memory."""


class Footprint:
    """Made before any worker runs; `check` when the first one has built its model."""

    def __init__(self, workers: int):
        self._workers, self._before = workers, resident()
        self._checked = False

    def check(self, state: State) -> str:
        """What all will need, the first time that it is asked, else "". The first worker's own memory so far,
        with its data, counts for each of them. Raises TooLarge."""
        if self._checked:
            return ""
        self._checked = True
        script = max(resident() - self._before, 0)
        model = size_of(state)
        training = 2 * model + state_size(state)  # gradients, what travels, the optimizer's state
        need, there = self._workers * (script + training), available() + script
        each = f"{self._workers} virtual workers need about {_text(need)} of memory: each its model and data "
        each += f"({_text(script)} so far) and {_text(training)} to train it"
        if there and need > there:
            raise TooLarge(
                f"{each}; {_text(there)} are available. Take fewer workers or a smaller model or data set; "
                f"--timing-only needs one model"
            )
        return f"{each}; {_text(there)} are available"


def size_of(state: State) -> int:
    """Bytes of the parameters that are trained."""
    return sum(p.numel() * p.element_size() for p in state.parameters)


def state_size(state: State) -> int:
    """Bytes that the optimizers will keep for them; twice the parameters for one that won't say."""
    way, total = way_of(state.optimizers, None), 0
    known = {id(p) for p in state.parameters}
    for optimizer in state.optimizers:
        for number, group in enumerate(optimizer.param_groups):
            for p in group["params"]:
                if id(p) in known:
                    shape = (2,) if way == "elements" else tuple(p.shape)
                    try:
                        rows = slots(optimizer, number, shape, p.dtype, way)
                    except TypeError:
                        total += 2 * p.numel() * p.element_size()
                        continue
                    total += sum(p.numel() * row.dtype.itemsize for row in rows if row.kind == "element")
    return total


def resident() -> int:
    """Bytes of memory that this process holds."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def available() -> int:
    """Bytes of memory that are free for use; 0 where the system doesn't say."""
    try:
        rows = Path("/proc/meminfo").read_text().splitlines()
        return next(int(row.split()[1]) << 10 for row in rows if row.startswith("MemAvailable"))
    except (OSError, ValueError, StopIteration):
        return 0


def _text(size: float) -> str:
    return f"{size / 2**30:.1f} GB" if size >= 2**30 else f"{size / 2**20:.3g} MB"
