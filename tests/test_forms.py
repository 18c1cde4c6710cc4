"""Closed forms: held to timing-only runs of the virtual cluster, and to what must always be so."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import exp, inf
from typing import Any, ClassVar

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from offbeat.plan import parse
from offbeat.planner.forms import Forms
from offbeat.planner.workers import left_out, states
from offbeat.protocols import ASP, BSP, SSP, DaSGD, LocalSGD, Program, Protocol, Switch
from offbeat.virtual.cluster import (
    ALGORITHMS,
    Allreduce,
    Cluster,
    Compute,
    Failure,
    Group,
    Join,
    Link,
    ShardService,
    Straggler,
    equal,
)
from offbeat.virtual.cost import Costs
from offbeat.virtual.model import Model
from offbeat.virtual.timing import WORD, simulate
from offbeat.worker import Worker

SMALL, LARGE = Model(equal(308_266, 25), buffers=2000), Model(equal(2_000_000, 30))
STEADY, UNEVEN = Compute(0.1, update=0.002), Compute(0.1, "lognormal", 0.3, update=0.002)
SAMPLES = Compute(0.1, "samples", samples=(0.08, 0.09, 0.1, 0.13), update=0.002)


def cluster(
    workers: int,
    compute: Compute = STEADY,
    per_host: int = 1,
    rate: float = 25e6,
    slow: float = 1.0,
    algorithm: str = "ring",
    **more: Any,
) -> Cluster:
    """Hosts of `per_host` workers, joined by `rate`; the last worker is `slow` times slower."""
    link = Link(rate, 1e-4)
    groups = [Group(workers - (slow != 1), per_host, 1.0, compute, link)]
    if slow != 1:
        groups.append(Group(1, 1, slow, compute, link))
    given = {"host": Link(10e9, 5e-6), "shards": ShardService(2e9, 1e-4), **more}
    return Cluster(
        "test", "test", workers, tuple(groups), 2 / 3, allreduce=Allreduce(algorithm, 1e-3), **given
    )


def measured(found: Cluster, model: Model, plan: Protocol, steps: int = 240, wire: float = 1.0) -> float:
    """Seconds of an iteration in a timing-only run, its beginning left out."""
    workers = found.size or 1
    warm, whole = 24, 24 + steps
    begun, ended = (
        simulate(plan, count * workers, Costs(found, 1), model, wire=wire).seconds for count in (warm, whole)
    )
    return (ended - begun) / steps


REPLICAS = ["bsp", "local(4)", "dasgd(2,1)", "dasgd(4,2)", "dasgd(3,0)"]


@pytest.mark.parametrize("plan", REPLICAS)
@pytest.mark.parametrize("model", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize(
    "found",
    [
        cluster(2),
        cluster(8, slow=1.5),
        cluster(32, per_host=8, algorithm="hierarchical"),
        cluster(16, per_host=4, algorithm="butterfly"),
        cluster(6, algorithm="tree"),
    ],
    ids=["2", "8 one slow", "32 hierarchical", "16 butterfly", "6 tree"],
)
def test_replicas_where_times_do_not_vary(found: Cluster, model: Model, plan: str) -> None:
    protocol = parse(plan)
    assert Forms(found, model).of(protocol).seconds == pytest.approx(
        measured(found, model, protocol, 48), rel=0.001
    )


@pytest.mark.parametrize("plan", REPLICAS)
@pytest.mark.parametrize(
    "found",
    [cluster(2, UNEVEN), cluster(8, UNEVEN), cluster(8, UNEVEN, slow=2.0), cluster(32, SAMPLES, per_host=8)],
    ids=["2", "8", "8 one slow", "32 samples"],
)
def test_replicas_where_times_vary(found: Cluster, plan: str) -> None:
    protocol = parse(plan)
    steps = 2400 if (found.size or 1) <= 8 else 600
    assert Forms(found, SMALL).of(protocol).seconds == pytest.approx(
        measured(found, SMALL, protocol, steps), rel=0.02
    )


ASYNCHRONOUS = {
    "2": cluster(2, UNEVEN, rate=250e6),
    "8": cluster(8, UNEVEN, rate=125e6),
    "8 one slow": cluster(8, UNEVEN, rate=125e6, slow=2.0),
    "32": cluster(32, UNEVEN, rate=125e6),
    "32, 4 a host": cluster(32, UNEVEN, per_host=4, rate=250e6),
    "64 on one host": cluster(64, UNEVEN, per_host=64),
    "steady": cluster(16, rate=250e6),
    "busy": cluster(8, UNEVEN, rate=25e6),
}


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_asp(name: str) -> None:
    found = ASYNCHRONOUS[name]
    predicted = Forms(found, SMALL).of(ASP())
    assert predicted.seconds == pytest.approx(measured(found, SMALL, ASP(), 320), rel=0.02)


@pytest.mark.parametrize("name", ["2", "8 one slow", "steady"])
def test_ssp(name: str) -> None:
    found = ASYNCHRONOUS[name]
    predicted = Forms(found, SMALL).of(SSP(2))
    assert predicted.seconds == pytest.approx(measured(found, SMALL, SSP(2), 640), rel=0.02)


def test_half_the_bytes() -> None:
    found = cluster(4, rate=5e6)
    for plan in (BSP(), LocalSGD(4), DaSGD(4, 2)):
        seconds = Forms(found, SMALL, wire=0.5).of(plan).seconds
        assert seconds == pytest.approx(measured(found, SMALL, plan, 48, wire=0.5), rel=0.001)


def test_a_switch_takes_each_protocols_time_for_its_share() -> None:
    """Sync-Switch, for any BSP share."""
    forms = Forms(cluster(8, UNEVEN, rate=125e6), SMALL)
    bsp, asp = forms.of(BSP()), forms.of(ASP())
    for share in (0.0, 0.0625, 0.5, 1.0):
        found = forms.of(Switch(BSP(), ASP(), share))
        assert found.seconds == pytest.approx(share * bsp.seconds + (1 - share) * asp.seconds)
    assert forms.of(Switch(BSP(), ASP(), 30), total=120).seconds == pytest.approx(
        0.25 * bsp.seconds + 0.75 * asp.seconds
    )
    with pytest.raises(ValueError, match=r"bsp:30u asp: an end in units needs the job's length"):
        forms.of(Switch(BSP(), ASP(), 30))


def test_random_stragglers_slow_bsp_and_spare_asp() -> None:
    """M/D/∞: somebody is slow for a share 1 − e^(−seconds/every) of the time, and BSP with him."""
    calm = cluster(8, rate=1e12)
    event = Straggler(seconds=10.0, slow=3.0, every=20.0)
    hit = replace(calm, stragglers=(event,))
    share = 1 - exp(-0.5)
    assert [round(s, 6) for s, _ in states(hit)] == [round(1 - share, 6), round(share, 6)]
    quick = Forms(calm, SMALL).of(BSP()).seconds
    slow = quick + 0.2  # a unit of 300 ms
    expected = 1 / ((1 - share) / quick + share / slow)
    found = Forms(hit, SMALL).of(BSP())
    assert found.seconds == pytest.approx(expected, rel=0.001)
    assert found.waiting == pytest.approx(expected - quick, rel=0.01)
    runs = [simulate(BSP(), 8 * 6000, Costs(hit, seed), SMALL).seconds / 6000 for seed in range(3)]
    assert found.seconds == pytest.approx(sum(runs) / 3, rel=0.05)
    assert Forms(hit, SMALL).of(ASP()).seconds < 1.2 * Forms(calm, SMALL).of(ASP()).seconds


def test_what_is_no_steady_state_is_named() -> None:
    lasting = Straggler(inf, slow=2.0, workers=(0,), at=(0.0,))
    passing = Straggler(5.0, latency=0.01, workers=(1,), at=(3.0,))
    found = cluster(4, stragglers=(lasting, passing), failures=(Failure(1, 3.0),), joins=(Join(5.0, 2),))
    assert left_out(found) == "1 straggler that passes, 1 failure, 2 newcomers"
    assert left_out(cluster(4, stragglers=(lasting,))) == ""
    assert Forms(found, SMALL).pace == pytest.approx(0.202)


def test_a_protocol_of_ones_own_is_followed() -> None:
    @dataclass(frozen=True)
    class Idle(Protocol):
        word: ClassVar[str] = "idle"

        def run(self, w: Worker) -> Program:
            while w.running:
                yield w.gradient()
                w.step()

    assert Forms(cluster(4), SMALL).of(Idle()).seconds == pytest.approx(0.102)


def test_one_worker_waits_for_nobody() -> None:
    for plan in ("bsp", "local", "dasgd", "ssp", "asp"):  # alone, a push is a step
        assert Forms(cluster(1), SMALL).of(parse(plan)).seconds == pytest.approx(0.102)


def test_the_words_are_as_long_as_the_real_engines() -> None:
    from offbeat.cluster.control import Event, Word

    assert len(Word(Event.REDUCE).to_bytes(parameters=0)) == WORD


# Whatever the cluster


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    kind = draw(st.sampled_from([STEADY, UNEVEN, SAMPLES]))
    unit = draw(st.floats(0.001, 1.0))
    compute = replace(kind, unit=unit, samples=tuple(10 * unit * s for s in kind.samples))
    return cluster(
        draw(st.integers(2, 40)),
        compute,
        per_host=draw(st.sampled_from([1, 4, 8])),
        rate=draw(st.floats(1e5, 1e10)),
        slow=draw(st.sampled_from([1.0, 3.0])),
        algorithm=draw(st.sampled_from(ALGORITHMS)),
    )


@settings(max_examples=25, deadline=None)
@given(found=clusters(), period=st.integers(1, 5), delay=st.integers(0, 4))
def test_order_of_the_protocols(found: Cluster, period: int, delay: int) -> None:
    assume(delay < period)
    forms = Forms(found, SMALL)
    delayed, local = forms.of(DaSGD(period, delay)), forms.of(LocalSGD(period))
    mini = forms.without_overlap()
    slack = 1 + 1e-9
    assert delayed.seconds <= local.seconds * slack
    assert local.seconds <= max(mini, forms.averaging + forms.computing) * 1.002
    for one in (delayed, local, forms.of(BSP())):
        assert one.seconds >= one.computing / slack
        assert min(one.forward, one.backward, one.update, one.exposed, one.waiting) >= 0
        assert one.efficiency <= slack


@settings(max_examples=25, deadline=None)
@given(found=clusters(), factor=st.floats(1.0, 50.0), plan=st.sampled_from(REPLICAS))
def test_nothing_is_faster_over_a_slower_link(found: Cluster, factor: float, plan: str) -> None:
    groups = tuple(replace(g, link=replace(g.link, rate=g.link.rate / factor)) for g in found.groups)
    quick, slow = (Forms(c, SMALL).of(parse(plan)).seconds for c in (found, replace(found, groups=groups)))
    assert slow >= quick * (1 - 1e-9)


@settings(max_examples=10, deadline=None)
@given(rate=st.floats(2e8, 1e10), factor=st.floats(1.0, 1.5), uneven=st.booleans())
def test_asp_is_not_faster_over_a_slower_link(rate: float, factor: float, uneven: bool) -> None:
    compute = UNEVEN if uneven else STEADY
    quick, slow = (Forms(cluster(16, compute, rate=r), SMALL).of(ASP()) for r in (rate, rate / factor))
    assert slow.seconds >= quick.seconds * (1 - 1e-9)
    assert quick.seconds >= quick.computing * (1 - 1e-9)
