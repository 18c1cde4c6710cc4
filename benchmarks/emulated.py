"""What benchmarks on emulated hosts have in common. The emulator of several hosts on one machine is no part
of this repository."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]
BACKWARD = 2 / 3
"""Backward's share of a unit of fixed duration."""


def tool(path: str | None) -> Any:
    """The module at PATH/hosts.py. Ends the program where there is none."""
    if not path or not Path(path).is_file():
        raise SystemExit("emulated hosts need the network emulator: give --hosts-tool PATH/hosts.py")
    spec = importlib.util.spec_from_file_location("hosts", path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def parser(about: str | None, hosts: Sequence[int], rates: Sequence[str]) -> argparse.ArgumentParser:
    """With the options of benchmarks over networks of several sizes and rates."""
    found = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--hosts", type=int, nargs="+", default=list(hosts))
    found.add_argument("--rates", nargs="+", default=list(rates))
    found.add_argument("--hosts-tool", help="the emulator's hosts.py", default=os.environ.get("HOSTS_TOOL"))
    found.add_argument("--json", help="where to write the results")
    return found


def environment() -> dict[str, str]:
    """Of a worker's process."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def settings(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """These of the options, and the machine. Prints them."""
    import torch

    found = {
        **{name: getattr(args, name) for name in names},
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
    }
    print(", ".join(f"{key} {value}" for key, value in found.items()), flush=True)
    return found


def keep(path: str | None, settings: dict[str, Any], cases: list[dict[str, Any]]) -> None:
    if path:
        Path(path).write_text(json.dumps({"settings": settings, "cases": cases}, indent=1) + "\n")


def sleeping(net: Any, step: float, jitter: float, forwards: list[float] | None = None) -> Callable[[], None]:
    """Computes a unit's gradient in a duration of its own (lognormal, mean `step`): many workers share few
    cores here, so it sleeps between the parts of a short real backward, a third of the unit before it and
    then equally long before each parameter's gradient. forwards: gets the seconds of each forward."""
    import torch

    parameters = list(net.parameters())
    weights = [torch.randn_like(p) for p in parameters]
    draw = torch.Generator().manual_seed(int(os.environ.get("RANK", "0")))
    begun = duration = 0.0

    def till(share: float) -> None:
        time.sleep(max(begun + share * duration - time.perf_counter(), 0))

    for index, p in enumerate(parameters):
        share = 1 - BACKWARD * index / len(parameters)
        p.register_hook(lambda gradient, share=share: till(share))

    def unit() -> None:
        nonlocal begun, duration
        begun = time.perf_counter()
        duration = step * math.exp(jitter * float(torch.randn((), generator=draw)) - jitter**2 / 2)
        loss = sum((w * p).sum() for w, p in zip(weights, parameters, strict=True))
        till(1 - BACKWARD)
        if forwards is not None:
            forwards.append(time.perf_counter() - begun)
        loss.backward()

    return unit


def slope(rows: Iterable[tuple[int, float, float]], period: int) -> float:
    """Units per second, from each step's clock, seconds and units done so far: over the steps at the same
    place of the plan's period of which there are longest."""
    import numpy

    groups: dict[int, list[tuple[float, float]]] = {}
    for clock, at, done in rows:
        groups.setdefault(clock % period, []).append((at, done))
    longest = max(groups.values(), key=lambda group: group[-1][0] - group[0][0])
    return float(numpy.polyfit(*zip(*longest, strict=True), 1)[0])
