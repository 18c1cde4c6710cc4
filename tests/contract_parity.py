"""Identities between protocols, and parity with what is not ours: plain PyTorch, DDP, slow references."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import scripts
from tests.reference import Phase, text, train
from tests.scripts import Result, Setup


def apart(one: Tensor, two: Tensor) -> float:
    return float((one - two).abs().max())


def same_traces(one: Sequence[Result], two: Sequence[Result], bound: float = 0.0) -> None:
    """Every rank's every step is the same in two runs."""
    for a, b in zip(one, two, strict=True):
        assert len(a.trace) == len(b.trace) > 0
        for step, (x, y) in enumerate(zip(a.trace, b.trace, strict=True), 1):
            assert apart(x, y) <= bound, f"rank {a.rank}, step {step}"


def all_hold_the_same(found: Sequence[Result]) -> None:
    """The same model and optimizer state on every rank, to the bit."""
    for other in found[1:]:
        assert torch.equal(other.final, found[0].final)
        assert other.counters == found[0].counters
        for a, b in zip(found[0].slots, other.slots, strict=True):
            assert a.keys() == b.keys()
            for key in a:
                assert torch.equal(torch.as_tensor(a[key]), torch.as_tensor(b[key])), key
        assert (other.units, other.clock) == (found[0].units, found[0].clock)
    assert all(one.done for one in found)


def as_reference(
    found: Sequence[Result], setup: Setup, phases: Sequence[Phase], bound: float = 1e-12, **more: Any
) -> None:
    """Every rank's every step, and the final optimizer state, is the slow loop's."""
    assert setup.total is not None
    want = train(phases, setup.total, len(found), setup.parts, **more)
    for rank, one in enumerate(found):
        assert one.units == want.units
        assert len(one.trace) == len(want.trace), (one.units, setup.plan)
        for step, (got, rows) in enumerate(zip(one.trace, want.trace, strict=True), 1):
            assert apart(got, rows[rank]) <= bound, f"{setup.plan}: rank {rank}, step {step}"
        for got_row, want_row in zip(one.slots, want.slots[rank], strict=True):
            for key, value in want_row.items():
                if isinstance(value, Tensor):
                    assert apart(got_row[key], value) <= bound, f"{setup.plan}: rank {rank}, state {key}"
    all_hold_the_same(found)


LEGAL = [(period, delay) for period in range(1, 7) for delay in range(period)]
MERGES = ("mix", "delta")

SWITCHED = [
    (Phase("bsp", end=0.25), Phase("dasgd", 4, 2)),
    (Phase("bsp", end=7), Phase("local", 3)),
    (Phase("local", 3, end=10), Phase("bsp")),
    (Phase("dasgd", 4, 3, end=10), Phase("bsp")),
    (Phase("dasgd", 4, 3, merge="delta", end=0.5), Phase("dasgd", 3, 2)),
    (Phase("local", 4, end=0.25), Phase("bsp", end=0.5), Phase("dasgd", 3, 1)),
    (
        Phase("local", 3, end=5),
        Phase("bsp", end=15),
        Phase("dasgd", 5, 3, 0.5, "delta", end=27),
        Phase("local", 2),
    ),
    (Phase("bsp", end=0.0), Phase("local", 2)),
    (Phase("dasgd", 2, 1, end=2), Phase("dasgd", 2, 1, end=4), Phase("dasgd", 2, 1)),
]


