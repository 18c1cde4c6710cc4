"""The Sync-Switch authors' own training logs, and how long jobs take on clusters of their speeds."""

from __future__ import annotations

import csv
from functools import cache
from statistics import mean

from offbeat.plan import parse, phases
from offbeat.planner.forms import Forms
from offbeat.policies.switches import Stragglers
from offbeat.virtual.cost import Costs
from offbeat.virtual.description import find
from offbeat.virtual.model import Model
from offbeat.virtual.timing import simulate
from reproduce import ROOT

RUNS, CURVES = ROOT / "tests" / "sync_switch_runs.csv", ROOT / "tests" / "sync_switch_curves.csv"
UNITS = {"1": 64_000, "2": 128_000, "3": 64_000}
"""Of each setup's jobs, in the logs."""
WORKERS = {"1": 8, "2": 8, "3": 16}
SHARES = {"1": 0.05, "2": 0.125, "3": 0.4998}
"""Of BSP in the logs' Sync-Switch runs; the paper says 6.25 % of setup 1."""
POLICIES = {"1": "bsp:6.25% asp", "2": "bsp:12.5% asp", "3": "bsp:50% asp"}
"""The paper's policies 1 to 3."""


@cache
def rows() -> tuple[dict[str, str], ...]:
    with RUNS.open(newline="") as file:
        return tuple(csv.DictReader(file))


def logged(
    setup: str, protocol: str, share: float, column: str = "acc_final", group: str | None = None
) -> list[float]:
    """A column of the runs with a share of BSP, to half a percent of it (accuracies as shares). group: of
    the runs; by default those without stragglers. Raises LookupError where there is none."""
    found = [
        float(row[column])
        for row in rows()
        if row["setup"] == setup
        and row["protocol"] == protocol
        and abs(float(row["bsp_frac"]) - share) <= 0.005 * share
        and (row["group"] == group if group else row["group"] in ("baseline", "switch"))
    ]
    if not found:
        raise LookupError(f"no logged run of setup {setup} with {protocol} and a share of {share:g}")
    return found


def of(setup: str, share: float, column: str = "acc_final") -> list[float]:
    """... that begin with BSP: share 0 is ASP alone, 1 BSP alone."""
    return logged(setup, {0.0: "asp", 1.0: "bsp"}.get(share, "bsp>asp"), share, column)


def points(setup: str, share: float) -> list[float]:
    """Accuracies in percent."""
    return [100 * value for value in of(setup, share)]


def time(setup: str, share: float) -> float:
    """Mean seconds of a run, without the pauses between its parts."""
    return mean(of(setup, share, "time_net_s"))


def to_accuracy(setup: str, shares: tuple[float, ...]) -> list[float]:
    """Seconds in which the fastest run of each share reaches BSP's mean accuracy."""
    target = mean(of(setup, 1.0))
    known = {row["run_id"]: row for row in rows()}
    reached = dict.fromkeys(shares, float("inf"))
    with CURVES.open(newline="") as file:
        for point in csv.DictReader(file):
            run = known.get(point["run_id"])
            if run is None or run["setup"] != setup or run["group"] not in ("baseline", "switch"):
                continue
            for share in shares:
                own = abs(float(run["bsp_frac"]) - share) <= 0.005 * share
                if own and float(point["accuracy"]) >= target:
                    reached[share] = min(reached[share], float(point["t_net_s"]))
    return [reached[share] for share in shares]


@cache
def simulated(cluster: str, plan: str, units: int, workers: int, policy: str = "off") -> float:
    """Virtual seconds of a job of `units` on a preset, or a described cluster: time alone."""
    found = find(cluster).sized(workers)
    assert found.model is not None
    watched = Stragglers.parse(policy)
    return simulate(parse(plan), units, Costs(found, 0), Model.of(found.model), stragglers=watched).seconds


def on_preset(setup: str, plan: str) -> float:
    """Seconds of a whole job of a setup, by the planner's closed forms and the preset's switch."""
    found = find(f"sync-switch-{setup}").sized(WORKERS[setup])
    assert found.model is not None
    protocol = parse(plan)
    iterations = UNITS[setup] / WORKERS[setup]
    switches = len(phases(protocol)) - 1
    return Forms(found, Model.of(found.model)).of(protocol).seconds * iterations + switches * found.switch
