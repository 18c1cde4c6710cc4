"""What the virtual cluster costs: virtual workers against the same gradients in a plain loop.

    python benchmarks/virtual.py                  8 workers, ResNet-8, batches of 32

Plain: one model, forward, backward and optimizer step on as many batches of the same size. Both take turns in
one process; printed are medians and the spread (lowest to highest) over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import offbeat
from offbeat.plan import parse
from offbeat.virtual.ambient import Ambient
from offbeat.virtual.cost import Costs
from offbeat.virtual.description import preset
from offbeat.virtual.engine import Engine

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from models import resnet8

PLANS = ("bsp", "local(4)", "dasgd(4,2)", "asp", "ssp(3)")


def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(size, 3, 32, 32), torch.randint(0, 10, (size,))


def plain(units: int, size: int) -> float:
    """Seconds of `units` gradients and steps."""
    torch.manual_seed(0)
    model = resnet8()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x, y = batch(size)
    begun = time.perf_counter()
    for _ in range(units):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return time.perf_counter() - begun


def virtual(plan: str, workers: int, units: int, size: int) -> tuple[float, float]:
    """Seconds of the same number of units by virtual workers, from the first step on; and the share that is
    spent between the workers' turns."""
    begun: list[float] = []

    def script(rank: int) -> None:
        offbeat.init(out=False)
        model = resnet8()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        x, y = batch(size)
        with offbeat.Synchronizer(model, optimizer, parse(plan), total=units) as sync:
            if not begun:
                begun.append(time.perf_counter())
            while not sync.done:
                F.cross_entropy(model(x), y).backward()
                sync.step()

    def ambient(rank: int) -> Ambient:
        return Ambient(None, sys.argv, {}, sys.stdout, sys.stderr)

    engine = Engine(Costs(preset("here").sized(workers), 0), script, ambient)
    for ending in engine.run():
        if ending.error is not None:
            raise ending.error
    return time.perf_counter() - begun[0], engine.overhead.own / engine.overhead.seconds


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--workers", type=int, default=8)
    ask.add_argument("--batch-size", type=int, default=32)
    ask.add_argument("--units", type=int, default=160, help="of each turn")
    ask.add_argument("--rounds", type=int, default=5)
    ask.add_argument("--plans", nargs="*", default=PLANS)
    ask.add_argument("--json", help="where to write the results")
    asked = ask.parse_args()
    torch.set_num_threads(1)
    os.chdir(tempfile.mkdtemp())
    plain(8, asked.batch_size)
    ratios: dict[str, list[float]] = {plan: [] for plan in asked.plans}
    own: dict[str, list[float]] = {plan: [] for plan in asked.plans}
    for _ in range(asked.rounds):
        for plan in asked.plans:
            before = plain(asked.units, asked.batch_size)
            took, share = virtual(plan, asked.workers, asked.units, asked.batch_size)
            after = plain(asked.units, asked.batch_size)
            ratios[plan].append(2 * took / (before + after))
            own[plan].append(share)
    print(
        f"{asked.workers} virtual workers, ResNet-8, batches of {asked.batch_size}, {asked.units} units a "
        f"turn, {asked.rounds} rounds, torch {torch.__version__}, python {sys.version.split()[0]}, 1 thread"
    )
    print("time against the same gradients in a plain loop; share of it outside of the workers' turns")
    for plan, found in ratios.items():
        middle = statistics.median(found)
        spread = f"({min(found):.3f} to {max(found):.3f})"
        print(f"  {plan:12} {middle:.3f} {spread}  {100 * statistics.median(own[plan]):.1f} %")
    if asked.json:
        rows = {"settings": vars(asked), "ratios": ratios, "own": own}
        Path(asked.json).write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
