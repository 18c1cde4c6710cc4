"""Steps of workers that wait for each other now and then, followed as recurrences of their finishing times.

Where compute times vary, the mean of such a recurrence (a stochastic max-plus system) has no closed form: it
is followed with draws, the same for the same arguments. It never falls when a link slows, since each of its
steps is monotone and the draws stay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy

from offbeat.planner.spread import Array

if TYPE_CHECKING:
    from offbeat.planner.workers import Kind

_DRAWS = 200_000
"""Units that are drawn, about."""
_LEAST, _MOST = 60, 4000
"""Periods that are followed."""


def delayed(kinds: Sequence[Kind], t_c: float, period: int, delay: int) -> float:
    """Seconds of a step of DaSGD. An average begins when the last worker has come to its period's end, takes
    t_c, and each worker needs it `delay` steps after its own:

        W_i = max(A_i + Σ_d t_p, max_j A_j + t_c);   A_i' = W_i + Σ_{τ−d} t_p
    """
    steps, draw = _steps(kinds, period)
    now = numpy.zeros(sum(kind.count for kind in kinds))
    warm = steps // 6
    begun = 0.0
    for number in range(steps):
        if number == warm:
            begun = float(now.max())
        last = now.max()
        hidden, rest = draw(delay), draw(period - delay)
        now = numpy.maximum(now + hidden, last + t_c) + rest
    return (float(now.max()) - begun) / ((steps - warm) * period)


def _steps(kinds: Sequence[Kind], period: int) -> tuple[int, Callable[[int], Array]]:
    """How many periods to follow, and a function that draws each worker's sum of so many steps."""
    rng = numpy.random.default_rng(0)
    workers = sum(kind.count for kind in kinds)
    steps = min(max(_DRAWS // (workers * period), _LEAST), _MOST)
    if all(kind.unit.constant for kind in kinds):
        each = numpy.repeat([kind.mean + kind.update for kind in kinds], [kind.count for kind in kinds])
        return _LEAST, lambda count: count * each
    passed = [numpy.cumsum(kind.unit.chances) for kind in kinds]

    def draw(count: int) -> Array:
        rows = []
        for kind, chances in zip(kinds, passed, strict=True):
            if kind.unit.constant:
                rows.append(numpy.full(kind.count, count * (kind.mean + kind.update)))
                continue
            cells = numpy.searchsorted(chances, rng.random((count, kind.count)) * chances[-1])
            times = kind.unit.first + kind.unit.step * cells
            rows.append(times.sum(0) + count * kind.update)
        return numpy.concatenate(rows)

    return steps, draw
