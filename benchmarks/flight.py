"""All-reduces that are under way at the same time: how long k of them take in one gloo group, by its threads.

    python benchmarks/flight.py --hosts-tool PATH/hosts.py

A process on each emulated host. In each round all meet, start k all-reduces of `--size` bytes at once in a
group with so many threads, and wait for them; rounds of all settings take turns. Printed are medians of the
slowest host in milliseconds, and what the cost model makes of them (`offbeat.virtual.flight`), which knows
what one alone takes: with the delay, and without it. `--apart` starts each so many seconds after the one
before.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from emulated import tool

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rates", nargs="+", default=["50mbit", "200mbit", "1gbit"])
    parser.add_argument("--delays", nargs="+", default=["10ms"], help="of each host's link; 0 comes first")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--numbers", type=int, nargs="+", default=[1, 2, 4], help="of all-reduces at once")
    parser.add_argument("--size", type=int, default=616_532, help="bytes of each: half of ResNet-8")
    parser.add_argument("--apart", type=float, default=0.0, help="seconds from one's start to the next")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--hosts-tool", help="the emulator's hosts.py", default=os.environ.get("HOSTS_TOOL"))
    parser.add_argument("--json", help="where to write the results")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def work(args: argparse.Namespace) -> None:
    """One host's part: seconds by threads and number."""
    import torch
    from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world, rank == 0)

    def group(name: str, threads: int) -> Any:
        chosen = ProcessGroupGloo._Options()
        chosen._devices = [ProcessGroupGloo.create_default_device()]
        chosen._threads, chosen._timeout = threads, timedelta(minutes=5)
        return ProcessGroupGloo(PrefixStore(name, store), rank, world, chosen)

    control = group("control", 2)
    groups = {threads: group(f"threads{threads}", threads) for threads in args.threads}

    def slowest(value: float) -> float:
        told = torch.tensor([value], dtype=torch.float64)
        most = torch.distributed.AllreduceOptions()
        most.reduceOp = torch.distributed.ReduceOp.MAX
        control.allreduce([told], most).wait()
        return float(told)

    tensors = [torch.zeros(args.size // 4) for _ in range(max(args.numbers))]
    found: dict[str, list[float]] = {}
    for turn in range(args.rounds + 1):
        for threads, members in groups.items():
            for number in args.numbers:
                slowest(0.0)
                time.sleep(0.05)
                slowest(0.0)
                begun = time.perf_counter()
                works = []
                for tensor in tensors[:number]:
                    time.sleep(max(begun + len(works) * args.apart - time.perf_counter(), 0))
                    works.append(members.allreduce([tensor]))
                for one in works:
                    one.wait()
                seconds = slowest(time.perf_counter() - begun)
                if turn:  # the first one connects
                    found.setdefault(f"{threads} {number}", []).append(seconds)
    if rank == 0:
        Path(args.worker).write_text(json.dumps(found))


def measured(args: argparse.Namespace, lab: Any, out: Path) -> dict[str, list[float]]:
    command = [sys.executable, __file__, "--worker", str(out)]
    for name in ("size", "apart", "rounds"):
        command += [f"--{name}", str(getattr(args, name))]
    for name in ("threads", "numbers"):
        command += [f"--{name}", *map(str, getattr(args, name))]
    said = io.StringIO()
    codes = lab.start(command, extra={"OMP_NUM_THREADS": "1"}, out=said).wait(fail_fast=True)
    if any(codes.values()):
        raise SystemExit(f"{said.getvalue()}a worker failed: {codes}")
    return dict(json.loads(out.read_text()))


def alone(found: dict[str, float], args: argparse.Namespace) -> float:
    """Seconds of one by itself, which the threads don't change."""
    return statistics.median(found[f"{threads} {min(args.numbers)}"] for threads in args.threads)


def tell(row: dict[str, Any], args: argparse.Namespace, busy: float) -> None:
    """busy: seconds of one alone without the delay."""
    from offbeat.virtual.flight import Flight

    seconds = alone(row["seconds"], args)
    for threads in args.threads:
        texts = []
        for number in args.numbers:
            flight, its = Flight(threads, 1 / (row["hosts"] - 1)), row["seconds"][f"{threads} {number}"]
            for index in range(number):
                flight.add(index * args.apart, lambda at: (seconds, min(busy, seconds)))
            model = flight.over()
            texts.append(
                f"{number}: {1e3 * its:6.1f} ms, model {1e3 * model:6.1f} ({100 * (its / model - 1):+5.1f}%)"
            )
        where = f"{row['hosts']} hosts {row['rate']:8} {row['delay']:5} {threads} threads"
        print(where, "  ".join(texts), flush=True)


def main() -> int:
    args = options()
    out = Path(args.worker or f"/tmp/flight-{os.getpid()}.json")
    if args.worker:
        work(args)
        return 0
    names = ("size", "apart", "rounds")
    print(*(f"{name} {getattr(args, name)}" for name in names), f"load {os.getloadavg()[0]:.1f}", sep=", ")
    rows: list[dict[str, Any]] = []
    for hosts in args.hosts:
        busy: dict[str, float] = {}
        for delay in ["0", *(one for one in args.delays if one != "0")]:
            with tool(args.hosts_tool).Hosts(hosts, delay=delay, name="flight") as lab:
                for rate in args.rates:
                    for host in range(hosts):
                        lab.set(host, rate=rate)
                    found = {key: statistics.median(row) for key, row in measured(args, lab, out).items()}
                    rows.append({"hosts": hosts, "rate": rate, "delay": delay, "seconds": found})
                    tell(rows[-1], args, busy.setdefault(rate, alone(found, args)))
    out.unlink(missing_ok=True)
    if args.json:
        Path(args.json).write_text(json.dumps({"settings": vars(args), "cases": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
