"""Sync-Switch's figures on why and when to switch: 5, 6, 7, and the momentum at a switch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import mean
from typing import Any

from reproduce import logs
from reproduce.item import (
    ACCURACY,
    LOGS,
    MARGIN,
    TOLERANCE,
    Found,
    Item,
    accuracy,
    counted,
    row,
    side_by_side,
)
from reproduce.rule import average, combined, gap
from reproduce.runs import Result, Run
from reproduce.scale import switched

# Figure 5


ORDER = ("bsp:50% asp", "asp:50% bsp")
SHARES = ("asp", "bsp:6.25% asp", "bsp:12.5% asp", "bsp:25% asp", "bsp:50% asp", "bsp:75% asp", "bsp")
LONGER = 4
LONG = ("bsp", "bsp:6.25% asp")


def fig5_runs(mode: str) -> dict[str, list[Run]]:
    setup = switched(mode, "1")
    found = {plan: setup.runs(plan) for plan in dict.fromkeys((*SHARES, *ORDER))}
    if mode != "full":
        long = setup.with_(None, LONGER)
        found |= {f"{plan}, longer": long.runs(plan) for plan in LONG}
    return found


def order_logged() -> dict[str, list[float]]:
    """Accuracies of the logged runs with half of the job under each, in percent."""
    return {
        name: [100 * value for value in logs.logged("1", protocol, share)]
        for name, protocol, share in (("bsp → asp", "bsp>asp", 0.4999), ("asp → bsp", "asp>bsp", 0.499))
    }


def fig5_logged(mode: str) -> Iterator[Any]:
    told = order_logged()
    yield row(
        "(a) the order, in the logs",
        metric=ACCURACY,
        size=f"{LOGS}: ResNet-32, 8 workers, 64,000 units, half of them BSP",
        seeds=counted(*told.values()),
        paper="BSP → ASP is above ASP → BSP",
        ours=side_by_side(told),
        claims=[gap("BSP → ASP less ASP → BSP", *told.values(), least=0, unit="points")],
        why="The figure is drawn from these runs.",
    )
    known = {share: logs.points("1", share) for share in (0, 0.02, 0.05, 0.1, 0.25, 0.5, 1)}
    bsp = known[1]
    flat = {share: known[share] for share in (0.05, 0.1, 0.25, 0.5)}
    yield row(
        "(b) the share, in the logs",
        metric=ACCURACY,
        size=f"{LOGS}: ResNet-32, 8 workers, 64,000 units",
        seeds=counted(*known.values()),
        paper="rises with BSP's share, then stays on par with BSP alone",
        ours=side_by_side({f"{100 * share:g} %": values for share, values in known.items()}),
        claims=[
            gap("5 % less 0 %", known[0.05], known[0], least=0, unit="points"),
            *(
                gap(f"{100 * share:g} % less 100 %", values, bsp, -TOLERANCE, unit="points")
                for share, values in flat.items()
            ),
        ],
        why="On par means within the paper's tolerance of 1 point; runs of some shares scatter by more.",
    )


def fig5(mode: str, found: Found) -> Iterator[Any]:
    setup = switched(mode, "1")
    told, ours = order_logged(), {plan: accuracy(found[plan]) for plan in ORDER}
    yield row(
        "(a) the order",
        metric=ACCURACY,
        size=setup.size,
        seeds=counted(*ours.values()),
        paper=f"BSP → ASP is above ASP → BSP (logs: {side_by_side(told)})",
        ours=side_by_side(ours),
        claims=[gap("BSP → ASP less ASP → BSP", *ours.values(), least=0, unit="points")],
        why="A smaller network, fewer images and a twentieth of the units: every distance is larger.",
    )
    shares = {plan: accuracy(found[plan]) for plan in SHARES}
    asp, half, bsp = shares["asp"], shares["bsp:50% asp"], shares["bsp"]
    yield row(
        "(b) it rises",
        metric=ACCURACY,
        size=setup.size,
        seeds=counted(*shares.values()),
        paper="rises with BSP's share",
        ours=side_by_side(shares),
        claims=[gap("50 % less 0 %", half, asp, least=0, unit="points")],
        why="The rise is the paper's; how far is the small job's (see the next rows).",
    )
    yield row(
        "(b) then it is flat",
        metric=ACCURACY,
        size=setup.size,
        seeds=counted(half, bsp, shares["bsp:75% asp"]),
        paper="half of the job under BSP is on par with BSP alone",
        ours=side_by_side({plan: shares[plan] for plan in ("bsp:50% asp", "bsp:75% asp", "bsp")}),
        claims=[
            gap(f"{name} less 100 %", shares[plan], bsp, -MARGIN, MARGIN, "points")
            for name, plan in (("50 %", "bsp:50% asp"), ("75 %", "bsp:75% asp"))
        ],
        why=f"On par means within {MARGIN:g} points.",
    )
    early = shares["bsp:6.25% asp"]
    yield row(
        "(b) 6.25 % are enough",
        metric=ACCURACY,
        size=setup.size,
        seeds=counted(early, bsp),
        paper="6.25 % is on par with BSP (logs: 5 % is "
        f"{mean(logs.points('1', 0.05)) - mean(logs.points('1', 1)):+.1f} points from it)",
        ours=side_by_side({"bsp:6.25% asp": early, "bsp": bsp}),
        claims=[gap("6.25 % less 100 %", early, bsp, -MARGIN, unit="points")],
        why="6.25 % of this job are 24 steps of BSP, of the paper's 500; the next row tests the length.",
    )
    if mode == "full":
        return
    long = {plan: accuracy(found[f"{plan}, longer"]) for plan in LONG}
    yield row(
        "(b) is it the length?",
        metric="distance of bsp:6.25% asp from bsp, points",
        size=f"as before, and {LONGER} times as many units",
        seeds=counted(*long.values()),
        paper="no distance after 64,000 units",
        ours=f"{mean(bsp) - mean(early):.1f}; {LONGER} times as long "
        f"{mean(long['bsp']) - mean(long['bsp:6.25% asp']):.1f} ({side_by_side(long)})",
        claims=[
            combined(
                f"the distance less that of a job {LONGER} times as long",
                [(1, bsp), (-1, early), (-1, long["bsp"]), (1, long["bsp:6.25% asp"])],
                least=0,
                unit="points",
            )
        ],
        why="Above 0 means that the distance is the short job's.",
    )


# Figures 6 and 7


LOOKED = ("bsp", "asp", "bsp:50% asp")
EARLY, LATE = (0.0, 0.125), (0.75, 1.0)
"""Shares of the job."""


def looked_runs(mode: str) -> dict[str, list[Run]]:
    return {plan: switched(mode, "1").runs(plan, "--look 4%") for plan in LOOKED}


def within(samples: Sequence[tuple[float, float]], span: tuple[float, float]) -> float:
    """The mean of those (progress, value) in a part of the job; the nearest one's where none is."""
    inside = [value for progress, value in samples if span[0] <= progress <= span[1]]
    return mean(inside) if inside else min(samples, key=lambda one: abs(one[0] - sum(span) / 2))[1]


