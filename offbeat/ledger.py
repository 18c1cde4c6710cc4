"""The ledger: which units the job's state has used, each by one committed update.

A unit is committed when its effect is in the state that all members go on from: under BSP with the step
that its gradient is in, under local protocols with the average or settle that tells of it, on shards when
every shard has applied it. The members keep one number: the sum of the marks of all committed units. Each
worker adds the mark of the unit that its loop was lent, at the step that uses it, so the number is what was
done and not what was planned. `offbeat.audit` compares it with the units that should be in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy

WORD = 1 << 64
_BLOCK = 1 << 20


def mark(unit: int) -> int:
    """A unit's mark: 64 bits that look random (SplitMix64's, Steele et al. 2014), so that the sums of
    different units hardly ever agree."""
    z = (unit + 1) * 0x9E3779B97F4A7C15 % WORD
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % WORD
    z = (z ^ z >> 27) * 0x94D049BB133111EB % WORD
    return z ^ z >> 31


def marks(first: int, end: int) -> int:
    """The sum of the marks of units `first` to `end - 1`, modulo 2^64."""
    total = 0
    for begin in range(first, end, _BLOCK):
        z = numpy.arange(begin + 1, min(begin + _BLOCK, end) + 1, dtype=numpy.uint64)
        z *= numpy.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
        total += int((z ^ (z >> numpy.uint64(31))).sum(dtype=numpy.uint64))
    return total % WORD


def dealt(first: int, end: int, redeal: Mapping[int, int]) -> int:
    """The sum of the marks of the units that numbers `first` to `end - 1` deal out. redeal: where that is
    another unit than the number's."""
    moved = sum(mark(unit) - mark(number) for number, unit in redeal.items() if first <= number < end)
    return (marks(first, end) + moved) % WORD


def used(done: int, pending: Iterable[int]) -> int:
    """What the sum should be when `done` units are, and `pending`, which were dealt before some of them,
    are to be dealt again."""
    waiting = list(pending)
    return (marks(0, done + len(waiting)) - sum(map(mark, waiting))) % WORD


def pending(done: int, redeal: Mapping[int, int]) -> list[int]:
    """The units that were given back and not done since. redeal: which unit a number deals out, where that is
    another one; `done` numbers are through."""
    top = max((number + 1 for number in redeal), default=done)
    return sorted(redeal.get(number, number) for number in range(done, top))
