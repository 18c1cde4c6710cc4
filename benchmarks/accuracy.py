"""Time to accuracy on real CIFAR-10: four emulated hosts, one of them half as fast.

    python benchmarks accuracy --hosts-tool PATH/hosts.py --data DIR

A small job, so that it ends: ResNet-8 with 8 channels (0.02 M parameters), 4,096 training images, 2,000
test images. Workers share two cores, so a step sleeps until its time is over, 80 ms, and 160 ms on the last
host; gradients are real. Links have 10 Mbit/s, which is to such a network what 150 Mbit/s are to
ResNet-8 with 32 channels. All methods train for the same number of mini-batches, one after the other in the
same processes. The first worker keeps copies of its model on the way, which are evaluated when the clock has
stopped.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import emulated
from peers.environment import environment
from record import ROOT, Record, Row, Setup

TITLE = "Time to accuracy on CIFAR-10, with a straggler"
MINUTES = 7.0
HOSTS, RATE, STEP, SLOWER = 4, "10mbit", 0.08, 2.0
SETTINGS = {
    "hosts": HOSTS,
    "rate": RATE,
    "a step, s": STEP,
    "the straggler's": STEP * SLOWER,
    "model": "ResNet-8, 8 channels",
    "train": 4096,
    "test": 2000,
    "batch": 16,
    "lr": 0.05,
    "momentum": 0.9,
    "seed": 0,
}
UNITS = 720
PLANS = (
    "bsp",
    "local(4)",
    "dasgd(4,2)",
    "dasgd(auto)",
    "bsp:25% dasgd(4,2)",
    "bsp:25% asp",
    "bsp:25% ssp(3)",
)
PEERS = (
    "DDP",
    "DDP + PostLocalSGD(4)",
    "accelerate LocalSGD(4)",
    "torchft LocalSGD(4)",
    "torchft delayed(4,2)",
)
SHARE = 0.95
"""Of the accuracy that DDP ends with: the target."""
ROLE = "OFFBEAT_BENCHMARK_ACCURACY"


# A worker


class Course:
    """One method's training, as the first worker sees it."""

    def __init__(self, model: Any, rank: int, slow: float):
        self._model, self._rank, self._seconds = model, rank, STEP * (slow if rank == HOSTS - 1 else 1.0)
        self._begun = self._step = time.perf_counter()
        self._every, self._taken = 0, 0
        self.kept: list[tuple[float, list[Any]]] = []

    def begin(self, every: int) -> None:
        self._every, self._begun = every, time.perf_counter()
        self._step = self._begun

    def computed(self) -> None:
        """Sleeps until the step's time is over."""
        time.sleep(max(self._step + self._seconds - time.perf_counter(), 0))

    def stepped(self) -> None:
        self._taken += 1
        if self._rank == 0 and self._taken % self._every == 0:
            self.keep()
        self._step = time.perf_counter()

    def keep(self) -> None:
        state = self._model.state_dict()
        self.kept.append((time.perf_counter() - self._begun, [t.detach().clone() for t in state.values()]))


