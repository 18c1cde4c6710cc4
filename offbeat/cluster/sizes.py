"""How a model is cut for its ways over the network: BSP's buckets, and the shards of a host. Pure: the real
engine goes by it, and so does whoever reckons how long that takes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from itertools import accumulate
from math import ceil

FIRST_BUCKET = 256 << 10
"""Bytes. Small, so that the first reduction starts early in backward."""
BUCKET = 4 << 20
"""Bytes. Large enough that a message's fixed cost does not show."""
LAST_BUCKET = 256 << 10
"""Bytes, at most, unless a single parameter has more. Small, since backward hides nothing of the last one."""
IN_FLIGHT = 4
"""Buckets that may be under way at a time in a gloo group (NCCL's go one after the other). On long links each
takes as long as its latencies, and whatever waits for its turn comes late."""
SHARD = 1 << 20
"""Bytes of parameters that are worth a shard of their own."""
MOST = 8
"""Shards of a host, at most."""


def buckets(sizes: Sequence[int], kinds: Sequence[Hashable] | None = None) -> list[list[int]]:
    """Numbers of the parameters in each bucket, in the reverse order of the parameters, which is about that
    of their gradients. The last bucket holds what fits into LAST_BUCKET, or the first parameter alone.
    sizes: bytes of each. kinds: parameters of two kinds never share a bucket."""
    found: list[list[int]] = []
    size, last = 0, max(bisect_right(list(accumulate(sizes)), LAST_BUCKET) - 1, 0)
    for number in reversed(range(len(sizes))):
        limit = BUCKET if len(found) > 1 else FIRST_BUCKET
        other = found and kinds is not None and kinds[found[-1][-1]] != kinds[number]
        if not found or other or size >= limit or number == last:
            found.append([])
            size = 0
        found[-1].append(number)
        size += sizes[number]
    return found


def shards(size: float, hosts: int) -> int:
    """Shards of each of `hosts` hosts, for `size` bytes of parameters in all."""
    return max(1, min(MOST, ceil(size / SHARD / hosts)))
