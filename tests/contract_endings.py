"""Endings: data of different lengths, loops that stop early, all at once (DESIGN 4.7)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import scripts, scripts_checkpoints, scripts_endings
from tests.contract_parity import all_hold_the_same, apart
from tests.models import loss_of, unit
from tests.scripts import Setup

EACH = [
    "bsp",
    "local(3)",
    "dasgd(4,2)",
    "bsp:50% local(3)",
    "local(3):50% bsp",
    "dasgd(4,3):30% bsp:60% dasgd(2,1)",
]


class Endings:
    @pytest.mark.parametrize("plan", EACH)
    @pytest.mark.parametrize(
        ("lengths", "epochs"),
        [((7, 4), 1), ((3, 8), 2), ((5, 5), 2), ((5, 2, 7), 1), ((3, 3, 6), 2), ((1, 9), 1)],
    )
    def test_uneven_inputs_end_with_one_model_and_exact_units(
        self, engine: Any, plan: str, lengths: tuple[int, ...], epochs: int
    ) -> None:
        found = engine.run(
            len(lengths), scripts_endings.uneven, Setup(plan, None, momentum=0.9), lengths, epochs, timeout=30
        )
        all_hold_the_same(found)
        assert [len(one.trace) for one in found] == [epochs * length for length in lengths]
        assert found[0].units == epochs * sum(lengths)
        assert math.isfinite(float(found[0].final.sum()))

    @pytest.mark.parametrize("lengths", [(7, 4), (3, 8), (5, 2, 7)])
    def test_uneven_bsp_is_the_mean_over_those_that_have_data(
        self, engine: Any, lengths: tuple[int, ...]
    ) -> None:
        setup = Setup("bsp", None, "plain", momentum=0.9)
        found = engine.run(len(lengths), scripts_endings.uneven, setup, lengths, 1)
        model, optimizer = setup.parts()
        for step in range(max(lengths)):
            live = [rank for rank, length in enumerate(lengths) if step < length]
            for rank in live:
                (loss_of(model, *unit(rank, step)) / len(live)).backward()
            optimizer.step()
            optimizer.zero_grad()
            for rank in live:
                assert apart(found[rank].trace[step], scripts.flat(model)) <= 1e-12, (rank, step)
        assert apart(found[0].final, scripts.flat(model)) <= 1e-12

    @pytest.mark.parametrize("plan", ["bsp", "local(3)", "dasgd(4,2)", "bsp:50% dasgd(4,3)"])
    @pytest.mark.parametrize(
        "steps", [(3, None), (None, 5), (0, None), (4, 4), (2, 7), (3, None, 5), (None, 1, 1)]
    )
    def test_loops_that_break_and_close_leave_the_others_going(
        self, engine: Any, plan: str, steps: tuple[int | None, ...]
    ) -> None:
        setup = Setup(plan, 24, momentum=0.9)
        found = engine.run(len(steps), scripts_endings.stops_early, setup, steps, timeout=30)
        all_hold_the_same(found)
        taken = [one.notes["taken"] for one in found]
        assert found[0].units == sum(taken)
        for stop, count in zip(steps, taken, strict=True):
            assert count == stop or stop is None or found[0].units >= 24
        if None in steps:
            assert 24 <= found[0].units < 24 + len(steps)

    def test_a_script_that_ends_without_close_leaves_too(self, engine: Any) -> None:
        for plan in ("bsp", "dasgd(4,2)"):
            zero, one = engine.run(
                2, scripts_endings.forgets_to_close, Setup(plan, 24), (4, None), timeout=30
            )
            assert (zero, one) == (4, 20)

    def test_a_worker_that_left_early_gives_its_steps_to_the_mean(self, engine: Any) -> None:
        """Rank 1 leaves after 4 steps of local(3): its fourth is in the next average."""
        setup = Setup("local(3)", 30, "linear")
        found = engine.run(2, scripts_endings.stops_early, setup, (None, 4))
        replicas = [setup.parts() for _ in range(2)]
        step = 0

        def mean() -> None:
            with torch.no_grad():
                for pair in zip(*(model.parameters() for model, _ in replicas), strict=True):
                    value = sum(pair[1:], pair[0].clone()) / 2
                    for p in pair:
                        p.copy_(value)

        for step in range(26):
            for rank, (model, optimizer) in enumerate(replicas):
                if rank == 0 or step < 4:
                    loss_of(model, *unit(rank, step)).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            if step + 1 in (3, 6):
                mean()
        assert found[0].units == 30
        assert apart(found[0].final, scripts.flat(replicas[0][0])) <= 1e-12

    @pytest.mark.parametrize("plan", ["bsp", "local(3)"])
    def test_evaluation_goes_on_while_a_worker_leaves(self, engine: Any, plan: str) -> None:
        found = engine.run(2, scripts_endings.uneven_with_consensus, Setup(plan, None), (3, 8), timeout=30)
        all_hold_the_same(found)
        assert found[0].units == 11

    @pytest.mark.parametrize("plan", ["bsp", "local(3)", "dasgd(4,2)", "bsp:6u local(3)", "local(2):6u bsp"])
    @pytest.mark.parametrize("leaver", [0, 1])
    def test_saving_goes_on_while_a_worker_leaves(
        self, engine: Any, tmp_path: Path, plan: str, leaver: int
    ) -> None:
        path, script = tmp_path / "job.pt", scripts_checkpoints.saves_while_leaving
        found = engine.run(2, script, Setup(plan, 24), str(path), 3, leaver, timeout=20)
        assert path.is_file()
        all_hold_the_same(found)
        assert found[0].units == 24

    def test_a_synchronizer_that_the_script_lost_still_leaves(self, engine: Any) -> None:
        assert engine.run(2, scripts_endings.lets_go, Setup("bsp", 24), [None, 3], timeout=20) == [21, 3]

    @pytest.mark.parametrize("plan", ["bsp", "local(2)"])
    def test_whoever_left_ends_with_the_job_s_learning_rate(self, engine: Any, plan: str) -> None:
        stayed, left = engine.run(2, scripts_endings.rate_after, Setup(plan, 24), [None, 3], timeout=20)
        assert stayed == left
