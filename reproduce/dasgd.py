"""DaSGD's tables and figures on accuracy: TABLE I, figures 5 and 6."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import mean, stdev
from typing import Any

from reproduce.item import ACCURACY, MARGIN, Found, Item, accuracy, counted, row, side_by_side
from reproduce.rule import gap
from reproduce.runs import Result, Run
from reproduce.scale import averaged, families

PLANS = {"mini-batch": "bsp", "local": "local(period=4)", "DaSGD": "dasgd(period=4,delay=1)"}
DELTA = "dasgd(period=4,delay=1,merge=delta)"
EXCEPTION = "mobilenetv2"
"""In TABLE I the only network with which local SGD and DaSGD are not above mini-batch SGD."""
TESTED, SHORT = "resnet50", "vgg16"
"""The network of figs. 5 and 6, and the one that is trained longer."""
LONGER = 4


def table1_runs(mode: str) -> dict[str, list[Run]]:
    found = {
        f"{family}, {name}": averaged(mode, family).runs(plan)
        for family in families(mode)
        for name, plan in PLANS.items()
    }
    found["delta"] = averaged(mode, TESTED).runs(DELTA)
    if mode != "full":
        long = averaged(mode, SHORT).with_(None, LONGER)
        found |= {f"longer, {name}": long.runs(plan) for name, plan in PLANS.items()}
    return found


def table1(mode: str, found: Found) -> Iterator[Any]:
    for family in families(mode):
        ours = {name: accuracy(found[f"{family}, {name}"]) for name in PLANS}
        batch, local, delayed = ours.values()
        above = family != EXCEPTION
        least, most = (0.0, float("inf")) if above else (float("-inf"), MARGIN)
        yield row(
            family,
            metric=ACCURACY,
            size=averaged(mode, family).size,
            seeds=counted(*ours.values()),
            paper="local SGD and DaSGD are above mini-batch SGD, and like each other"
            if above
            else "the only network where local SGD and DaSGD are not above mini-batch SGD",
            ours=side_by_side(ours),
            claims=[
                gap("local less mini-batch", local, batch, least, most, "points"),
                gap("DaSGD less mini-batch", delayed, batch, least, most, "points"),
                gap("DaSGD less local", delayed, local, -MARGIN, MARGIN, "points"),
            ],
            why="The excerpt has no figures. " + SCALE,
        )
    mix, delta = accuracy(found[f"{TESTED}, DaSGD"]), accuracy(found["delta"])
    yield row(
        f"{TESTED}: is it the merge?",
        metric=ACCURACY,
        size=averaged(mode, TESTED).size,
        seeds=counted(mix, delta),
        paper="ξ·x + (1−ξ)·mean, which scales the step done meanwhile by ξ",
        ours=side_by_side({"merge=mix": mix, "merge=delta": delta}),
        claims=[gap("delta less mix", delta, mix, least=0, unit="points")],
        why="Above 0 means that DaSGD loses by scaling the steps done meanwhile; delta keeps them.",
    )
    if mode == "full":
        return
    short = [accuracy(found[f"{SHORT}, {name}"]) for name in PLANS]
    long = {name: accuracy(found[f"longer, {name}"]) for name in PLANS}
    yield row(
        f"{SHORT}: is it the length?",
        metric=ACCURACY,
        size=f"as {SHORT}, and {LONGER} times as many iterations",
        seeds=counted(*long.values()),
        paper="after 2,450 iterations local SGD and DaSGD are above mini-batch SGD",
        ours=f"{side_by_side(long)}; before, DaSGD less mini-batch {mean(short[2]) - mean(short[0]):.1f}",
        claims=[
            gap("local less mini-batch", long["local"], long["mini-batch"], least=0, unit="points"),
            gap("DaSGD less mini-batch", long["DaSGD"], long["mini-batch"], least=0, unit="points"),
        ],
        why="As many iterations as the paper's, still by 8 workers on a fifth of the images.",
    )


SCALE = (
    "A quarter of the workers and iterations, a fifth of the images, four times the learning rate: the sum "
    "of the learning rates is the paper's."
)


# Figure 5


def fig5_runs(mode: str) -> dict[str, list[Run]]:
    return {name: averaged(mode, TESTED).runs(plan) for name, plan in PLANS.items()}


def early(result: Result, share: float) -> list[float]:
    """Accuracies of the evaluations up to a share of the job, in percent; two of them at least."""
    found = [100 * one[2] for one in result.curve if one[0] <= share]
    return found if len(found) > 1 else [100 * one[2] for one in result.curve[:2]]


def jumps(result: Result) -> float:
    """Standard deviation of the steps from one evaluation to the next over the first 30 % of the job."""
    steps = [b - a for a, b in pairwise(early(result, 0.3))]
    return stdev(steps) if len(steps) > 1 else abs(steps[0]) if steps else 0.0


def fig5(mode: str, found: Found) -> Iterator[Any]:
    results: list[Sequence[Result]] = [found[name] for name in PLANS]
    common: dict[str, Any] = {"size": averaged(mode, TESTED).size, "seeds": counted(*results)}

    def each(values: list[list[float]], digits: int) -> str:
        return side_by_side(dict(zip(PLANS, values, strict=True)), digits)

    unsteady = [[jumps(one) for one in some] for some in results]
    yield row(
        "unsteady at the beginning",
        metric="standard deviation of the accuracy's steps between evaluations, first 30 %, points",
        paper="mini-batch SGD is very unstable, its accuracy fluctuates greatly",
        ours=each(unsteady, 1),
        claims=[
            gap(f"mini-batch less {name}", unsteady[0], values, least=0, unit="points")
            for name, values in zip(("local", "DaSGD"), unsteady[1:], strict=True)
        ],
        why=SCALE,
        **common,
    )
    speed = [[mean(early(one, 0.5)) for one in some] for some in results]
    yield row(
        "convergence",
        metric="mean accuracy over the first half, %",
        paper="mini-batch SGD is slower than local SGD and DaSGD",
        ours=each(speed, 1),
        claims=[
            gap(f"{name} less mini-batch", values, speed[0], least=0, unit="points")
            for name, values in zip(("local", "DaSGD"), speed[1:], strict=True)
        ],
        why=SCALE,
        **common,
    )
    for title, metric, losses, sign in (
        (
            "training loss",
            "loss of training images at the end",
            [[o.train_loss for o in s] for s in results],
            1,
        ),
        ("test loss", "loss of test images at the end", [[o.loss for o in s] for s in results], -1),
    ):
        lower = sign > 0
        yield row(
            title,
            metric=metric,
            paper=f"mini-batch SGD's is {'smaller' if lower else 'larger'}",
            ours=each(losses, 3),
            claims=[
                gap(f"{name} less mini-batch", values, losses[0], least=0)
                if lower
                else gap(f"mini-batch less {name}", losses[0], values, least=0)
                for name, values in zip(("local", "DaSGD"), losses[1:], strict=True)
            ],
            why=SCALE,
            **common,
        )


# Figure 6


BASE = "dasgd(period=4,delay=2)"
SWEEPS: dict[str, tuple[tuple[str, str], ...]] = {
    "τ": (("τ 3", "dasgd(period=3,delay=2)"), ("τ 4", BASE), ("τ 8", "dasgd(period=8,delay=2)")),
    "d": (("d 1", "dasgd(period=4,delay=1)"), ("d 2", BASE), ("d 3", "dasgd(period=4,delay=3)")),
    "ξ": (
        ("ξ 0", "dasgd(period=4,delay=2,keep=0)"),
        ("ξ 0.25", BASE),
        ("ξ 0.5", "dasgd(period=4,delay=2,keep=0.5)"),
        ("ξ 0.75", "dasgd(period=4,delay=2,keep=0.75)"),
    ),
}
TIMES = (0.5, 1, 2)
"""Workers, and local batches, over the baseline's."""