def looked(results: Sequence[Result], name: str, span: tuple[float, float]) -> list[float]:
    return [within([(at, values[name]) for at, values in one.looks], span) for one in results]


def fig6(mode: str, found: Found) -> Iterator[Any]:
    setup, bsp, late = switched(mode, "1"), found["bsp"], found["bsp:50% asp"]
    common: dict[str, Any] = {"size": setup.size, "seeds": counted(bsp)}
    where = f"the first {100 * EARLY[1]:g} % of the job less its last {100 * (1 - LATE[0]):g} %"
    for title, name, metric, paper in (
        ("the gradient", "gradient", "norm of the gradient over 500 test images", "much larger early"),
        ("the step", "moved", "distance that a BSP step moves the parameters", "much larger early"),
        (
            "the gradient's change",
            "change",
            "norm of the gradient's change in one step, over its norm",
            "changes quickly early, slowly late",
        ),
    ):
        early, end = looked(bsp, name, EARLY), looked(bsp, name, LATE)
        yield row(
            f"{title}, BSP",
            metric=metric,
            paper=paper,
            ours=side_by_side({"early": early, "late": end}, 3),
            claims=[gap(where, early, end, least=0)],
            why="The excerpt gives no figures; learning rates fall to a hundredth here, as there.",
            **common,
        )
    early, end = looked(found["asp"], "cosine", EARLY), looked(late, "cosine", LATE)
    yield row(
        "(b) what a stale gradient still says",
        metric="cosine between the gradients before and after 8 units, ASP's staleness",
        paper="late, stale gradients still tell the direction; early they tell little",
        ours=side_by_side({"early, asp": early, "late, after bsp:50%": end}, 3),
        claims=[gap("late less early", end, early, least=0)],
        why="The excerpt gives no figures.",
        **common,
    )


