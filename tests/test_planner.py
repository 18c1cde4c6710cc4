"""The planner's parts: a model's cost, the delay rule, distributions; and what the DaSGD paper publishes."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, log2

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from offbeat.planner import devices, rule
from offbeat.planner.flops import ModelCost, count
from offbeat.planner.forms import Forms
from offbeat.planner.spread import mean_of_slowest, slowdown, spread_of
from offbeat.protocols import BSP, DaSGD, LocalSGD
from offbeat.virtual.cluster import Allreduce, Cluster, Compute, Group, Link, ShardService, equal
from offbeat.virtual.description import preset
from offbeat.virtual.model import Model
from tests.resnet50 import resnet50

SMALL = st.floats(1e-4, 10)
PARAMETERS, PCIE, GBIT20, GBIT10 = 25_500_000, 16e9, 2.5e9, 1.25e9
TITAN_X, K80 = devices.find("titan x").peak(), devices.find("K80").peak()


@pytest.fixture(scope="module")
def published() -> ModelCost:
    with torch.device("meta"):
        net = resnet50()
        pictures = torch.empty(8, 3, 224, 224)
    return count([net], [((pictures,), {})])


# A model's cost


def test_resnet50_costs_what_is_published(published: ModelCost) -> None:
    assert published.parameters == 25_557_032  # 25.6 M
    assert round(published.size / 1e6) == 102
    multiply_adds = published.forward / 2
    assert multiply_adds == pytest.approx(4.09e9, rel=0.005)
    # Every layer but the first needs its input's gradient as well as its weights'.
    first = next(layer for layer in published.layers if layer.forward)
    assert published.backward == pytest.approx(2 * published.forward - first.forward)


def test_a_layers_operations_are_known_by_hand() -> None:
    net = nn.Sequential(nn.Linear(10, 20, bias=False), nn.ReLU(), nn.Linear(20, 5))
    found = count([net], [((torch.randn(4, 10),), {})])
    assert (found.forward, found.backward) == (2 * (200 + 100), 2 * 200 + 4 * 100)
    assert [(layer.name, layer.parameters) for layer in found.layers] == [("0", 200), ("2", 105)]
    assert found.passed == (1.0, 0.5, 0.5)  # the last layer's two gradients are there half-way
    assert found.flop == found.forward + found.backward
    assert all(p.grad is None for p in net.parameters())


def test_a_forward_that_looks_at_values_is_counted_where_the_model_is() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.one(x) if float(x.sum()) > 0 else x

    assert count([Branch()], [((torch.ones(2, 3),), {})]).forward == 2 * 9
    with pytest.raises(ValueError, match="Branch could not be counted: its forward failed with Runtime"):
        count([Branch()], [((torch.ones(2, 4),), {})])


def test_frozen_and_shared_parameters() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[0].requires_grad_(False)
    found = count([net], [((torch.randn(2, 4),), {})])
    assert found.sizes == (16, 4)
    assert found.passed == (1.0, 1.0)
    assert found.backward == 2 * 16  # nothing below needs a gradient


def test_passed_moves_the_buckets() -> None:
    sizes = (500_000, 500_000, 500_000)
    late, even = Model(sizes, passed=(1.0, 0.9, 0.8)), Model(sizes)
    assert even.ready() == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert late.ready() == [0.8, 0.9, 1.0]


# Devices


def test_devices_are_found_however_they_are_written() -> None:
    assert devices.find("TITAN-X") is devices.DEVICES["TITAN X"]
    assert devices.recognized("NVIDIA A100-SXM4-80GB") is devices.DEVICES["A100"]
    assert devices.recognized("NVIDIA GeForce GTX TITAN X") is devices.DEVICES["TITAN X"]
    assert devices.recognized("NVIDIA H200") is devices.DEVICES["H200"]
    assert devices.recognized("Intel(R) Xeon(R) Gold 6134A100x") is None
    with pytest.raises(ValueError, match=r"no device 'H10'; valid: TITAN X, .* and H200; did you mean"):
        devices.find("H10")
    with pytest.raises(ValueError, match="K80 has no rate for bfloat16; it has float32 and float64"):
        devices.find("k80").peak("bfloat16")


# The rule


@given(t_c=st.floats(0, 100), t_p=SMALL)
def test_the_delay_is_the_smallest_that_hides_an_average(t_c: float, t_p: float) -> None:
    d = rule.delay(t_c, t_p)
    assert t_c < d * t_p
    assert d == 1 or t_c >= (d - 1) * t_p
    assert rule.exposed(t_c, t_p, d, rule.period(d)) == 0


@pytest.mark.parametrize(("t_c", "d"), [(0.0, 1), (0.99, 1), (1.0, 2), (1.99, 2), (2.0, 3), (10.0, 11)])
def test_the_rule_is_strict(t_c: float, d: int) -> None:
    assert rule.delay(t_c, 1.0) == d


def test_the_rule_refuses_what_is_no_time() -> None:
    with pytest.raises(ValueError, match=r"0 <= t_c and 0 < t_p, in seconds; got t_c=1\.0, t_p=0\.0"):
        rule.delay(1.0, 0.0)


@pytest.mark.parametrize(("workers", "seconds"), [(8, 0.3264), (32, 1.3056), (256, 10.4448)])
def test_first_order_transfer_by_hand(workers: int, seconds: float) -> None:
    """m·n_p·4 / BW: 25.5 M parameters over 20 Gbit/s."""
    assert rule.transferring(workers, PARAMETERS, GBIT20) == pytest.approx(seconds)


def paper(workers: int, rate: float = GBIT20, algorithm: str = "butterfly", unit: float = 0.256) -> Cluster:
    """Servers of 8 on PCIe 3.0, Ethernet between them, no latencies: the paper's cluster."""
    return Cluster(
        "paper",
        "paper",
        workers,
        (Group(workers, 8, 1.0, Compute(unit), Link(rate, 0.0)),),
        2 / 3,
        Link(PCIE, 0.0),
        Allreduce(algorithm),
        ShardService(1e15, 0.0),
    )


