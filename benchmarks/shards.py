"""What asynchronous training over shards costs: pushes, stragglers, switches, starts.

    python benchmarks/shards.py pushes               shared memory, ZeroMQ, and the same optimizer alone
    python benchmarks/shards.py straggler            one of four workers four times slower
    python benchmarks/shards.py switch               BSP → ASP → BSP with four workers
    python benchmarks/shards.py start                start-up and switch at 2, 4 and 8 workers
    python benchmarks/shards.py wire --hosts-tool PATH/hosts.py
                                                     two emulated hosts at 1 Gbit, 9.9 M parameters
    python benchmarks/shards.py distance --hosts-tool PATH/hosts.py
                                                     a switch over 1 Gbit and 10 ms

Without a part: all that need no emulator. What is compared takes turns in the same run; printed are medians
and the spread (lowest to highest) over the rounds. Every push goes through a real torch.optim.SGD with
momentum, and memory that survives kill -9.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from emulated import tool

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]
SIZES = ("0.3M", "9.9M")
PARTS = ("pushes", "straggler", "switch", "start", "wire", "distance")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help=", ".join(PARTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a turn")
    parser.add_argument("--hosts-tool", help="the emulator's hosts.py", default=os.environ.get("HOSTS_TOOL"))
    parser.add_argument("--json", help="where to write the results")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--size", default="0.3M", help=argparse.SUPPRESS)
    parser.add_argument("--step", type=float, default=0.1, help="seconds of a step in `straggler`")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    return args


def model(size: str) -> Any:
    import models
    import torch
    from torch import nn

    torch.manual_seed(0)
    if size == "0.3M":
        return models.resnet8()
    widths = (3072, 2048, 1536, 256)
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


# Pushes


class Bench:
    """One process's memory, model and optimizer."""

    def __init__(self, path: str, size: str, shards: int, of: int, clients: int, client: int, first: bool):
        import torch

        from offbeat.cluster.memory import Memory
        from offbeat.cut import cut, way_of
        from offbeat.outline import Outline
        from offbeat.twin import Settings, slots

        torch.set_num_threads(1)
        self.model = model(size)
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.SGD(self.parameters, lr=1e-4, momentum=0.9)
        way = way_of([self.optimizer])
        kept = lru_cache(lambda o, g, dtype: slots(self.optimizer, g, (2,), dtype, way))
        pieces = cut(self.parameters, [self.optimizer], shards * of, way)[:shards]
        self.outlines = [Outline(one, lambda p: kept(*p.kind), way, 2, clients + 1) for one in pieces]
        self.settings = Settings([self.optimizer])
        self.memory = Memory(
            path, 0, self.outlines, [self.optimizer], self.settings, clients, client, 99, 0, first
        )
        if first:
            self.memory.begin(0, range(2), 0)
            for shard in range(shards):
                self.memory.load(shard, self.parameters, [self.optimizer])
        self.clock = 0

    def push(self, member: int) -> Any:
        from offbeat.shard import Push

        self.clock += 1
        return Push(member, self.clock, 0, settings=self.settings.read())


def serve(path: str, size: str, shards: int, places: Any, over: Any) -> None:
    """Serves the memory until it is over."""
    from offbeat.cluster.server import Server
    from offbeat.cluster.wire import Keys

    keys = Keys.make()
    bench = Bench(path, size, shards, 1, 2, 0, first=False)
    server = Server(bench.memory, keys, 1, range(2), "127.0.0.1")
    for _ in range(2):
        places.put((path, server.address, server.public, keys.to_text()))
    over.wait()
    server.close()


