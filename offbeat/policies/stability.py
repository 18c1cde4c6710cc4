"""How large a step asynchrony allows: SGD with momentum and delayed gradients on a quadratic.

On a direction of curvature λ, updates with learning rate η whose gradients are `delay` updates old go as

    x_{t+1} = (1 + β)·x_t − β·x_{t−1} − ηλ·x_{t−delay}

which shrinks exactly while every root of z^{d+1} − (1 + β)·z^d + β·z^{d−1} + ηλ·z^{d−delay} lies inside the
unit circle (d = max(delay, 1)). Without delay that is the well-known ηλ < 2(1 + β). Among n workers that push
one after the other a gradient is n − 1 updates old, and n updates of η do what one of BSP's does with n·η.
"""

from __future__ import annotations

from functools import lru_cache

TOLERANCE = 1e-6


def stable(step: float, momentum: float, delay: int) -> bool:
    """Whether updates shrink; step: ηλ of one update."""
    import numpy

    degree = max(delay, 1) + 1
    polynomial = numpy.zeros(degree + 1)
    polynomial[:3] = 1.0, -(1 + momentum), momentum
    polynomial[delay + 1] += step
    return bool(numpy.abs(numpy.roots(polynomial)).max() < 1)


@lru_cache(maxsize=256)
def limit(momentum: float, members: int) -> float:
    """The largest n·ηλ at which asynchronous updates of `members` workers are stable; η is that of one push.

    BSP's of a single worker is 2(1 + β). With momentum 0.9, 8 workers may go to 0.126, thirty times less than
    BSP; without momentum to 1.67. In terms of η/(1 − β), what a step does in the long run, both allow about
    as much (1.26 and 1.67): under asynchrony momentum buys no larger steps."""
    low, high = 0.0, 4.0
    while high - low > TOLERANCE:
        middle = (low + high) / 2
        low, high = (middle, high) if stable(middle, momentum, members - 1) else (low, middle)
    return members * low