@pytest.mark.parametrize("workers", [8, 32, 256])
def test_trees_and_butterflies_by_hand(workers: int) -> None:
    """h·t and 2·h·t: three levels over PCIe, ⌈log2 (m/8)⌉ over Ethernet."""
    size = 4 * PARAMETERS
    butterfly = 3 * size / PCIE + ceil(log2(workers / 8)) * size / GBIT20
    model = Model((PARAMETERS,))
    assert Forms(paper(workers), model).averaging == pytest.approx(butterfly)
    assert Forms(paper(workers, algorithm="tree"), model).averaging == pytest.approx(2 * butterfly)


def test_figure_4_by_hand() -> None:
    """6 iterations, τ = 3, an average as long as a step: 6 + 6, 6 + 2 and 6."""
    link = Link(4.0, 0.0)  # a butterfly of two hosts sends one parameter's four bytes in a second
    cluster = replace(paper(2, algorithm="butterfly", unit=1.0), backward=0.0)
    cluster = replace(cluster, groups=(replace(cluster.groups[0], per_host=1, link=link),))
    forms = Forms(cluster, Model((1,)))
    steps = 6
    mini, local, delayed = (forms.of(plan) for plan in (BSP(), LocalSGD(3), DaSGD(3, 2)))
    # An exchange of words takes longer than an average of one parameter here.
    t_c = forms.averaging
    assert steps * mini.seconds == pytest.approx(6 + 6 * t_c)
    assert steps * local.seconds == pytest.approx(6 + 2 * t_c)
    for t_c, plan, seconds in ((1.0, (0, 1), 12), (1.0, (0, 3), 8), (0.999, (1, 3), 6)):
        assert steps * (1 + rule.exposed(t_c, 1.0, *plan)) == pytest.approx(seconds)
    assert delayed.seconds < local.seconds < mini.seconds


# CIFAR versions have other parameters; what counts is the table's shape: TABLE I's models, those of ImageNet.
MODELS = {"GoogLeNet": (6.8e6, 1.5e9), "VGG-16": (138e6, 15.5e9), "ResNet-50": (25.5e6, 4.1e9)}


