"""How cost grows: with workers (real and virtual), with parameters, and with the journal's length.

python benchmarks growth
"""

from __future__ import annotations

import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from record import ROOT, Record, Row, Setup

TITLE = "How cost grows"
MINUTES = 3.0
SETTINGS = {"threads": 1, "network": "loopback", "optimizer": "SGD with momentum"}
PLANS = ("bsp", "local(4)", "dasgd(4,2)", "asp")
ROLE = "OFFBEAT_BENCHMARK_GROWTH"


def place() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


# Workers, and parameters: seconds of a step


def team(workers: int, **asked: Any) -> dict[str, list[float]]:
    """Seconds of a step, by method, from workers on this host that take turns in all methods."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with TemporaryDirectory(prefix="offbeat-growth-") as folder:
        answer = Path(folder) / "answer"
        own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(workers)}
        own[ROLE] = json.dumps({**asked, "answer": str(answer)})
        processes = [
            subprocess.Popen(
                [sys.executable, __file__], env={**place(), **own, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            )
            for rank in range(workers)
        ]
        codes = [process.wait() for process in processes]
        if any(codes):
            raise SystemExit(f"a worker failed: {codes}")
        return dict(json.loads(answer.read_text()))


def work(parameters: int, sleep: float, rounds: int, steps: int, answer: str) -> None:
    """A worker. A step computes next to nothing, and sleeps."""
    import warnings

    import torch
    from torch import distributed as dist
    from torch import nn

    import offbeat

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    offbeat.init(seed=0, out=False)
    found: dict[str, list[float]] = {}
    for plan in ("none", "DDP", *PLANS):
        side = max(round((parameters / 8) ** 0.5), 1)
        model: Any = nn.ParameterList([nn.Parameter(torch.zeros(side, side)) for _ in range(8)])
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        held = summed(model)
        step, end = stepper(plan, held, optimizer)
        for number in range(rounds + 1):
            dist.barrier()
            begun = time.perf_counter()
            for _ in range(steps):
                step(sleep)
            dist.barrier()
            if number:
                found.setdefault(plan, []).append((time.perf_counter() - begun) / steps)
        end()
        del model, optimizer, held, step, end
    if dist.get_rank() == 0:
        Path(answer).write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)


def summed(parameters: Any) -> Any:
    """A module whose output is the sum of its parameters."""
    from torch import nn

    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = parameters

        def forward(self, x: Any) -> Any:
            return x * sum(p.sum() for p in self.parts)

    return Summed()


def stepper(plan: str, model: Any, optimizer: Any) -> tuple[Any, Any]:
    """What does a step, and what ends."""
    import torch
    from torch import nn

    import offbeat

    x = torch.ones(())
    if plan in ("none", "DDP"):
        held = nn.parallel.DistributedDataParallel(model) if plan == "DDP" else model

        def step(sleep: float) -> None:
            loss = held(x)
            time.sleep(sleep)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step, lambda: None
    sync = offbeat.Synchronizer(model, optimizer, plan=plan, total=10**9)

    def ours(sleep: float) -> None:
        loss = model(x)
        time.sleep(sleep)
        loss.backward()
        sync.step()

    return ours, sync.close


def of_team(kind: str, size: int, found: dict[str, list[float]]) -> Iterator[Row]:
    alone = statistics.median(found["none"])
    for plan, seconds in found.items():
        values = {
            "ms": [round(1e3 * one, 2) for one in (statistics.median(seconds), min(seconds), max(seconds))]
        }
        values |= {"over none, ms": round(1e3 * (statistics.median(seconds) - alone), 2)}
        ratio = round(alone / statistics.median(seconds), 3)
        yield Row(plan, {"kind": kind, "size": size}, values, ratio, "none")


# Virtual workers


def virtual(workers: int, plan: str, units: int) -> dict[str, float]:
    """Milliseconds of a unit over the same gradients in a plain loop, and the memory of a worker."""
    words = [sys.executable, __file__, "virtual", str(workers), plan, str(units)]
    done = subprocess.run(words, env=place(), check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def virtual_team(workers: int, plan: str, units: int) -> None:
    import torch
    import torch.nn.functional as F
    from torch import nn

    import offbeat
    from offbeat.plan import parse
    from offbeat.virtual.ambient import Ambient
    from offbeat.virtual.cost import Costs
    from offbeat.virtual.description import preset
    from offbeat.virtual.engine import Engine

    torch.set_num_threads(1)
    x, y = torch.randn(32, 64), torch.randint(0, 10, (32,))
    begun: list[float] = []

    def net() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def memory() -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    def plain() -> float:
        model, optimizer = net()
        started = time.process_time()
        for _ in range(units):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        return time.process_time() - started

    def script(rank: int) -> None:
        offbeat.init(out=False)
        model, optimizer = net()
        with offbeat.Synchronizer(model, optimizer, parse(plan), total=units) as sync:
            if not begun:
                begun.append(time.process_time())
            while not sync.done:
                F.cross_entropy(model(x), y).backward()
                sync.step()

    before, least = plain(), memory()
    ambients = [Ambient(None, sys.argv, {}, sys.stdout, sys.stderr) for _ in range(workers)].__getitem__
    for ending in Engine(Costs(preset("here").sized(workers), 0), script, ambients).run():
        if ending.error is not None:
            raise ending.error
    took, loop = time.process_time() - begun[0], min(before, plain())
    print(
        json.dumps(
            {
                "ms": round(took / units * 1e3, 3),
                "plain_ms": round(loop / units * 1e3, 3),
                "MB a worker": round((memory() - least) / workers, 2),
            }
        )
    )


# The journal


def journals(lengths: tuple[int, ...]) -> Iterator[Row]:
    """Seconds to make a report of a run's journal, and its bytes, against the number of steps in it."""
    sys.path.insert(0, str(ROOT / "tests"))
    from journals import steps

    with TemporaryDirectory(prefix="offbeat-growth-") as folder:
        for length in lengths:
            run = Path(folder) / str(length)
            run.mkdir()
            with (run / "journal.jsonl").open("w") as file:
                file.writelines(steps(length))
            begun = time.perf_counter()
            words = [sys.executable, "-m", "offbeat", "report", str(run)]
            subprocess.run(words, check=True, capture_output=True, env=place())
            seconds = time.perf_counter() - begun
            values = {"journal, MB": round((run / "journal.jsonl").stat().st_size / 1e6, 2)}
            values |= {"report, s": round(seconds, 2)}
            values |= {"page, MB": round((run / "report.html").stat().st_size / 1e6, 2)}
            yield Row("report", {"kind": "steps in the journal", "size": length}, values)


