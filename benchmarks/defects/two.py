"""Runs the same thing by a peer and by Offbeat, on two workers each, and says what each did.

A script of this folder calls `contest` with its sides. A side is a function that the workers run; what it
tells last is that worker's answer. A side that makes no progress for `SILENT` seconds hangs, and is ended.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from peers.environment import environment  # noqa: E402

SIDE, FOLDER = "OFFBEAT_BENCHMARK_SIDE", "OFFBEAT_BENCHMARK_FOLDER"
SILENT = 12.0
STARTING = 120.0
"""Seconds until the first sign of life: workers import much."""

Judge = Callable[[list[dict[str, Any]]], tuple[str, bool]]
"""From the answers of workers that have ended: what to say of them, and whether that is right."""


@dataclass(frozen=True)
class Side:
    name: str
    run: Callable[[], None]
    peer: str | None = None
    """Whose environment it needs."""


def tell(**facts: Any) -> None:
    """A worker's answer so far, which is a sign of life too."""
    path = Path(os.environ[FOLDER]) / os.environ["RANK"]
    path.with_suffix(".new").write_text(json.dumps(facts))
    path.with_suffix(".new").rename(path)


def begin() -> int:
    """Joins the workers to a process group of torch's. Returns the rank."""
    import warnings

    import torch
    from torch import distributed as dist

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    return dist.get_rank()


def apart(tensors: Any) -> float:
    """The largest difference between the workers' tensors."""
    import torch
    from torch import distributed as dist

    flat = torch.cat([t.detach().reshape(-1).float() for t in tensors])
    all_of_them = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(all_of_them, flat)
    return float((all_of_them[0] - all_of_them[-1]).abs().max())


def statistics(model: Any) -> list[Any]:
    """The floating-point buffers: BatchNorm's running means and variances."""
    return [buffer for buffer in model.buffers() if buffer.is_floating_point()]


def played(side: Side, script: Path, cache: Path, judge: Judge) -> dict[str, Any]:
    python = str(environment(cache, side.peer)) if side.peer else sys.executable
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with TemporaryDirectory() as folder:
        path = os.pathsep.join([str(HERE.parent.parent), str(HERE), os.environ.get("PYTHONPATH", "")])
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "RUST_LOG": "error"}
        place |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, SIDE: side.name, FOLDER: folder}
        log = Path(folder) / "log"
        with log.open("wb") as out:
            workers = [
                subprocess.Popen(
                    [python, str(script)],
                    env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    start_new_session=True,
                )
                for rank in range(2)
            ]
        hung = watched(workers, Path(folder))
        failed = any(worker.wait() for worker in workers)
        answers = [Path(folder) / str(rank) for rank in range(2)]
        facts = [json.loads(path.read_text()) if path.exists() else {} for path in answers]
        words = log.read_text(errors="replace").strip().splitlines() or [""]
    if hung or failed:
        steps = [one["step"] for one in facts if "step" in one]
        said = f" after {' and '.join(map(str, steps))} steps" if steps else ""
        last = next((line for line in reversed(words) if "Error" in line), words[-1])
        said = f"hangs{said}" if hung else f"fails{said}: {plain(last)}"
        right = False
    else:
        said, right = judge(facts)
    return {"side": side.name, "did": said, "right": right, "facts": facts}


def plain(error: str) -> str:
    """Its first sentence, without the place in PyTorch's sources and the port, which change."""
    text = re.sub(r"\[/[^]]*\] |\[[\d.]+\]:\d+", "", error.partition("Error: ")[2])
    return text.partition(". ")[0].strip(" :")


def watched(workers: list[subprocess.Popen[bytes]], folder: Path) -> bool:
    """Waits for the workers' end. Whether they hung; what is left when one has failed, or of those that
    hang, is killed."""
    begun = time.time()
    while any(worker.poll() is None for worker in workers):
        failed = any(worker.poll() for worker in workers)
        signs = [path.stat().st_mtime for path in folder.glob("[0-9]")]
        hung = time.time() - max(signs, default=begun) > (SILENT if signs else STARTING)
        if failed or hung:
            for worker in workers:
                if worker.poll() is None:
                    os.killpg(worker.pid, signal.SIGKILL)
            return not failed
        time.sleep(0.1)
    return False


def contest(script: str, question: str, sides: list[Side], judge: Judge) -> None:
    """Runs what the environment asks a worker for; or, without that, every side, and prints what each did."""
    asked = os.environ.get(SIDE)
    if asked:
        next(side for side in sides if side.name == asked).run()
        sys.stdout.flush()
        os._exit(0)
    cache = Path(os.environ.get("OFFBEAT_PEERS", HERE.parent.parent / "build" / "peers"))
    found = [played(side, Path(script).resolve(), cache, judge) for side in sides]
    if "--json" in sys.argv:
        print(json.dumps({"question": question, "sides": found}))
        return
    print(question)
    for one in found:
        print(f"  {one['side']:24} {'as asked' if one['right'] else 'WRONG   '}  {one['did']}")
