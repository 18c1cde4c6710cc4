"""`python -m offbeat.virtual SCRIPT [ARGS]`: what `offbeat run --virtual` starts. Its settings come in the
environment, as a worker's do: OFFBEAT_VIRTUAL (how many workers), OFFBEAT_CLUSTER (a file or a preset),
OFFBEAT_TIMING_ONLY, OFFBEAT_SHOW_ALL, and those of every worker."""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
import traceback
from pathlib import Path

import torch

from offbeat import job
from offbeat.checks import stragglers_of
from offbeat.cluster.epoch import PeerLost
from offbeat.cluster.state import State
from offbeat.journal import Journal
from offbeat.plan import PlanError, parse
from offbeat.policies.switches import Stragglers
from offbeat.protocols import Protocol
from offbeat.site import move_to
from offbeat.virtual.clock import Clock, ClockSite
from offbeat.virtual.cost import Costs
from offbeat.virtual.description import ClusterError, find
from offbeat.virtual.engine import Ending, Engine
from offbeat.virtual.footprint import Footprint, TooLarge
from offbeat.virtual.model import model_of
from offbeat.virtual.probe import ProbeSite
from offbeat.virtual.script import Script
from offbeat.virtual.timing import Model, simulate


def main(path: str, args: list[str]) -> int:
    """The exit code."""
    if launcher := os.environ.get("OFFBEAT_LAUNCHER"):
        job.die_with(int(launcher))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    workers, out = int(os.environ["OFFBEAT_VIRTUAL"]), Path(os.environ["OFFBEAT_OUT"])
    try:
        cluster = find(os.environ.get("OFFBEAT_CLUSTER", "here"))
        costs = Costs(cluster.sized(workers), job.seed_of(None))
    except ClusterError as error:
        return _say(str(error))
    try:
        script = Script(path, args, workers, out / "logs", "OFFBEAT_SHOW_ALL" in os.environ)
    except SyntaxError:
        traceback.print_exc(limit=0)
        return 1
    if "OFFBEAT_TIMING_ONLY" in os.environ:
        return _time(script, costs, out)
    torch.optim.SGD([torch.zeros(1)], lr=0.1)  # imports much, which is no worker's own
    footprint = Footprint(costs.room)
    minimum = os.environ.get("OFFBEAT_MIN")
    with script:
        least = None if minimum is None else int(minimum)
        engine = Engine(costs, script, script.ambient, stops=True, minimum=least)

        def admit(state: State) -> None:
            if need := footprint.check(state):
                _say(need)

        engine.admit = admit
        endings = engine.run()
    spent = engine.overhead
    _keep(out, costs, max(one.at for one in endings), spent.seconds, spent.own)
    ended = any(one.error is None and not one.died for one in endings)
    failed = [one for one in endings if one.error is not None or (one.died and not (minimum and ended))]
    if not failed:
        return 0
    first = min(failed, key=lambda one: (isinstance(one.error, PeerLost), one.at, one.rank))
    return _report(first, script)


def _time(script: Script, costs: Costs, out: Path) -> int:
    """The run without gradients: the script runs up to its first one, unless all is known without it."""
    shape, plan, total = costs.cluster.model, os.environ.get("OFFBEAT_PLAN"), os.environ.get("OFFBEAT_TOTAL")
    if shape is not None and plan and total:
        model, wire = Model.of(shape), os.environ.get("OFFBEAT_WIRE")
        policy = stragglers_of("off")
        return _simulate(script.path, parse(plan), int(total), costs, model, out, wire, policy)
    probe = ProbeSite(costs.workers)
    error, loop = probe.run(script), probe.loop
    if error is not None:
        traceback.print_exception(error)
    if error is not None or loop is None or loop.total is None:
        where = "" if error is None else script.line_of(error)
        reason = "it came to no Synchronizer" if error is None else f"{type(error).__name__}: {error}"
        return _say(f"the script's beginning, which tells what to time, failed {where}: {reason}")
    model, wire = model_of(loop.worker.state), loop.settings["wire"]
    return _simulate(
        script.path, loop.plan, loop.total, costs, model, out, wire, loop.policy, loop.batch_size
    )


def _simulate(
    path: str,
    plan: Protocol,
    total: int,
    costs: Costs,
    model: Model,
    out: Path,
    wire: str | None,
    policy: Stragglers,
    batch_size: int | None = None,
) -> int:
    clock = Clock()
    move_to(ClockSite(clock))
    journal = Journal(out / "journal.jsonl", 0.0)
    begun = time.perf_counter()
    try:
        outcome = simulate(
            plan,
            total,
            costs,
            model,
            wire=0.5 if wire == "bf16" else 1.0,
            journal=journal,
            clock=clock,
            batch_size=batch_size,
            about={"script": path, "seed": costs.seed},
            stragglers=policy,
        )
    except (PlanError, PeerLost, RuntimeError) as problem:
        return _say(str(problem))
    finally:
        journal.close()
    seconds = time.perf_counter() - begun
    _keep(out, costs, outcome.seconds, seconds, seconds)
    return 0


def _report(one: Ending, script: Script) -> int:
    """Says what ended the run: the worker, when, and the script's own line."""
    when = f"rank {one.rank} at {one.at:.6g} s of virtual time"
    if one.error is None:
        return _say(f"{when}: died, as the cluster's description has it")
    if isinstance(one.error, SystemExit):
        return _say(f"{when}: the script ended with {one.error.code!r}")
    if not isinstance(one.error, TooLarge):
        print(script.trace_of(one.error), end="", file=sys.stderr)
    where = script.line_of(one.error)
    text = str(one.error).split("\n")[0]
    return _say(f"{when}{f', {where}' if where else ''}: {type(one.error).__name__}: {text}")


def _say(text: str) -> int:
    print(f"offbeat: {text}", file=sys.stderr, flush=True)
    return 1


def _keep(out: Path, costs: Costs, virtual: float, real: float, own: float) -> None:
    """What the simulation itself cost: it differs from run to run, so it is not in the journal."""
    row = {
        "cluster": costs.cluster.name,
        "workers": costs.workers,
        "virtual_seconds": round(virtual, 6),
        "real_seconds": round(real, 4),
        "overhead_seconds": round(own, 4),
    }
    (out / "virtual.json").write_text(json.dumps(row, indent=2) + "\n")


if __name__ == "__main__":
    code = main(sys.argv[1], sys.argv[2:])
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # workers that a failed one has stopped must not go on while Python clears up