class Parity:
    def test_dasgd_without_delay_and_share_is_localsgd(self, engine: Any) -> None:
        for period in (1, 3):
            base = Setup(total=26, momentum=0.9)
            local = engine.run(2, scripts.train, replace(base, plan=f"local({period})"))
            dasgd = engine.run(2, scripts.train, replace(base, plan=f"dasgd({period},0,0)"))
            same_traces(local, dasgd)

    @pytest.mark.parametrize("workers", [2, 3])
    def test_localsgd_of_period_1_is_bsp(self, engine: Any, workers: int) -> None:
        base = Setup(total=15 * workers)
        bsp = engine.run(workers, scripts.train, replace(base, plan="bsp"))
        local = engine.run(workers, scripts.train, replace(base, plan="local(1)"))
        for a, b in zip(bsp, local, strict=True):
            assert apart(a.final, b.final) <= 1e-12
            parameters = a.parameters.numel()
            for x, y in zip(a.trace, b.trace, strict=True):
                assert apart(x[:parameters], y[:parameters]) <= 1e-12

    def test_one_worker_is_plain_pytorch_to_the_bit(self, engine: Any) -> None:
        plans = [
            "bsp",
            "local(3)",
            "dasgd(4,2)",
            "dasgd(3,1,0.5,delta)",
            "bsp:25% dasgd(2,1)",
            "local:5u bsp",
        ]
        setups = [
            Setup(plan, 14, model, optimizer, momentum=0.9, decay=0.01, dtype=torch.float32)
            for plan in plans
            for model, optimizer in (("mlp", "sgd"), ("dropout", "sgd"), ("dropout", "adam"))
        ]
        (found,) = engine.run(1, scripts.one_worker_pairs, setups)
        for own, plain_own, dealt, plain_dealt in found:
            same_traces([own], [plain_own])
            same_traces([dealt], [plain_dealt])
            assert own.units == own.clock == 14

    @pytest.mark.parametrize("end", ["0%", "1u", "5u", "50%", "75%", "24u"])
    def test_a_switch_from_bsp_to_bsp_changes_no_parameter(self, engine: Any, end: str) -> None:
        base = Setup(total=24, momentum=0.9)
        plain = engine.run(2, scripts.train, base)
        switched = engine.run(2, scripts.train, replace(base, plan=f"bsp:{end} bsp"))
        for a, b in zip(plain, switched, strict=True):
            size = a.parameters.numel()
            assert [torch.equal(x[:size], y[:size]) for x, y in zip(a.trace, b.trace, strict=True)] == [
                True
            ] * 12

    @pytest.mark.parametrize("workers", [2, 3])
    @pytest.mark.parametrize("optimizer", ["sgd", "nesterov", "adam"])
    def test_bsp_is_its_reference(self, engine: Any, workers: int, optimizer: str) -> None:
        # Adam would make much of the rounding in the zero gradient of a bias before BatchNorm.
        model = "plain" if optimizer == "adam" else "mlp"
        setup = Setup("bsp", 10 * workers - 1, model, optimizer, momentum=0.9, decay=0.01)
        as_reference(engine.run(workers, scripts.train, setup), setup, [Phase("bsp")])

    @pytest.mark.parametrize("workers", [2, 3])
    def test_localsgd_is_its_reference(self, engine: Any, workers: int) -> None:
        plans = [[Phase("local", period)] for period in range(1, 7)]
        self.sweep(engine, workers, plans, totals=(7, 12, 13 * workers + 1))

    @pytest.mark.parametrize("workers", [2, 3])
    @pytest.mark.parametrize("merge", MERGES)
    def test_dasgd_is_its_reference_for_every_legal_delay(
        self, engine: Any, workers: int, merge: str
    ) -> None:
        plans = [[Phase("dasgd", period, delay, 0.25, merge)] for period, delay in LEGAL]
        self.sweep(engine, workers, plans, totals=(9 * workers,))

    @pytest.mark.parametrize("merge", MERGES)
    def test_dasgd_drains_an_average_under_way_at_the_end(self, engine: Any, merge: str) -> None:
        plans = [[Phase("dasgd", 5, delay, 0.5, merge)] for delay in range(5)]
        self.sweep(engine, 2, plans, totals=tuple(range(10, 21, 2)))

    @pytest.mark.parametrize("workers", [2, 3])
    def test_switches_are_their_reference(self, engine: Any, workers: int) -> None:
        self.sweep(engine, workers, [list(plan) for plan in SWITCHED], totals=(33,))

    def test_adam_under_local_protocols_is_its_reference(self, engine: Any) -> None:
        plans = [[Phase("local", 3)], [Phase("local", 3, end=10), Phase("bsp")], [Phase("dasgd", 4, 2)]]
        for optimizer in ("adam", "rmsprop"):
            self.sweep(engine, 2, plans, totals=(22,), model="plain", optimizer=optimizer)

    @pytest.mark.slow
    @pytest.mark.parametrize("workers", [2, 3, 4])
    def test_every_plan_is_its_reference_at_every_total(self, engine: Any, workers: int) -> None:
        plans = [[Phase("dasgd", p, d, 0.3, m)] for p, d in LEGAL for m in MERGES]
        plans += [[Phase("bsp", end=5), Phase("dasgd", p, d, end=0.75), Phase("local", 2)] for p, d in LEGAL]
        self.sweep(engine, workers, plans, totals=(23, 40), timeout=300)

    @staticmethod
    def sweep(
        engine: Any,
        workers: int,
        plans: Sequence[Sequence[Phase]],
        totals: Sequence[int],
        bound: float = 1e-12,
        timeout: float = 60,
        **settings: Any,
    ) -> None:
        base = partial(Setup, momentum=0.9, **settings)
        jobs = [(phases, base(text(phases), total)) for phases in plans for total in totals]
        found = engine.run(workers, scripts.sweep, [setup for _, setup in jobs], timeout=timeout)
        for (phases, setup), row in zip(jobs, zip(*found, strict=True), strict=True):
            as_reference(row, setup, phases, bound)
