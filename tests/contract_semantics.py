"""DESIGN 4.1 to 4.9, each by name: the semantics that are easy to get wrong."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests import scripts
from tests.contract_parity import all_hold_the_same, apart, as_reference, same_traces
from tests.reference import Phase, text, train
from tests.scripts import Setup

EACH = ["bsp", "local(3)", "dasgd(4,2)", "bsp:25% dasgd(3,1)", "local(3):50% bsp"]


class Semantics:
    # 4.1 Learning rate

    @pytest.mark.parametrize(("reference", "factor"), [("global", 1), ("worker", 3)])
    def test_lr_reference_multiplies_bsp_only(self, engine: Any, reference: str, factor: int) -> None:
        phases = [Phase("bsp", end=0.5), Phase("local", 2)]
        setup = Setup(text(phases), 36, lr=0.02, momentum=0.5, options={"lr_reference": reference})
        found = engine.run(3, scripts.train, setup)
        expected = [0.02 * factor] * 6 + [0.02] * 6
        for one in found:
            assert [lr for lr, _ in one.used] == pytest.approx(expected, rel=1e-12)
        as_reference(
            found,
            setup,
            phases,
            hyper=lambda units, clock, phase: (0.02 * (factor if phase.kind == "bsp" else 1), 0.5),
        )

    def test_warmup_raises_the_factor_from_one(self, engine: Any) -> None:
        setup = Setup("bsp", 40, lr=0.01, options={"lr_reference": "worker", "warmup": 0.5})
        expected = [0.01 * (1 + min(2 * k / 20, 1.0)) for k in range(20)]
        for one in engine.run(2, scripts.train, setup):
            assert [lr for lr, _ in one.used] == pytest.approx(expected, rel=1e-12)

    @pytest.mark.parametrize("name", ["step", "cosine", "onecycle", "sequential"])
    def test_torch_schedulers_have_ddps_trace_under_every_plan(self, engine: Any, name: str) -> None:
        steps = 20
        parameter = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([parameter], lr=0.05, momentum=0.9)
        schedule, expected = scripts.schedule_of(name, optimizer, steps), []
        for _ in range(steps):
            expected.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        for plan in EACH:
            setup = Setup(plan, 2 * steps, momentum=0.9)
            for rows in engine.run(2, scripts.scheduled, setup, name, steps, None):
                assert [units for units, _ in rows] == list(range(0, 40, 2))
                assert [lr for _, lr in rows] == pytest.approx(expected, rel=1e-12), plan

    @pytest.mark.parametrize("workers", [1, 2, 3])
    def test_a_scheduler_is_a_function_of_units_whatever_the_workers(self, engine: Any, workers: int) -> None:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.05)
        schedule, trace = scripts.schedule_of("cosine", optimizer, 10), []
        for _ in range(11):
            trace.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        for plan in ("bsp", "dasgd(3,2)", "bsp:7u local(2)"):
            for rows in engine.run(workers, scripts.scheduled, Setup(plan, 40), "cosine", 10, 10):
                for units, lr in rows:
                    assert lr == pytest.approx(trace[units * 10 // 40], rel=1e-12), (plan, units)

    def test_a_shape_is_a_function_of_progress(self, engine: Any) -> None:
        for plan in EACH:
            for units, one in engine.run(2, scripts.shaped, Setup(plan, 31)):
                expected = [0.05 * scripts.half_cosine(u / 31) for u in units]
                assert [lr for lr, _ in one.used] == pytest.approx(expected, rel=1e-12)

    # 4.2 Momentum at a switch

    @pytest.mark.parametrize("policy", ["keep", "zero", "scale", "ramp"])
    def test_momentum_policy_at_a_switch_from_bsp(self, engine: Any, policy: str) -> None:
        total, switch = 80, 20
        phases = [Phase("bsp", end=switch), Phase("local", 3)]

        def beta(units: int) -> float:
            if units < switch:
                return 0.9
            rising = min((units - switch) / total / 0.05, 1.0)
            return 0.9 * {"keep": 1.0, "zero": 0.0, "scale": 0.5, "ramp": rising}[policy]

        setup = Setup(text(phases), total, lr=0.02, momentum=0.9, options={"momentum": policy})
        found = engine.run(2, scripts.train, setup)
        for one in found:
            expected = [beta(units) for units in range(0, total, 2)]
            assert [m for _, m in one.used] == pytest.approx(expected, rel=1e-12)
        as_reference(found, setup, phases, hyper=lambda units, clock, phase: (0.02, beta(units)))

    def test_momentum_policy_leaves_plans_without_bsp_alone(self, engine: Any) -> None:
        setup = Setup("local(2):50% dasgd(3,1)", 24, momentum=0.9, options={"momentum": "zero"})
        for one in engine.run(2, scripts.train, setup):
            assert {m for _, m in one.used} == {0.9}

    # 4.3 Optimizer state

    @pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw", "rmsprop"])
    def test_settle_averages_optimizer_state(self, engine: Any, optimizer: str) -> None:
        phases = [Phase("local", 4, end=10), Phase("bsp", end=16), Phase("local", 5)]
        setup = Setup(text(phases), 26, "plain", optimizer, lr=0.01, momentum=0.9)
        as_reference(engine.run(2, scripts.train, setup), setup, phases, bound=1e-11)

    @pytest.mark.parametrize("optimizer", ["sgd", "adam"])
    def test_settle_counts_a_missing_state_as_zero_but_its_steps(self, engine: Any, optimizer: str) -> None:
        phases = [Phase("local", 3, end=10), Phase("bsp")]
        setup = Setup(text(phases), 20, "branches", optimizer, lr=0.01, momentum=0.9)
        found = engine.run(2, scripts.train, setup, scripts.lonely)
        as_reference(found, setup, phases, loss=scripts.lonely, bound=1e-11)
        for one in found:
            assert [len(row) > 0 for row in one.slots] == [True] * 6 + [False] * 2

    # 4.4 Buffers

    @pytest.mark.parametrize("plan", ["bsp", "local(3)", "dasgd(4,1)"])
    def test_buffers_are_averaged_with_parameters_and_never_in_between(self, engine: Any, plan: str) -> None:
        setup = Setup(plan, 22, momentum=0.9)
        found = engine.run(2, scripts.train, setup)
        size = found[0].parameters.numel()
        same = [torch.equal(a[size:], b[size:]) for a, b in zip(found[0].trace, found[1].trace, strict=True)]
        landed = {"bsp": [], "local(3)": [3, 6, 9], "dasgd(4,1)": []}[plan]
        assert [step for step, equal in enumerate(same, 1) if equal] == [*landed, 11]

    def test_counters_of_batchnorm_count_steps(self, engine: Any) -> None:
        for plan in EACH:
            for one in engine.run(2, scripts.train, Setup(plan, 22)):
                assert one.counters == [11]

    # 4.5 Counting

    @pytest.mark.parametrize("plan", ["bsp", "local(2)", "dasgd(3,1)", "bsp:25% dasgd(2,1)"])
    def test_gradient_accumulation_cannot_change_when_an_average_happens(
        self, engine: Any, plan: str
    ) -> None:
        setup = Setup(plan, 22, "plain", momentum=0.9)
        whole = engine.run(2, scripts.train, setup)
        for pieces in (2, 4):
            found = engine.run(2, scripts.accumulated, setup, pieces)
            same_traces(whole, found, 1e-12)
            all_hold_the_same(found)
            assert found[0].units == whole[0].units

    @pytest.mark.parametrize("plan", ["bsp", "local(2)", "dasgd(3,1)"])
    def test_micro_batches_of_batches_are_one_unit(self, engine: Any, plan: str) -> None:
        setup = Setup(plan, 22, "plain", momentum=0.9)
        whole = engine.run(2, scripts.dealt, setup, 24, 4)
        cut = engine.run(2, scripts.dealt, setup, 24, 4, 2)
        for a, b in zip(whole, cut, strict=True):
            assert (a.units, a.clock) == (b.units, b.clock)
            assert [
                one + two for one, two in zip(b.notes["seen"][::2], b.notes["seen"][1::2], strict=True)
            ] == a.notes["seen"]
            for x, y in zip(a.trace, b.trace[1::2], strict=True):
                assert apart(x, y) <= 1e-12

    @pytest.mark.parametrize("plan", ["bsp", "local(2)", "dasgd(3,1)", "local(3):50% bsp"])
    @pytest.mark.parametrize("how", ["groups", "optimizers"])
    def test_several_groups_or_optimizers_count_as_one_step(self, engine: Any, plan: str, how: str) -> None:
        setup = Setup(plan, 22, momentum=0.9)
        one, several = engine.run(2, scripts.train, setup), engine.run(2, scripts.divided, setup, how)
        same_traces(one, several)
        assert several[0].units == one[0].units

    # 4.6 GradScaler

    @pytest.mark.parametrize("plan", ["bsp", "local(3)", "dasgd(4,2)", "bsp:25% local(2)"])
    def test_a_scaler_that_skips_nothing_changes_nothing(self, engine: Any, plan: str) -> None:
        setup = Setup(plan, 24, momentum=0.9, dtype=torch.float32)
        same_traces(engine.run(2, scripts.train, setup), engine.run(2, scripts.scaled, setup, None), 1e-7)

    @pytest.mark.parametrize("phase", [Phase("local", 3), Phase("local", 4), Phase("dasgd", 4, 2)])
    def test_a_skipped_step_on_one_rank_ticks_its_clock_and_takes_part(
        self, engine: Any, phase: Phase
    ) -> None:
        setup = Setup(phase.text, 22, "mlp", momentum=0.9, dtype=torch.float32)
        found = engine.run(2, scripts.scaled, setup, (1, 4))
        as_reference(found, setup, [phase], bound=2e-6, skip=scripts.skips_one)
        assert [one.clock for one in found] == [11, 11]

    @pytest.mark.parametrize(("plan", "landed"), [("local(3)", 6), ("dasgd(4,2)", 10), ("local(20)", 11)])
    def test_averages_and_settle_take_the_smallest_scale(self, engine: Any, plan: str, landed: int) -> None:
        setup = Setup(plan, 22, momentum=0.9, dtype=torch.float32)
        zero, one = (r.notes["scales"] for r in engine.run(2, scripts.scaled, setup, (1, 4)))
        assert one == [1024.0] * 4 + [512.0] * 7
        assert zero == [1024.0] * (landed - 1) + [512.0] * (12 - landed)

    def test_under_bsp_an_infinite_gradient_skips_the_step_on_all(self, engine: Any) -> None:
        setup = Setup("bsp", 22, momentum=0.9, dtype=torch.float32)
        found = engine.run(2, scripts.scaled, setup, (1, 4))
        as_reference(found, setup, [Phase("bsp")], bound=2e-6, skip=lambda rank, step: step == 4)
        for one in found:
            assert one.notes["scales"] == [1024.0] * 4 + [512.0] * 7

    # 4.8 Parameters without a gradient

    @pytest.mark.parametrize("workers", [2, 3])
    @pytest.mark.parametrize("optimizer", ["sgd", "adam"])
    def test_unused_parameters_count_as_zero_in_the_mean(
        self, engine: Any, workers: int, optimizer: str
    ) -> None:
        setup = Setup("bsp", 10 * workers, "branches", optimizer, momentum=0.9, decay=0.1)
        found = engine.run(workers, scripts.train, setup, scripts.branching)
        as_reference(found, setup, [Phase("bsp")], loss=scripts.branching)

    def test_parameters_unused_on_all_ranks_keep_no_gradient(self, engine: Any) -> None:
        setup = Setup("bsp", 20, "branches", momentum=0.9)
        for rows in engine.run(2, scripts.branch_gradients, setup):
            for step, row in enumerate(rows):
                both = [True] * 4
                if step % 3 == 0:
                    both = [step % 2 == 0] * 2 + [step % 2 == 1] * 2
                assert row == [True, True, *both, False, False]
        for one in engine.run(2, scripts.train, setup, scripts.branching):
            assert one.slots[-2:] == [{}, {}]

    @pytest.mark.parametrize("phases", [[Phase("local", 3)], [Phase("local", 2, end=8), Phase("bsp")]])
    def test_unused_parameters_under_local_protocols(self, engine: Any, phases: list[Phase]) -> None:
        setup = Setup(text(phases), 22, "branches", momentum=0.9, decay=0.1)
        found = engine.run(2, scripts.train, setup, scripts.branching)
        as_reference(found, setup, phases, loss=scripts.branching)

    @pytest.mark.parametrize("workers", [2, 3])
    def test_replicas_under_bsp_are_equal_to_the_bit_at_every_step(self, engine: Any, workers: int) -> None:
        for model, loss in (("branches", scripts.branching), ("pictures", scripts.usual)):
            setup = Setup("bsp", 12 * workers, model, momentum=0.9, dtype=torch.float32)
            found = engine.run(workers, scripts.train, setup, loss)
            size = found[0].parameters.numel()
            for other in found[1:]:
                for a, b in zip(found[0].trace, other.trace, strict=True):
                    assert torch.equal(a[:size], b[:size])

    # 4.9 Merging late

    def test_a_merge_with_delta_loses_no_local_step(self, engine: Any) -> None:
        """With keep=0 the workers' mean moves by the mean of all local steps, as if nothing was merged."""
        lr, total = 0.05, 16
        setup = Setup("dasgd(4,3,0,delta)", total, "linear", lr=lr)
        found = engine.run(2, scripts.train, setup)
        want = train([Phase("dasgd", 4, 3, 0.0, "delta")], total, 2, setup.parts)
        for step, rows in enumerate(want.trace):
            got = torch.stack([one.trace[step] for one in found])
            assert apart(got, torch.stack(rows)) <= 1e-12

    def test_delay_zero_merges_before_the_next_gradient(self, engine: Any) -> None:
        phases = [Phase("dasgd", 3, 0, 0.4)]
        setup = Setup(phases[0].text, 18, momentum=0.9)
        as_reference(engine.run(2, scripts.train, setup), setup, phases)

    def test_bf16_on_the_wire_is_close_and_replicas_are_equal(self, engine: Any) -> None:
        for plan in (
            "bsp",
            "local(3)",
            "dasgd(4,2)",
            "dasgd(4,2,0.25,delta)",
            "bsp:25% dasgd(3,1)",
            "local(2):50% bsp",
        ):
            setup = Setup(plan, 60, momentum=0.9, dtype=torch.float32, lr=0.02)
            full = engine.run(2, scripts.train, setup)
            narrow = engine.run(2, scripts.train, replace(setup, options={"wire": "bf16"}))
            all_hold_the_same(narrow)
            moved = apart(full[0].trace[0], full[0].final)
            assert 0 < apart(full[0].final, narrow[0].final) <= 0.02 * moved, plan
            assert math.isfinite(float(narrow[0].final.sum()))
