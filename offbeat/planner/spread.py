"""Distributions of times: sums of several, and the slowest of many.

With all workers waiting for each other, a step takes as long as the slowest one's: E[max of n], which grows
with n although the mean stays. That is BSP's slowdown by uneven compute times.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import erf, log, sqrt

import numpy
from numpy.typing import NDArray

from offbeat.virtual.cluster import Compute

Array = NDArray[numpy.float64]

_CELLS = 4096
"""Of a single time's grid."""
_TAIL = 5.5
"""Standard deviations of a logarithm that a lognormal's grid reaches: 2e-8 lie beyond."""


class Spread:
    """A distribution over the cells of an even grid: cell i holds times around `first + i·step`.

    chances: of each cell, which add up to 1."""

    def __init__(self, first: float, step: float, chances: Array):
        self.first, self.step, self.chances = first, step, chances

    @property
    def times(self) -> Array:
        return self.first + self.step * numpy.arange(len(self.chances), dtype=numpy.float64)

    @property
    def mean(self) -> float:
        return float(self.times @ self.chances)

    @property
    def constant(self) -> bool:
        return len(self.chances) == 1

    def shifted(self, seconds: float) -> Spread:
        """Each time that much longer."""
        return Spread(self.first + seconds, self.step, self.chances)

    def slower(self, factor: float) -> Spread:
        """Each time that many times longer."""
        return Spread(self.first * factor, self.step * factor, self.chances)

    def sum(self, count: int) -> Spread:
        """Of `count` independent draws."""
        if self.constant or count == 1:
            return Spread(count * self.first, self.step, self.chances)
        cells = count * (len(self.chances) - 1) + 1
        length = 1 << (cells - 1).bit_length()
        spectrum = numpy.fft.rfft(self.chances, length) ** count
        chances = numpy.fft.irfft(spectrum, length)[:cells].clip(min=0)
        return Spread(count * self.first, self.step, chances / chances.sum())


def spread_of(compute: Compute) -> Spread:
    """A unit's distribution."""
    return _spread(compute.kind, compute.unit, compute.sigma, compute.samples)


@lru_cache(maxsize=64)
def _spread(kind: str, unit: float, sigma: float, samples: tuple[float, ...]) -> Spread:
    if kind == "samples":
        low, high = min(samples), max(samples)
        step = (high - low) / (_CELLS - 1)
        if step == 0:
            return Spread(low, 0.0, numpy.ones(1))
        # Between two cells a sample counts for both, so that the mean stays exact.
        places = (numpy.array(samples) - low) / step
        below = numpy.minimum(places.astype(int), _CELLS - 2)
        share = places - below
        chances = numpy.bincount(below, 1 - share, _CELLS) + numpy.bincount(below + 1, share, _CELLS)
        return Spread(low, step, chances / len(samples))
    if kind == "lognormal" and sigma > 0:
        middle = log(unit) - sigma**2 / 2
        low, high = numpy.exp(middle - _TAIL * sigma), numpy.exp(middle + _TAIL * sigma)
        edges = numpy.linspace(low, high, _CELLS + 1)
        passed = numpy.array([(1 + erf(z / sqrt(2))) / 2 for z in (numpy.log(edges) - middle) / sigma])
        chances = numpy.diff(passed)
        found = Spread(float(edges[0] + edges[1]) / 2, float(edges[1] - edges[0]), chances / chances.sum())
        return found.slower(unit / found.mean)
    return Spread(unit, 0.0, numpy.ones(1))


def slowest(spreads: Sequence[tuple[Spread, int]], quantiles: int = 0) -> Array:
    """The largest of independent draws, `count` of each spread: equally likely values of it, as many as
    `quantiles` (0: its mean alone)."""
    if all(one.constant for one, _ in spreads):
        return numpy.full(max(quantiles, 1), max(one.first for one, _ in spreads))
    low = max(float(one.times[numpy.nonzero(one.chances)[0][0]]) for one, _ in spreads)
    high = max(float(one.times[-1]) for one, _ in spreads)
    steps = [one.step for one, _ in spreads if not one.constant]
    grid = numpy.arange(low - max(steps), high + 1.5 * max(steps), min(steps) / 2)
    passed = numpy.ones(len(grid))
    for one, count in spreads:
        if one.constant:
            passed *= grid >= one.first
        else:  # a cell's chance lies evenly around its time
            edges = one.first + one.step * (numpy.arange(len(one.chances) + 1) - 0.5)
            share = numpy.interp(grid, edges, numpy.concatenate([[0.0], numpy.cumsum(one.chances)]))
            passed *= share**count
    if not quantiles:
        chances = numpy.diff(passed, prepend=0.0)
        middles = numpy.concatenate([grid[:1], (grid[1:] + grid[:-1]) / 2])
        return numpy.array([float(middles @ chances) / float(passed[-1])])
    levels = (numpy.arange(quantiles) + 0.5) / quantiles
    first = int(numpy.searchsorted(passed, 1e-300))
    return numpy.interp(levels, passed[first:], grid[first:])


def mean_of_slowest(spreads: Sequence[tuple[Spread, int]]) -> float:
    """E[max], in seconds."""
    return float(slowest(spreads)[0])


def slowdown(compute: Compute, workers: int) -> float:
    """How many times longer a step takes where `workers` wait for each other than one worker's: E[max of n] /
    mean. 1 for equal times; about 1 + σ·√(2·ln n) for a little spread lognormal."""
    one = spread_of(compute)
    return max(mean_of_slowest([(one, workers)]) / one.mean, 1.0)