def measure(setup: Setup) -> Iterator[Row]:
    quick = setup.quick
    for workers in (2,) if quick else (2, 4, 8):
        found = team(
            workers, parameters=100_000, sleep=0.1, rounds=1 if quick else 3, steps=4 if quick else 12
        )
        yield from of_team("workers", workers, found)
    for parameters in (100_000,) if quick else (100_000, 1_000_000, 10_000_000, 100_000_000):
        steps = 4 if quick or parameters == 100_000_000 else 12
        found = team(2, parameters=parameters, sleep=0.0, rounds=1 if quick else 3, steps=steps)
        yield from of_team("parameters", parameters, found)
    for workers in (2,) if quick else (8, 64, 256, 1000):
        for plan in ("bsp", "asp"):
            values = virtual(workers, plan, max(4 * workers, 20 if quick else 400))
            ratio = round(values["ms"] / values["plain_ms"], 2)
            yield Row(plan, {"kind": "virtual workers", "size": workers}, values, ratio, "a plain loop")
    yield from journals((100,) if quick else (1_000, 10_000, 100_000))


def page(record: Record) -> list[str]:
    from page import paragraph, table

    kinds: dict[str, dict[int, dict[str, Row]]] = {}
    for row in record.rows:
        kinds.setdefault(row.settings["kind"], {}).setdefault(row.settings["size"], {})[row.name] = row
    said = {
        "workers": """**Real workers** on this host's cores, 0.1 M parameters, steps that sleep for 100 ms:
        milliseconds of a step.""",
        "parameters": """**Parameters**, two workers, loopback, next to no computing: milliseconds of a
        step.""",
        "virtual workers": """**Virtual workers** with real gradients of a small network: CPU milliseconds
        of a unit, how many times a plain loop's, and the memory that a worker adds.""",
        "steps in the journal": "**The journal's length**: a report of it.",
    }
    lines = []
    for kind, sizes in kinds.items():
        names = list(next(iter(sizes.values())))
        rows: list[list[Any]] = []
        for size, its in sizes.items():
            if kind == "virtual workers":
                cells = [
                    f"{r.values['ms']:.2f} ({r.ratio:.1f}×), {r.values['MB a worker']:.1f} MB"
                    for r in its.values()
                ]
            elif kind == "steps in the journal":
                cells = list(its["report"].values.values())
            else:
                cells = [f"{its[name].values['ms'][0]:.1f}" for name in names]
            rows.append([f"{size:,}", *cells])
        if kind == "steps in the journal":
            names = list(next(iter(sizes.values()))["report"].values)
        lines += [paragraph(said[kind]), *table([kind, *names], rows), ""]
    return lines


if __name__ == "__main__":
    if sys.argv[1:2] == ["virtual"]:
        virtual_team(int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
    else:
        work(**json.loads(os.environ[ROLE]))
