"""Which plan for which number of workers, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from offbeat.plan import check_timing, parse, phases
from offbeat.planner import rule
from offbeat.planner.forms import Forms, Iteration
from offbeat.planner.workers import left_out
from offbeat.protocols import ASP, BSP, DaSGD, LocalSGD, Protocol, Switch
from offbeat.virtual.cluster import Cluster
from offbeat.virtual.model import Model

ENOUGH = 0.95
"""Efficiency from which BSP needs no help."""
MUCH = 0.1
"""Efficiency that asynchronous training must gain: it is the harder one to tune."""
LARGE = 4
"""From a longer delay on there is a warning."""
SHARE = 0.125
"""Of the job under BSP, before ASP."""


@dataclass(frozen=True)
class Row:
    """What a plan does. epoch: seconds, None where the data set's size is not known."""

    plan: str
    iteration: Iteration
    samples_per_s: float | None
    epoch: float | None

    def as_json(self) -> dict[str, Any]:
        one = self.iteration
        parts = {name: getattr(one, name) for name in PARTS}
        return {
            "plan": self.plan,
            "seconds": one.seconds,
            **parts,
            "units_per_s": one.units_per_s,
            "samples_per_s": self.samples_per_s,
            "epoch_s": self.epoch,
            "efficiency": one.efficiency,
        }


PARTS = ("forward", "backward", "update", "exposed", "waiting")


@dataclass(frozen=True)
class Size:
    """What is planned for `workers`. t_p, t_c, delay: seconds of a local step and of an average, and the
    delay rule's answer."""

    workers: int
    t_p: float
    t_c: float
    delay: int
    rows: tuple[Row, ...]
    recommended: str
    reason: str
    warnings: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        named = ("workers", "t_p", "t_c", "delay", "recommended", "reason", "warnings")
        return {**{name: getattr(self, name) for name in named}, "plans": [r.as_json() for r in self.rows]}


@dataclass(frozen=True)
class Question:
    """What is to be planned. batch: samples of a unit. samples: of the data set. plans: to compare (None:
    mini-batch, local, delayed, asynchronous and Sync-Switch's)."""

    cluster: Cluster
    model: Model
    wire: float = 1.0
    batch: int | None = None
    samples: int | None = None
    total: int | None = None
    plans: tuple[Protocol, ...] | None = None

    def answer(self, workers: int) -> Size:
        """Raises ClusterError where the cluster can't have so many."""
        forms = Forms(self.cluster.sized(workers), self.model, self.wire)
        delay = rule.delay(forms.averaging, forms.pace)
        rows = {plan: self._row(plan, forms) for plan in self.plans or _usual(delay)}
        recommended, reason = _recommend(forms, delay, workers)
        if recommended not in rows:
            rows[recommended] = self._row(recommended, forms)
        return Size(
            workers,
            forms.pace,
            forms.averaging,
            delay,
            tuple(rows.values()),
            str(recommended),
            reason,
            tuple(_warnings(forms, rows, recommended, delay)),
        )

    def _row(self, plan: Protocol, forms: Forms) -> Row:
        one, batch = forms.of(plan, self.total), self.batch
        speed = None if batch is None else one.units_per_s * batch
        known = batch is not None and self.samples is not None
        epoch = one.epoch(self.samples, batch) if known else None  # type: ignore[arg-type]
        return Row(str(plan), one, speed, epoch)


def _usual(delay: int) -> list[Protocol]:
    period = rule.period(delay)
    switch = Switch(BSP(), ASP(), SHARE)
    return [BSP(), LocalSGD(period), DaSGD(period, delay), ASP(), switch]


def _recommend(forms: Forms, delay: int, workers: int) -> tuple[Protocol, str]:
    if workers == 1:
        return BSP(), "one worker waits for nobody"
    bsp, delayed = BSP(), DaSGD(rule.period(delay), delay)
    whole, hidden = forms.of(bsp).efficiency, forms.of(delayed).efficiency
    if whole >= ENOUGH:
        return bsp, f"backward hides the gradients' way, and {_percent(whole)} of the ideal speed are left"
    asynchronous = forms.of(ASP())
    if asynchronous.efficiency > max(hidden, whole) + MUCH:
        share = 1 - hidden
        return Switch(bsp, ASP(), SHARE), (
            f"whoever waits for the others loses {_percent(share)} even with averages hidden, since the "
            f"workers differ; under asp nobody waits: {_percent(asynchronous.efficiency)} of the ideal speed"
        )
    if hidden > whole:
        several = (
            f"{delay} local steps of {_ms(forms.pace)}"
            if delay > 1
            else f"one local step of {_ms(forms.pace)}"
        )
        return delayed, (
            f"an average takes {_ms(forms.averaging)}, and {several} {'hide' if delay > 1 else 'hides'} it: "
            f"{_percent(hidden)} of the ideal speed, where bsp has {_percent(whole)}"
        )
    return bsp, f"nothing is faster: {_percent(whole)} of the ideal speed"


def _warnings(forms: Forms, rows: dict[Protocol, Row], recommended: Protocol, delay: int) -> Iterator[str]:
    if isinstance(recommended, DaSGD) and delay > LARGE:
        yield (
            f"a mean that lands {delay} steps late is stale, and in {delay + 1} steps workers drift apart: "
            f"both slow convergence (DaSGD's trade-off); larger batches or wire=bf16 shorten the delay"
        )
    fastest = max(rows, key=lambda plan: rows[plan].iteration.units_per_s)
    if isinstance(phases(fastest)[0][0], ASP) and recommended != fastest:
        yield (
            f"{fastest} is fastest, but from the first step on its gradients are some {len(forms)} updates "
            f"stale, and early in training that diverges: put bsp first (Sync-Switch)"
        )
    if events := left_out(forms.cluster):
        yield f"{events} of {forms.cluster.source} are no steady state, and not reckoned with"


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def parse_workers(text: str) -> list[int]:
    """Numbers such as "8,16,32", or with an ellipsis "8,16,…,256": the beginning's step, or its factor where
    that leads to the end. Raises ValueError."""
    words = [word.strip() for word in text.replace("...", "…").split(",") if word.strip()]
    found: list[int] = []
    for index, word in enumerate(words):
        if word != "…":
            if not word.isdecimal() or int(word) < 1:
                raise _wrong(text, word)
            found.append(int(word))
        elif len(found) < 2 or index + 1 >= len(words) or not words[index + 1].isdecimal():
            raise _wrong(text, word)
        else:
            found += _between(found[-2], found[-1], int(words[index + 1])) or [0]
            if found[-1] == 0:
                raise _wrong(text, word)
    if not found:
        raise _wrong(text, text)
    return sorted(set(found))


def _between(before: int, last: int, end: int) -> list[int]:
    """The numbers up to `end`, without it; none where neither rule leads there."""
    for follow in (lambda n: n * last // before if last % before == 0 else 0, lambda n: n + last - before):
        row = [follow(last)]
        while last < row[-1] < end:
            row.append(follow(row[-1]))
        if row[-1] == end:
            return row
    return []


def _wrong(text: str, word: str) -> ValueError:
    return ValueError(
        f"--workers {text}: {word!r} is no number of workers; write them as 8,16,32 or 8,16,…,256"
    )


def parse_plans(texts: Sequence[str]) -> tuple[Protocol, ...]:
    """Raises PlanError."""
    plans = tuple(parse(text) for text in texts)
    for plan in plans:
        check_timing(plan)
    return plans