def batch_of(mode: str) -> int:
    return 8 if mode == "quick" else 32


def fig6_runs(mode: str) -> dict[str, list[Run]]:
    base = averaged(mode, TESTED)
    found = {name: base.runs(plan) for sweep in SWEEPS.values() for name, plan in sweep}
    for times in TIMES:
        workers, batch = round(base.workers * times), round(batch_of(mode) * times)
        found[f"m {workers}"] = base.with_(workers).runs(BASE)
        more = "" if times == 1 else f"--batch-size {batch}"
        found[f"B {batch}"] = base.with_(None, 1 / times, more).runs(BASE)
    return found


def fig6(mode: str, found: Found) -> Iterator[Any]:
    base = averaged(mode, TESTED)
    common: dict[str, Any] = {"metric": ACCURACY, "size": f"{base.size}, τ 4, d 2, ξ 0.25"}
    names = {
        "m": [f"m {round(base.workers * times)}" for times in TIMES],
        "B_l": [f"B {round(batch_of(mode) * times)}" for times in TIMES],
        **{name: [one for one, _ in sweep] for name, sweep in SWEEPS.items()},
    }
    said = {
        "m": "a larger global batch costs accuracy in equal epochs",
        "B_l": "a larger global batch costs accuracy in equal epochs",
        "τ": "more local steps cost accuracy",
        "d": "a staler average converges more slowly",
    }
    for name, paper in said.items():
        ours = {one: accuracy(found[one]) for one in names[name]}
        first, *_, last = ours
        yield row(
            f"{name} swept",
            seeds=counted(*ours.values()),
            paper=f"{paper} (no figures in the excerpt)",
            ours=side_by_side(ours),
            claims=[gap(f"{first} less {last}", ours[first], ours[last], least=0, unit="points")],
            why=SCALE,
            **common,
        )
    ours = {one: accuracy(found[one]) for one in names["ξ"]}
    yield row(
        "ξ swept",
        seeds=counted(*ours.values()),
        paper="ξ 0.25 is the baseline (no figures in the excerpt)",
        ours=side_by_side(ours),
        claims=[
            gap(f"ξ 0.25 less {one}", ours["ξ 0.25"], values, -MARGIN, unit="points")
            for one, values in ours.items()
            if one != "ξ 0.25"
        ],
        why=f"The baseline counts as a good choice where no other is more than {MARGIN:g} points above it.",
        **common,
    )


ITEMS = (
    Item(
        "dasgd-table1",
        "DaSGD, TABLE I: accuracy of mini-batch SGD, local SGD and DaSGD",
        "τ 4, d 1, ξ 0.25, one-cycle learning rate, weight decay 0.01, momentum 0.9. Networks in their CIFAR "
        "form, narrower and less deep.",
        trained=table1,
        runs=table1_runs,
    ),
    Item(
        "dasgd-fig5",
        "DaSGD, fig. 5: loss and accuracy along training",
        "The runs of TABLE I's ResNet-50, evaluated 20 times on 1,000 test images, at the end on all.",
        trained=fig5,
        runs=fig5_runs,
    ),
    Item(
        "dasgd-fig6",
        "DaSGD, fig. 6: workers, local batch, local steps, ξ and delay swept",
        "One of five is changed at a time; all runs see the same number of images.",
        trained=fig6,
        runs=fig6_runs,
    ),
)
