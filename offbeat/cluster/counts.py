"""What an asynchronous phase did: pushes, how stale they were, waits at a bound."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any


class Counts:
    """What one worker did in a phase: its pushes, how stale they were, and its waits at a bound."""

    def __init__(self) -> None:
        self.staleness: Counter[int] = Counter()
        self.waits, self.wait_s = 0, 0.0

    def waited(self, seconds: float) -> None:
        if seconds > 0:
            self.waits += 1
            self.wait_s += seconds

    def row(self, rank: int) -> dict[str, Any]:
        """For the others."""
        return {
            "rank": rank,
            "staleness": dict(self.staleness),
            "bound_waits": self.waits,
            "bound_wait_s": round(self.wait_s, 4),
        }


def summed(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All workers' rows as the fields of a `pushes` record; {} when nothing was pushed."""
    total: Counter[int] = Counter()
    workers = []
    for row in rows:
        own = Counter({int(k): n for k, n in row["staleness"].items()})
        total.update(own)
        workers.append(
            {
                "rank": row["rank"],
                "pushes": own.total(),
                "mean_staleness": _mean(own),
                "max_staleness": max(own, default=0),
                "bound_waits": row["bound_waits"],
                "bound_wait_s": row["bound_wait_s"],
            }
        )
    if not total:
        return {}
    histogram = {str(k): total[k] for k in sorted(total)}
    return {"mean_staleness": _mean(total), "staleness": histogram, "workers": workers}


def _mean(histogram: Counter[int]) -> float:
    pushes = histogram.total()
    return round(sum(k * n for k, n in histogram.items()) / pushes, 4) if pushes else 0.0