def pushing(
    kind: str, place: Any, size: str, shards: int, rank: int, seconds: float, gate: Any, out: Any
) -> None:
    """Pushes as often as it can; `alone` steps an optimizer of its own instead."""
    import torch

    from offbeat.cluster.client import Client, flush
    from offbeat.cluster.wire import Keys

    torch.set_num_threads(1)
    path, address, public, keys = place
    bench = Bench(path, size, shards, 1, 2, rank, first=False)
    memory, count = bench.memory, 0
    source = [[torch.randn_like(piece) for piece in memory.gradient(s).pieces] for s in range(shards)]
    if kind == "alone":
        for p in bench.parameters:
            p.grad = torch.randn_like(p)

        def step() -> None:
            bench.optimizer.step()

    elif kind == "memory":

        def step() -> None:
            for s in range(shards):
                torch._foreach_copy_(memory.gradient(s).pieces, source[s])
            memory.commit(bench.push(rank), [0] * shards)
            memory.finish()

    else:
        client = Client(address, public, Keys.from_text(keys), 1, rank)
        client.ready(lambda: None)
        data = [
            memoryview(torch.randn(o.gradient_size // 4).view(torch.uint8).numpy()) for o in bench.outlines
        ]

        def step() -> None:
            for s in range(shards):
                client.push(s, bench.push(rank), data[s])
            if count % 4 == 3:
                flush([client], lambda: None)

    step()
    gate.wait()
    begun = time.perf_counter()
    while time.perf_counter() - begun < seconds:
        step()
        count += 1
    if kind == "wire":
        flush([client], lambda: None)
    out.put(count / (time.perf_counter() - begun))


def pushes(args: argparse.Namespace) -> dict[str, Any]:
    from offbeat.cluster.memory import make_file

    context = multiprocessing.get_context("fork")
    found: dict[str, Any] = {}
    for size, shards in (("0.3M", 2), ("9.9M", 8)):
        path = make_file()
        bench = Bench(path, size, shards, 1, 2, 0, first=True)
        rates: dict[str, list[float]] = {"memory": [], "wire": [], "alone": []}
        for turn in range(args.rounds):
            for kind in sorted(rates, key=lambda k: (list(rates).index(k) + turn) % 3):
                ready, out = context.Event(), context.Queue()
                gate, places = context.Barrier(2), context.Queue()
                server = (
                    context.Process(target=serve, args=(path, size, shards, places, ready))
                    if kind == "wire"
                    else None
                )
                if server is not None:
                    server.start()
                    got = [places.get() for _ in range(2)]
                else:
                    got = [(path, "", "", "")] * 2
                workers = [
                    context.Process(
                        target=pushing, args=(kind, got[r], size, shards, r, args.seconds, gate, out)
                    )
                    for r in range(2)
                ]
                for worker in workers:
                    worker.start()
                rates[kind].append(sum(out.get() for _ in workers))
                for worker in workers:
                    worker.join()
                ready.set()
                if server is not None:
                    server.join()
        del bench
        print(f"pushes/s of two workers, {size} parameters, {shards} shards")
        for kind, name in (
            ("memory", "shared memory"),
            ("wire", "ZeroMQ, encrypted, the same memory behind it"),
            ("alone", "no sharing: two optimizers step alone"),
        ):
            print(f"  {name:46} {spread(rates[kind])}")
        against = [a / b for a, b in zip(rates["memory"], rates["wire"], strict=True)]
        alone = [a / b for a, b in zip(rates["memory"], rates["alone"], strict=True)]
        print(f"  shared memory against ZeroMQ {spread(against, 2)}, against no sharing {spread(alone, 2)}")
        found[size] = {**rates, "against_wire": against, "against_alone": alone}
    return found


def push_across(args: argparse.Namespace) -> None:
    """One of two hosts: serves its half of the parameters and pushes to the other half."""
    import torch
    from torch.distributed import TCPStore

    from offbeat.cluster.client import Client, flush
    from offbeat.cluster.memory import make_file
    from offbeat.cluster.server import Server
    from offbeat.cluster.wire import Keys, bind_address

    rank, shards = int(os.environ["RANK"]), 8
    where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(*where, 2, rank == 0)
    if rank == 0:
        store.set("keys", Keys.make().to_text())
    keys = Keys.from_text(store.get("keys").decode())
    bench = Bench(make_file(), "9.9M", shards, 2, 1, 0, first=True)
    server = Server(bench.memory, keys, 1, range(2), bind_address(where))
    store.set(f"server{rank}", f"{server.address} {server.public}")
    address, public = store.get(f"server{1 - rank}").decode().split()
    client = Client(address, public, keys, 1, rank)
    client.ready(lambda: None)
    # The other half is cut the same way.
    sizes = [client._shard(s)[0] for s in range(shards)]
    data = [memoryview(torch.zeros(size // 4).view(torch.uint8).numpy()) for size in sizes]
    store.add("ready", 1)
    while store.add("ready", 0) < 2:
        time.sleep(0.01)
    begun, count = time.perf_counter(), 0
    while time.perf_counter() - begun < args.seconds:
        for s in range(shards):
            client.push(s, bench.push(rank), data[s])
        count += 1
        if count % 3 == 0:
            flush([client], lambda: None)
    flush([client], lambda: None)
    seconds = time.perf_counter() - begun
    share = count * sum(sizes) / seconds / 125e6
    speed = f"{count / seconds:.2f} a second, {share:.3f} of the link"
    print(f"pushes only, both ways at once, 1 Gbit, 9.9 M: {speed}")
    store.set(f"over{rank}", "")
    store.wait([f"over{1 - rank}"])
    store.set(f"seen{rank}", "")
    if rank == 0:  # the store is here
        store.wait(["seen1"])
    client.close()
    server.close()


# Jobs


def job(args: argparse.Namespace) -> None:
    """What the workers run: a step of fixed duration (`--step` seconds, four times that on the last rank), or
    none."""
    import torch

    import offbeat

    offbeat.init()
    net = model(args.size)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.9)
    sync = offbeat.Synchronizer(net, optimizer, total=1)
    duration = args.step * (
        4 if args.job == "straggler" and offbeat.rank() == offbeat.world_size() - 1 else 1
    )
    weights = [torch.randn_like(p) for p in net.parameters()]
    with sync:
        while not sync.done:
            begun = time.perf_counter()
            sum((w * p).sum() for w, p in zip(weights, net.parameters(), strict=True)).backward()
            time.sleep(max(duration - (time.perf_counter() - begun), 0))
            sync.step()


def run(workers: int, total: int, plan: str, kind: str, size: str, step: float) -> list[Any]:
    """Journal of an `offbeat run` of `job`, with the seconds until its first step."""
    from offbeat.journal import read

    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "run"
        words = ["-m", "offbeat", "run", "-q", "-n", str(workers), "--total", str(total), "--plan", plan]
        words += ["--out", str(out), __file__, "--job", kind, "--size", size, "--step", str(step)]
        subprocess.run([sys.executable, *words], env=environment(), check=True, cwd=ROOT)
        return read(out)


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def straggler(args: argparse.Namespace) -> dict[str, Any]:
    """Units a second of phases that take turns in one job."""
    step, pairs = args.step, max(2, args.rounds // 2)
    own = 3 / step + 1 / (4 * step)
    # Some 14 s each: at the end of a phase all wait for the slow one's last step.
    bsp, asp = round(14 / (4 * step) * 4), round(14 * own)
    ends = list(itertools.accumulate([bsp, asp] * pairs))
    plan = " ".join(f"{word}:{end}u" for word, end in zip(["bsp", "asp"] * pairs, ends, strict=True))
    shares: dict[str, list[float]] = {"bsp": [], "asp": []}
    records = run(4, ends[-1], plan.rpartition(":")[0], "straggler", "0.3M", step)
    phases = [r for r in records if r["type"] in ("phase", "end")]
    for a, b in itertools.pairwise(phases):
        shares[a["protocol"]].append((b["units"] - a["units"]) / (b["t"] - a["t"]) / own)
    print(f"4 workers, one 4 times slower, steps of {step * 1e3:g} ms; share of the sum of their own speeds")
    for name, values in shares.items():
        print(f"  {name:10} {spread(values, 3)}")
    stale = [r["mean_staleness"] for r in records if r["type"] == "pushes"]
    print(f"  mean staleness under asp {spread(stale, 2)}")
    return {**shares, "staleness": stale}


def switches(records: Sequence[Any]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for r in records:
        if r["type"] == "switch":
            cost = r["drain_ms"] + r["settle_ms"] + r["transfer_ms"]
            found.setdefault(f"{r['from']} → {r['to']}", []).append(cost)
            found.setdefault("waiting for the slowest", []).append(r["meet_ms"])
    return found


def to_and_fro(pairs: int) -> str:
    words = ["bsp", "asp"] * pairs
    ends = [f":{100 * (k + 1) / len(words):g}%" for k in range(len(words) - 1)]
    return " ".join(w + end for w, end in zip(words, [*ends, ""], strict=True))


def switch(args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for size in SIZES:
        costs = switches(run(4, 40 * 2 * args.rounds, to_and_fro(args.rounds), "plain", size, 0.01))
        print(f"switch, 4 workers, loopback, {size} parameters with momentum, ms")
        for name, values in costs.items():
            print(f"  {name:26} {spread(values, 1)}")
        found[size] = costs
    return found


def start(args: argparse.Namespace) -> dict[str, Any]:
    """Beside Sync-Switch's Table III."""
    found: dict[str, Any] = {}
    print("start-up (first worker's spawn until all have met) and switch from BSP to ASP")
    print(
        "Sync-Switch: 16 workers start in 1.42X the time of 8; in parallel 2X as fast as one after the other"
    )
    rounds = max(2, args.rounds // 2)
    for workers in (2, 4, 8):
        first, sequential, costs = [], [], []
        for _ in range(rounds):
            records = run(workers, 60 * workers, to_and_fro(3), "plain", "0.3M", 0.01)
            first.append(next(r["t"] for r in records if r["type"] == "phase"))  # since rank 0 was spawned
            costs += switches(records)["bsp → asp"]
            sequential.append(one_after_the_other(workers))
        found[str(workers)] = {"start_s": first, "sequential_s": sequential, "switch_ms": costs}
        print(
            f"  {workers} workers: start {spread(first, 2)} s, one after the other {spread(sequential, 2)}, "
            f"switch {spread(costs, 1)} ms"
        )
    for name in ("start_s", "switch_ms"):
        medians = [statistics.median(found[str(w)][name]) for w in (2, 4, 8)]
        growth = ", ".join(f"{b / a:.2f}X" for a, b in itertools.pairwise(medians))
        print(f"  {name}: from 2 to 4 and from 4 to 8 workers {growth} (2X would be linear)")
    return found


def one_after_the_other(workers: int) -> float:
    """Seconds until the workers have started when each waits for the one before to be up."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    code = "import offbeat; offbeat.init(out=False); import offbeat.sync; print('up', flush=True); input()"
    begun, processes = time.perf_counter(), []
    for rank in range(workers):
        place = {"RANK": str(rank), "WORLD_SIZE": str(workers), "MASTER_PORT": str(port)}
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", code],
                env={**environment(), **place, "MASTER_ADDR": "127.0.0.1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        )
        assert processes[-1].stdout is not None
        processes[-1].stdout.readline()
    seconds = time.perf_counter() - begun
    for process in processes:
        process.communicate(b"\n")
    return seconds


# Emulated hosts


def wire(args: argparse.Namespace) -> dict[str, Any]:
    """Two hosts, a worker each, whose gradients and parameters cross the link."""
    rate, found = 125e6, {}
    with tool(args.hosts_tool).Hosts(2, name="shards", rate="1gbit") as lab:
        command = [sys.executable, __file__, "--job", "push", "--seconds", str(4 * args.seconds)]
        if any(lab.start(command, extra=environment()).wait(fail_fast=True).values()):
            raise SystemExit("a worker failed")
    half = sum(p.numel() for p in model("9.9M").parameters()) * 4 / 2
    for dtype in ("fp32", "bf16"):
        records = emulated(args, "asp", 160, "9.9M", rate="1gbit", wire=dtype)
        seconds = next(r["seconds"] for r in records if r["type"] == "end")
        units = next(r["units"] for r in records if r["type"] == "end")
        # In a step of both workers each link carries, one way, a gradient's half and the other's parameters.
        sent = half * (1 if dtype == "fp32" else 0.5) + half
        share = units / 2 * sent / seconds / rate
        print(
            f"asp, 2 hosts at 1 Gbit, 9.9 M, {dtype} gradients, no compute: {units / seconds:.2f} pushes and "
            f"pulls/s, {share:.3f} of what the link carries each way"
        )
        found[dtype] = {"pushes_per_s": units / seconds, "share": share}
    return found


def distance(args: argparse.Namespace) -> dict[str, Any]:
    found = {}
    for size in SIZES:
        records = emulated(args, to_and_fro(2), 32, size, rate="1gbit", delay="10ms", hosts=4)
        found[size] = switches(records)
        print(f"switch, 4 hosts, 1 Gbit, 10 ms one way, {size} parameters with momentum, ms")
        for name, values in found[size].items():
            print(f"  {name:26} {spread(values, 1)}")
    return found


def emulated(
    args: argparse.Namespace,
    plan: str,
    total: int,
    size: str,
    hosts: int = 2,
    wire: str = "fp32",
    **link: str,
) -> list[Any]:
    from offbeat.journal import read

    hosts_tool = tool(args.hosts_tool)
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "run"
        ours = {
            "OFFBEAT_PLAN": plan,
            "OFFBEAT_TOTAL": str(total),
            "OFFBEAT_OUT": str(out),
            "OFFBEAT_WIRE": wire,
        }
        ours |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": environment()["PYTHONPATH"]}
        command = [sys.executable, __file__, "--job", "plain", "--size", size, "--step", "0"]
        with hosts_tool.Hosts(hosts, name="shards", **link) as lab:
            codes = lab.start(command, extra=ours).wait(fail_fast=True)
        if any(codes.values()):
            raise SystemExit(f"a worker failed: {codes}")
        return read(out)


def spread(values: Sequence[float], digits: int = 0) -> str:
    low, high = min(values), max(values)
    return f"{statistics.median(values):,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"


def main() -> int:
    args = options()
    if args.job:
        (push_across if args.job == "push" else job)(args)
        return 0
    import torch

    settings = {
        "rounds": args.rounds,
        "seconds": args.seconds,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "threads": 1,
    }
    print(", ".join(f"{key} {value}" for key, value in settings.items()))
    parts: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
        "pushes": pushes,
        "straggler": straggler,
        "switch": switch,
        "start": start,
        "wire": wire,
        "distance": distance,
    }
    found = {name: parts[name](args) for name in args.parts or PARTS[:4]}
    if args.json:
        Path(args.json).write_text(json.dumps({"settings": settings, **found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
