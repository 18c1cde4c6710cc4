"""A figure or a table of a paper: what is run for it, and the rows that come of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reproduce import beside
from reproduce.rule import Claim, spread, verdict
from reproduce.runs import Result, Run

record = beside("benchmarks/record")
Found = Mapping[str, Sequence[Result]]
"""Results by the names of their runs."""


@dataclass(frozen=True)
class Item:
    """known: rows of logs, closed forms, virtual time and small measurements; trained: those of what the
    `runs` have found. All in the mode small, full or quick. minutes: of `known`."""

    name: str
    title: str
    about: str
    known: Callable[[str], Iterable[Any]] = lambda mode: ()
    trained: Callable[[str, Found], Iterable[Any]] = lambda mode, found: ()
    runs: Callable[[str], dict[str, list[Run]]] = lambda mode: {}
    minutes: float = 0.2

    def all_runs(self, mode: str) -> list[Run]:
        return [run for some in self.runs(mode).values() for run in some]

    def time(self, mode: str, done: Callable[[Run], bool] = lambda run: False, jobs: int = 2) -> float:
        """Minutes, without the runs that are done."""
        return self.minutes + sum(run.minutes for run in set(self.all_runs(mode)) if not done(run)) / jobs


MARGIN = 2.0
"""Points of accuracy within which two plans are on par here, with three seeds; the paper's tolerance, over
five runs, is 1."""
TOLERANCE = 1.0
CHANCE = 15.0
"""Percent: a network that ends below has learnt nothing, of ten classes."""
ACCURACY = "accuracy on the test images at the end, %"
LOGS = "the authors' logs"


def accuracy(results: Sequence[Result]) -> list[float]:
    """In percent."""
    return [100 * result.accuracy for result in results]


def side_by_side(found: dict[str, list[float]], digits: int = 1) -> str:
    return "; ".join(f"{name} {spread(values, digits)}" for name, values in found.items())


def counted(*groups: Sequence[Any]) -> str:
    sizes = sorted({len(group) for group in groups})
    return str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"


def row(
    name: str,
    *,
    metric: str,
    size: str,
    seeds: str | int,
    paper: str,
    ours: str,
    claims: Sequence[Claim],
    why: str,
) -> Any:
    """A row of the page. paper: what it says; ours: the figures; why: a sentence on what differs, after the
    measured intervals."""
    measured = "; ".join(f"{claim.what}: {claim.found}" for claim in claims)
    return record.Row(
        name,
        {"metric": metric, "size": size, "seeds": str(seeds)},
        {
            "paper": paper,
            "ours": ours,
            "claims": [claim.as_json() for claim in claims],
            "reproduced": verdict(claims),
            "difference": f"{measured}. {why}",
        },
    )
