"""How well the two rules tell stragglers, on made-up windows: false alarms, and how soon one is found.

    python benchmarks/detector.py
    python benchmarks/detector.py --noise 0.3 --trials 100 --json detector.json

A window's time of a step is the mean of `--window` steps' times, each normal with `--noise` of its mean as
standard deviation, times the slowdown of a planted straggler. In the first table nobody is slow: every flag
is a false alarm. As a worker that is flagged can't be flagged again before it is cleared, the share of the
windows in which somebody is held for a straggler stands beside it. In the second table the stragglers are
slow in all windows of a trial; found means that exactly they are flagged. About half a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from offbeat.policies.detector import RULES, Detection, Detector

MEMBERS = 8
PLANTED = ((1, 4), (1, 8), (2, 4))
LONGEST = 50
"""Windows after which a straggler that isn't found counts as never found."""


def windows(
    seed: int, count: int, members: int, slow: Mapping[int, float], args: argparse.Namespace
) -> Iterator[dict[int, float]]:
    """Each member's speed, window by window."""
    times = np.random.RandomState(seed).normal(1, args.noise, (count, members, args.window)).mean(2)
    for rank, factor in slow.items():
        times[:, rank] *= factor
    for row in (1 / times).tolist():
        yield dict(enumerate(row))


def alarms(rule: str, count: int, args: argparse.Namespace) -> tuple[float, float]:
    """Flags per 1,000 windows in which nobody is slow, and the share of them with somebody flagged."""
    detector, flags, held = Detector(Detection(rule, args.window, count)), 0, 0
    for speeds in windows(0, args.healthy, MEMBERS, {}, args):
        look = detector.look(speeds)
        flags += len(look.flagged)
        held += bool(look.stragglers)
    return 1000 * flags / args.healthy, held / args.healthy


def took(
    rule: str, slow: Mapping[int, float], members: int, seed: int, args: argparse.Namespace
) -> tuple[float, bool]:
    """Windows until exactly the planted stragglers are flagged, and whether nobody else was before."""
    detector, clean = Detector(Detection(rule, args.window, args.count)), True
    for number, speeds in enumerate(windows(seed, LONGEST, members, slow, args), 1):
        stragglers = detector.look(speeds).stragglers
        clean = clean and stragglers <= slow.keys()
        if stragglers == slow.keys():
            return number, clean
    return inf, clean


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--noise", type=float, default=0.1, help="of one step's time")
    parser.add_argument("--window", type=int, default=Detection().window, help="steps")
    parser.add_argument("--healthy", type=int, default=20_000, help="windows of the first table")
    parser.add_argument("--counts", type=int, nargs="+", default=range(1, 9), help="of the first table")
    parser.add_argument("--count", type=int, default=Detection().count, help="of the second table")
    parser.add_argument("--slowdowns", type=float, nargs="+", default=[1.15, 1.3, 2, 4])
    parser.add_argument("--trials", type=int, default=500, help="of each cell of the second table")
    parser.add_argument("--json", help="where to write the results")
    args = parser.parse_args()
    settings = {
        "noise": args.noise,
        "window": args.window,
        "healthy windows": args.healthy,
        "count": args.count,
        "trials": args.trials,
        "min_slowdown": Detection().min_slowdown,
        "spread": Detection().spread,
        "recovery": Detection().recovery,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
    }
    print(", ".join(f"{key} {value}" for key, value in settings.items()))
    begun = time.perf_counter()
    healthy: dict[str, dict[int, tuple[float, float]]] = {}
    print(
        f"false alarms per 1,000 healthy windows of {MEMBERS} workers (share with somebody flagged), by count"
    )
    print(f"{'':8}" + "".join(f"{count:>15}" for count in args.counts))
    for rule in RULES:
        healthy[rule] = {count: alarms(rule, count, args) for count in args.counts}
        texts = [f"{flags:,.2f} ({100 * held:.1f}%)" for flags, held in healthy[rule].values()]
        print(f"{rule:8}" + "".join(f"{text:>15}" for text in texts))
    within = args.count + 2
    planted: list[dict[str, Any]] = []
    print(f"stragglers found within {within} windows (median windows until found), by slowdown")
    print(f"{'':16}" + "".join(f"{slowdown:>15g}" for slowdown in args.slowdowns) + "   healthy ones flagged")
    for rule in RULES:
        for number, members in PLANTED:
            cells, wrong = [], 0
            for slowdown in args.slowdowns:
                slow = dict.fromkeys(range(number), slowdown)
                trials = [took(rule, slow, members, seed, args) for seed in range(args.trials)]
                found = sum(count <= within for count, _ in trials) / len(trials)
                median = statistics.median(count for count, _ in trials)
                wrong += sum(not clean for _, clean in trials)
                cells.append(f"{100 * found:.1f}% ({'-' if median == inf else f'{median:g}'})")
                planted.append(
                    {
                        "rule": rule,
                        "stragglers": number,
                        "members": members,
                        "slowdown": slowdown,
                        "found": found,
                        "median": None if median == inf else median,
                        "false": sum(not clean for _, clean in trials) / len(trials),
                    }
                )
            share = wrong / len(args.slowdowns) / args.trials
            texts = [f"{cell:>15}" for cell in cells]
            print(f"{rule:8}{f'{number} of {members}':8}{''.join(texts)}{100 * share:21.1f}%")
    print(f"{time.perf_counter() - begun:.0f} s")
    if args.json:
        rows = {"settings": settings, "alarms": healthy, "found": planted}
        Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