def work(data: str, units: int, methods: list[str], answer: str) -> None:
    warnings.filterwarnings("ignore")
    import torch
    import torch.nn.functional as F
    from peers import local
    from torch import distributed as dist

    import offbeat

    sys.path.insert(0, str(ROOT / "examples"))
    from cifar_data import augment, load, normalize
    from methods import METHODS
    from models import resnet8

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    offbeat.init(seed=0, out=False)
    rank = dist.get_rank()
    images, labels = (t[: SETTINGS["train"]].clone() for t in load(data, "train"))  # type: ignore[misc]
    tests = tuple(t[: SETTINGS["test"]].clone() for t in load(data, "test"))  # type: ignore[misc]
    found: dict[str, list[tuple[float, float]]] = {}
    every = max(units // HOSTS // 12 // 4 * 4, 4)
    for name in methods:
        torch.manual_seed(0)
        model = resnet8(width=8)
        optimizer = torch.optim.SGD(model.parameters(), lr=SETTINGS["lr"], momentum=SETTINGS["momentum"])  # type: ignore[arg-type]
        course = Course(model, rank, SLOWER)

        def loss_of(forward: Callable[[Any], Any], x: Any, y: Any) -> Any:
            return F.cross_entropy(forward(normalize(augment(x))), y)

        if name in PEERS:
            made: local.Trained = METHODS[name](model, optimizer)
            dist.barrier()
            course.begin(every)
            for step in range(units // HOSTS):
                x, y = batch_of(images, labels, rank, step)
                loss = loss_of(made.forward, x, y)
                course.computed()
                made.backward(loss)
                made.step()
                course.stepped()
            course.keep()
        else:
            sync = offbeat.Synchronizer(model, optimizer, plan=name, total=units)
            dist.barrier()
            course.begin(every)
            for x, y in sync.batches((images, labels), batch_size=SETTINGS["batch"]):  # type: ignore[arg-type]
                loss = loss_of(model, x, y)
                course.computed()
                loss.backward()
                sync.step()
                course.stepped()
            sync.close()
            course.keep()
        if rank == 0:
            found[name] = [
                (at, accuracy(resnet8(width=8), state, tests, normalize)) for at, state in course.kept
            ]
        dist.barrier()
    if rank == 0:
        Path(answer).write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)


def batch_of(images: Any, labels: Any, rank: int, step: int) -> tuple[Any, Any]:
    """As DistributedSampler deals: every epoch another permutation, of which each rank gets its share."""
    import torch

    size = int(SETTINGS["batch"])  # type: ignore[call-overload]
    each = len(images) // HOSTS // size
    epoch, place = divmod(step, each)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
    chosen = order[rank::HOSTS][place * size : (place + 1) * size]
    return images[chosen], labels[chosen]


def accuracy(model: Any, state: list[Any], tests: Any, normalize: Any) -> float:
    import torch

    for kept, own in zip(state, model.state_dict().values(), strict=True):
        own.copy_(kept)
    model.eval()
    with torch.no_grad():
        outputs = [model(normalize(x)).argmax(1) for x in tests[0].split(500)]
    return round(float((torch.cat(outputs) == tests[1]).float().mean()), 4)


# The one who starts them


def measure(setup: Setup) -> Iterator[Row]:
    if setup.hosts_tool is None:
        return
    data = setup.data or str(ROOT / "data" / "cifar10")
    if not Path(data).is_dir():
        print(f"  no CIFAR-10 in {data}: give --data or CIFAR10_DIR")
        return
    methods = ["DDP", "bsp:25% asp"] if setup.quick else [*PEERS, *PLANS]
    units = 32 if setup.quick else UNITS
    python = environment(setup.cache, "accelerate", "torchft")
    with TemporaryDirectory(prefix="offbeat-accuracy-") as folder:
        answer = Path(folder) / "answer"
        asked = {"data": data, "units": units, "methods": methods, "answer": str(answer)}
        extra = {ROLE: json.dumps(asked), "RUST_LOG": "error", "OMP_NUM_THREADS": "1"}
        extra["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        emulator = emulated.tool(setup.hosts_tool)
        with emulator.Hosts(HOSTS, rate=RATE, name=f"accuracy{os.getpid()}") as hosts:
            codes = hosts.start([str(python), __file__], extra=extra).wait(fail_fast=True)
        if any(codes.values()):
            raise SystemExit(f"a worker failed: {codes}")
        found = json.loads(answer.read_text())
    target = round(SHARE * found["DDP"][-1][1], 4)
    times = {name: next((at for at, one in curve if one >= target), None) for name, curve in found.items()}
    for name, curve in found.items():
        own, first = times[name], times["DDP"]
        values = {"seconds to the target": own and round(own, 1), "target": target}
        values |= {"seconds": round(curve[-1][0], 1), "accuracy": curve[-1][1]}
        values |= {"curve": [[round(at, 1), one] for at, one in curve]}
        yield Row(name, {"units": units}, values, own and first and round(first / own, 3), "DDP")


def page(record: Record) -> list[str]:
    from page import paragraph, table

    rows = []
    for row in record.rows:
        value = row.values
        reached = value["seconds to the target"]
        rows.append(
            [
                row.name,
                f"{value['seconds']:.0f}",
                f"{100 * value['accuracy']:.1f} %",
                f"{reached:.0f}" if reached else "not reached",
                f"{row.ratio:.2f}×" if row.ratio else None,
            ]
        )
    first = record.rows[0]
    text = paragraph(
        f"""Four hosts on links of 10 Mbit/s, the last one half as fast, {first.settings["units"]}
        mini-batches of 16 in all; a small network and a part of the images, so that it ends
        (`benchmarks/accuracy.py` says which). One seed: accuracies within some two points of each other are
        alike. The target is {100 * first.values["target"]:.1f} %, {SHARE} of what DDP ends with."""
    )
    head = ["method", "seconds in all", "accuracy at the end", "seconds to the target", "DDP's over it"]
    return [text, *table(head, rows)]


if __name__ == "__main__":
    work(**json.loads(os.environ[ROLE]))
