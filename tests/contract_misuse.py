"""Wrong use is answered on every rank, by an error that names the user's own value; never by a hang."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests import scripts, scripts_endings
from tests.engines import RemoteError
from tests.scripts import Setup


def wrong(engine: Any, workers: int, setup: Setup, how: str, type: str, *parts: str, env: Any = None) -> None:
    """Every rank raises `type`, and says all `parts`."""
    for one in engine.outcomes(workers, scripts_endings.wrongly, setup, how, env=env, timeout=20):
        assert isinstance(one, RemoteError), one
        assert one.type == type, one
        for part in parts:
            assert part in one.message, one


class Misuse:
    @pytest.mark.parametrize("plan", ["bsp", "local(2)"])
    def test_step_without_backward(self, engine: Any, plan: str) -> None:
        wrong(engine, 2, Setup(plan), "no backward", "RuntimeError", "sync.step()", "backward()")

    def test_only_accumulate_before_a_step_under_bsp(self, engine: Any) -> None:
        wrong(engine, 2, Setup("bsp"), "only accumulate", "RuntimeError", "sync.accumulate()")

    def test_a_wrapped_model(self, engine: Any) -> None:
        wrong(engine, 2, Setup(), "wrapped", "TypeError", "DataParallel", "the model itself")

    def test_different_models_on_ranks(self, engine: Any) -> None:
        wrong(engine, 2, Setup(), "models", "ValueError", "same model", "rank 1")

    def test_different_optimizers_on_ranks(self, engine: Any) -> None:
        wrong(engine, 2, Setup(), "optimizers", "ValueError", "SpySGD", "Adam")

    def test_an_optimizer_with_a_foreign_parameter(self, engine: Any) -> None:
        wrong(engine, 1, Setup(), "foreign", "ValueError", "not the model's")

    def test_lbfgs(self, engine: Any) -> None:
        wrong(engine, 1, Setup(), "lbfgs", "TypeError", "LBFGS")

    @pytest.mark.parametrize(
        ("total", "options", "part"),
        [
            (None, {}, "total="),
            (4, {"epochs": 2}, "epochs="),
            (0, {}, "total=0"),
            (-3, {}, "total=-3"),
            (2.5, {}, "total=2.5"),
            (None, {"epochs": 0}, "epochs=0"),
            (4, {"wire": "int8"}, "'int8'"),
            (4, {"lr_reference": "mine"}, "'mine'"),
            (4, {"momentum": "half"}, "'half'"),
            (4, {"warmup": 2.0}, "2.0"),
        ],
    )
    def test_settings_that_cannot_work(
        self, engine: Any, total: Any, options: dict[str, Any], part: str
    ) -> None:
        wrong(engine, 1, Setup("bsp", total, options=options), "every", "ValueError", part)

    @pytest.mark.parametrize(
        ("plan", "part"),
        [
            ("bps", "bps"),
            ("bsp:120% local", "120%"),
            ("bsp:60% local:40% bsp", "40%"),
            ("dasgd(period=2,delay=2)", "delay=2"),
            ("bsp:9000u local", "9000u"),
            ("local(0)", "period=0"),
        ],
    )
    def test_plans_that_cannot_be_meant(self, engine: Any, plan: str, part: str) -> None:
        wrong(engine, 1, Setup(plan), "every", "PlanError", part)

    def test_a_step_after_the_end(self, engine: Any) -> None:
        wrong(engine, 2, Setup("local(3)", 8), "after the end", "RuntimeError", "8 of 8 units")

    @pytest.mark.parametrize("plan", ["bsp", "local(2)"])
    def test_a_batch_without_a_step(self, engine: Any, plan: str) -> None:
        wrong(engine, 2, Setup(plan), "skipped step", "RuntimeError", "sync.step()", "micro_batches")

    @pytest.mark.parametrize("plan", ["bsp", "local(4)", "dasgd(5,3)"])
    def test_a_consensus_on_one_rank_is_an_error_on_all(self, engine: Any, plan: str) -> None:
        wrong(engine, 2, Setup(plan, 40), "lonely consensus", "RuntimeError", "consensus()", "sync.every")

    def test_a_step_inside_consensus(self, engine: Any) -> None:
        wrong(engine, 2, Setup("local(3)"), "step inside consensus", "RuntimeError", "sync.consensus()")

    def test_a_schedule_that_needs_a_metric(self, engine: Any) -> None:
        wrong(engine, 1, Setup(), "plateau", "TypeError", "ReduceLROnPlateau")

    def test_every_of_another_text(self, engine: Any) -> None:
        wrong(engine, 2, Setup(), "every", "ValueError", "'abc'", "5%")

    def test_a_sparse_gradient(self, engine: Any) -> None:
        wrong(engine, 2, Setup(), "sparse", "TypeError", "sparse")

    def test_what_the_command_line_says_comes_first(self, engine: Any) -> None:
        env = {"OFFBEAT_PLAN": "local(2)", "OFFBEAT_TOTAL": "10"}
        over = engine.run(2, scripts.train, Setup("bsp", 24, momentum=0.9), env=env)
        plain = engine.run(2, scripts.train, replace(Setup("local(2)", 10), momentum=0.9))
        assert [one.units for one in over] == [10, 10]
        assert all((a.final == b.final).all() for a, b in zip(over, plain, strict=True))