@pytest.mark.parametrize("algorithm", ["tree", "butterfly"])
@pytest.mark.parametrize("model", MODELS)
def test_table_2s_shape(algorithm: str, model: str) -> None:
    """TITAN X on 20 Gbit/s and K80 on 10 Gbit/s, 8 in a server, to 256 workers; a batch of 32, an efficiency
    of 1, a step of three times the forward multiply-adds, two operations each."""
    parameters, adds = MODELS[model]
    table: dict[tuple[str, int], tuple[float, float, int]] = {}
    for name, flops, rate in (("TITAN X", TITAN_X, GBIT20), ("K80", K80, GBIT10)):
        t_p = rule.computing(32, 3 * 2 * adds, flops)
        for workers in (8, 16, 32, 64, 128, 256):
            cluster = paper(workers, rate, algorithm, t_p)
            t_c = Forms(cluster, Model((int(parameters),))).averaging
            table[name, workers] = t_p, t_c, rule.delay(t_c, t_p)
    print(f"{model}, {algorithm}, batch 32, efficiency 1")
    for (name, workers), (t_p, t_c, d) in table.items():
        print(f"  {name:8} m {workers:3}  t_p {1e3 * t_p:6.1f} ms  t_c {1e3 * t_c:7.1f} ms  d {d}")
    for workers in (16, 32, 64, 128, 256):
        assert table["K80", workers][1] > table["TITAN X", workers][1]
        assert table["K80", workers][2] >= table["TITAN X", workers][2]
    for name in ("TITAN X", "K80"):
        times = [table[name, workers][1] for workers in (8, 16, 32, 64, 128, 256)]
        assert times == sorted(times)
    if model != "VGG-16" and algorithm == "butterfly":
        assert table["TITAN X", 256][2] <= 2  # "can be completely parallel if the delay is 1 or 2"


def test_figure_7() -> None:
    """Weak scaling: ResNet-50, 64 samples on each of up to 256 TITAN X, butterfly."""
    model = Model(equal(PARAMETERS, 161))
    t_p = rule.computing(64, 24.6e9, TITAN_X)
    rows: dict[str, list[float]] = {"mini-batch": [], "bsp": [], "local": [], "dasgd": []}
    for workers in (8, 16, 32, 64, 128, 256):
        forms = Forms(paper(workers, unit=t_p), model)
        d = rule.delay(forms.averaging, forms.computing)
        assert d == 1
        rows["mini-batch"].append(forms.without_overlap())  # as in the paper
        rows["bsp"].append(forms.of(BSP()).seconds)  # with buckets, as in practice
        rows["local"].append(forms.of(LocalSGD(rule.period(d))).seconds)
        rows["dasgd"].append(forms.of(DaSGD(rule.period(d), d)).seconds)
    assert rows["dasgd"] == pytest.approx([t_p] * 6)
    for name in ("mini-batch", "bsp", "local"):
        assert rows[name] == sorted(set(rows[name]))  # grows
    for mini, bsp, local, delayed in zip(*rows.values(), strict=True):
        assert delayed < local < mini
        assert delayed < bsp < mini
    # An epoch's time falls as workers are added.
    epochs = [Forms(paper(m, unit=t_p), model).of(BSP()).epoch(1_281_167, 64) for m in (8, 64, 256)]
    assert epochs == sorted(epochs, reverse=True)


def test_the_preset_of_figure_7_is_this_cluster() -> None:
    found = preset("ethernet-256")
    assert found.groups[0].compute.unit == pytest.approx(rule.computing(64, 24.6e9, TITAN_X), rel=0.001)


# Distributions


LOGNORMAL = Compute(0.1, "lognormal", 0.4)
SAMPLES = Compute(0.2, "samples", samples=(0.1, 0.1, 0.2, 0.4))


@pytest.mark.parametrize("compute", [LOGNORMAL, SAMPLES], ids=["lognormal", "samples"])
@pytest.mark.parametrize("workers", [2, 8, 64])
def test_the_slowest_of_many(compute: Compute, workers: int) -> None:
    rng = numpy.random.default_rng(0)
    if compute.kind == "samples":
        drawn = rng.choice(compute.samples, (40_000, workers))
    else:
        drawn = compute.unit * numpy.exp(0.4 * rng.standard_normal((40_000, workers)) - 0.08)
    one = spread_of(compute)
    assert one.mean == pytest.approx(compute.unit, rel=1e-6)
    assert mean_of_slowest([(one, workers)]) == pytest.approx(drawn.max(1).mean(), rel=0.006)
    sums = drawn[:39_999].reshape(-1, 3, workers).sum(1)
    assert mean_of_slowest([(one.sum(3), workers)]) == pytest.approx(sums.max(1).mean(), rel=0.01)


def test_the_slowest_of_two_kinds_by_hand() -> None:
    fair = spread_of(Compute(2.0, "samples", samples=(1.0, 3.0)))
    steady = spread_of(Compute(2.5))
    assert mean_of_slowest([(fair, 2), (steady, 1)]) == pytest.approx(0.25 * 2.5 + 0.75 * 3, rel=0.002)


def test_slowdown_grows_with_the_workers() -> None:
    assert slowdown(Compute(0.1), 1000) == 1
    found = [slowdown(LOGNORMAL, n) for n in (1, 2, 4, 64, 1024)]
    assert found == sorted(found)
    assert found[0] == pytest.approx(1, abs=1e-4)