def fig7(mode: str, found: Found) -> Iterator[Any]:
    setup = switched(mode, "1")
    common: dict[str, Any] = {"size": setup.size, "seeds": counted(found["asp"])}

    def losses(plan: str) -> list[float]:
        return [within(result.steps, EARLY) for result in found[plan]]

    bsp, asp = losses("bsp"), losses("asp")
    yield row(
        "(a), (b) the loss, early",
        metric=f"mean training loss over the first {100 * EARLY[1]:g} % of the job",
        paper="ASP is unstable early, which keeps it from lowering the loss",
        ours=side_by_side({"bsp": bsp, "asp": asp}, 2),
        claims=[gap("ASP less BSP", asp, bsp, least=0)],
        why="The excerpt gives no figures.",
        **common,
    )
    early = {plan: looked(found[plan], "change", EARLY) for plan in ("bsp", "asp")}
    yield row(
        "(c) the gradient, early",
        metric="norm of the gradient's change in 8 units, over its norm",
        paper="changes quickly at each step under ASP",
        ours=side_by_side(early, 2),
        claims=[average("ASP", early["asp"], least=0.5)],
        why="A change of half of the norm counts as quick; BSP's is beside it.",
        **common,
    )
    end = looked(found["bsp:50% asp"], "change", (0.52, 1.0))
    yield row(
        "(d) the gradient, after a late switch",
        metric="norm of the gradient's change in 8 units, over its norm",
        paper="ASP is stable once the learning rate is lower and gradients change slowly",
        ours=side_by_side({"asp, early": early["asp"], "asp after bsp:50%": end}, 2),
        claims=[gap("early less after the switch", early["asp"], end, least=0)],
        why="The excerpt gives no figures.",
        **common,
    )


# Momentum


MOMENTA = {"ramp": "91.16", "scale": "88.16 to 90.20", "zero": "86.14 to 87.73"}
SWITCHES = ("bsp:50% asp", "bsp:25% asp")
UNSCALED = "bsp:25% asp"


def momentum_runs(mode: str) -> dict[str, list[Run]]:
    setup = switched(mode, "1")
    found = {f"{plan}, keep": setup.runs(plan) for plan in SWITCHES}
    for plan in SWITCHES:
        found |= {f"{plan}, {name}": setup.runs(plan, f"--at-switch {name}") for name in MOMENTA}
    return {**found, "unscaled": setup.runs(UNSCALED, "--unscaled 0.25")}


def momentum(mode: str, found: Found) -> Iterator[Any]:
    setup = switched(mode, "1")
    for plan in SWITCHES:
        keep = accuracy(found[f"{plan}, keep"])
        for name, paper in MOMENTA.items():
            other = accuracy(found[f"{plan}, {name}"])
            # The paper's ramped momentum is a quarter of a point below: on par.
            least = -MARGIN if name == "ramp" else 0.0
            yield row(
                f"{name}, {plan}",
                metric=ACCURACY,
                size=setup.size,
                seeds=counted(keep, other),
                paper=f"kept 91.42, {name} {paper} (switch at 10 %)",
                ours=side_by_side({"keep": keep, name: other}),
                claims=[gap(f"keep less {name}", keep, other, least=least, unit="points")],
                why="At the share that is enough here; at 25 % ASP begins before the model is settled."
                if plan == SWITCHES[0]
                else "ASP begins early here, where it adds to momentum: less of it may be better.",
            )

    def jump(result: Result) -> float:
        return within(result.steps, (0.251, 0.3)) - within(result.steps, (0.2, 0.25))

    kept = [jump(result) for result in found[f"{UNSCALED}, keep"]]
    jumps = [jump(result) for result in found["unscaled"]]
    yield row(
        f"the learning rate is left unscaled, {UNSCALED}",
        metric="training loss over 5 % of the job after the switch less that before",
        size=setup.size,
        seeds=counted(jumps),
        paper="the loss jumps from 0.08 to 1.28",
        ours=side_by_side({"scaled": kept, "unscaled": jumps}, 2),
        claims=[gap("unscaled less scaled", jumps, kept, least=0)],
        why="The loss is higher here before the switch, so a jump has less room.",
    )


ITEMS = (
    Item(
        "sync-switch-fig5",
        "Sync-Switch, fig. 5: the order and the share of BSP",
        "Does it matter which protocol comes first, and how much of BSP is enough?",
        known=fig5_logged,
        trained=fig5,
        runs=fig5_runs,
    ),
    Item(
        "sync-switch-fig6",
        "Sync-Switch, fig. 6: how the gradient changes along training",
        "The figure is a drawing: early in training steps are long and the gradient of the population's loss "
        "changes quickly, late it changes slowly, so that stale gradients still help. Measured: that "
        "gradient over 500 test images, before and after one step of the first worker (8 units), 25 times "
        "in a job.",
        trained=fig6,
        runs=looked_runs,
    ),
    Item(
        "sync-switch-fig7",
        "Sync-Switch, fig. 7: ASP is unstable early",
        "The figure is a drawing; the measure is that of fig. 6.",
        trained=fig7,
        runs=looked_runs,
    ),
    Item(
        "sync-switch-momentum",
        "Sync-Switch, momentum and learning rate at the switch",
        "What becomes of BSP's momentum under ASP: kept, ramped from zero, scaled by the workers, zero; and "
        "the learning rate left as BSP's. The paper's figures: those of its authors' logs with a switch at "
        "10 %.",
        trained=momentum,
        runs=momentum_runs,
    ),
)
