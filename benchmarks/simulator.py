"""What a timing-only run costs: microseconds of one core for a worker's step, by protocol and cluster size.

    python benchmarks/simulator.py
    python benchmarks/simulator.py --workers 8 1000 --steps 1000000 --rounds 1

Every run is a whole `simulate`: protocols, lognormal units, queues at NICs and shards, a journal in memory.
The model is ResNet-50, on servers of 8 with 20 Gbit/s between them. All combinations take turns; printed are
the least and the median CPU seconds over the rounds, as microseconds per worker-step. The least says most on
a machine that does other things too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from record import Record, Row, Setup

from offbeat.plan import parse
from offbeat.virtual.clock import Clock
from offbeat.virtual.cluster import Allreduce, Cluster, Compute, Group, Link, ShardService, equal
from offbeat.virtual.cost import Costs
from offbeat.virtual.timing import Model, Outcome, simulate

TITLE = "The simulator: cost of a worker's step against the cluster's size"
MINUTES = 1.0
SETTINGS = {"steps": 50_000, "rounds": 3, "model": "resnet50, 25.6 M parameters", "a unit, s": 0.25}
PLANS = ("bsp", "local(4)", "dasgd(4,2)", "asp", "ssp(3)", "bsp:50% asp")
MODEL = Model(equal(25_600_000, 161), buffers=4 * 53_120)


class Memory:
    """A journal in memory."""

    def __init__(self, clock: Clock):
        self.clock, self.rows = clock, 0

    def record(self, type: str, **fields: Any) -> None:
        self.rows += 1


def cluster(workers: int, per_host: int, unit: float) -> Cluster:
    group = Group(workers, per_host, 1.0, Compute(unit, "lognormal", 0.1), Link(2.5e9, 5e-5))
    return Cluster(
        name="servers",
        source="benchmarks/simulator.py",
        size=workers,
        groups=(group,),
        backward=2 / 3,
        host=Link(16e9, 5e-6),
        allreduce=Allreduce("hierarchical"),
        shards=ShardService(2e9, 1e-4),
    )


def run(plan: str, workers: int, steps: int, args: argparse.Namespace) -> tuple[float, Outcome]:
    """CPU seconds, and what came out."""
    costs, clock = Costs(cluster(workers, args.per_host, args.unit), seed=1), Clock()
    begun = time.process_time()
    found = simulate(parse(plan), workers * steps, costs, MODEL, journal=Memory(clock), clock=clock)
    return time.process_time() - begun, found


def options(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 64, 256, 1000])
    parser.add_argument("--plans", nargs="+", default=PLANS)
    parser.add_argument("--steps", type=int, default=200_000, help="of all workers together, in a run")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--per-host", type=int, default=1, help="workers of a server")
    parser.add_argument("--unit", type=float, default=0.25, help="seconds of a mini-batch")
    parser.add_argument("--json", help="where to write the results")
    return parser.parse_args(words)


def taken_by(args: argparse.Namespace) -> tuple[dict[tuple[str, int], list[float]], dict[Any, Outcome]]:
    """Microseconds per worker-step of every round, and what was simulated."""
    taken: dict[tuple[str, int], list[float]] = {}
    outcomes: dict[tuple[str, int], Outcome] = {}
    for _ in range(args.rounds):
        for plan in args.plans:
            for workers in args.workers:
                steps = max(args.steps // workers, 1)
                seconds, outcomes[plan, workers] = run(plan, workers, steps, args)
                taken.setdefault((plan, workers), []).append(seconds / workers / steps * 1e6)
    return taken, outcomes


def measure(setup: Setup) -> Iterator[Row]:
    words = "--steps 2000 --rounds 1 --workers 8 --plans bsp" if setup.quick else "--steps 50000 --rounds 3"
    args = options(words.split())
    taken, outcomes = taken_by(args)
    for (plan, workers), costs in taken.items():
        found = outcomes[plan, workers]
        values = {"least_us": round(min(costs), 2), "us": round(statistics.median(costs), 2)}
        values |= {"units/s in virtual time": round(found.units / found.seconds, 1)}
        ratio = round(min(costs) / min(taken[plan, args.workers[0]]), 3)
        yield Row(plan, {"workers": workers}, values, ratio, f"{args.workers[0]} workers")


def page(record: Record) -> list[str]:
    from page import paragraph, table

    sizes = list(dict.fromkeys(row.settings["workers"] for row in record.rows))
    cells: dict[str, list[Any]] = {}
    for row in record.rows:
        cells.setdefault(row.name, []).append(f"{row.values['least_us']:.1f}")
    for plan, its in cells.items():
        its.append(
            next(
                f"{r.ratio:.2f}" for r in record.rows if r.name == plan and r.settings["workers"] == sizes[-1]
            )
        )
    text = paragraph(
        """Microseconds of one core for a worker's step when only time is simulated (`--timing-only`), the
        least of the rounds; ResNet-50 on servers joined by 20 Gbit/s. The last column is the largest
        cluster's cost over the smallest's. With shards and up to 8 workers every stream between a worker and
        a shard is followed (`offbeat/virtual/sharing.py`), which costs more than the queues of larger
        clusters."""
    )
    head = ["plan", *(f"{size:,} workers" for size in sizes), "last / first"]
    return [text, *table(head, [[plan, *its] for plan, its in cells.items()])]


def main() -> int:
    args = options()
    settings = {
        "steps": args.steps,
        "rounds": args.rounds,
        "per host": args.per_host,
        "unit": args.unit,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
    }
    print(", ".join(f"{key} {value}" for key, value in settings.items()))
    taken, outcomes = taken_by(args)
    print("us per worker-step, least (median)")
    print(f"{'':14}" + "".join(f"{f'{workers} workers':>16}" for workers in args.workers) + "   last/first")
    for plan in args.plans:
        rows = [taken[plan, workers] for workers in args.workers]
        cells = "".join(f"{f'{min(row):.2f} ({statistics.median(row):.2f})':>16}" for row in rows)
        print(f"{plan:14}{cells}{min(rows[-1]) / min(rows[0]):13.2f}")
    print("what they simulated: units/s in virtual time, share of waiting")
    for plan in args.plans:
        found = [outcomes[plan, workers] for workers in args.workers]
        cells = "".join(f"{f'{o.units / o.seconds:,.0f} ({100 * o.waiting:.0f}%)':>16}" for o in found)
        print(f"{plan:14}{cells}")
    if args.json:
        rows_of = {f"{plan} {workers}": row for (plan, workers), row in taken.items()}
        Path(args.json).write_text(json.dumps({"settings": settings, "us": rows_of}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
