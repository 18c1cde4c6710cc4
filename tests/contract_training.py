"""What a training loop does besides: evaluation of the mean, clipping, precision, unusual models, the
journal; and that units are dealt exactly."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import offbeat
from offbeat import journal
from tests import scripts, scripts_endings
from tests.contract_parity import all_hold_the_same, apart, as_reference, same_traces
from tests.reference import Phase, text
from tests.scripts import Setup

EACH = ["bsp", "local(3)", "dasgd(4,2)", "dasgd(4,3,0.5,delta)", "bsp:25% dasgd(3,1)", "local(3):50% bsp"]

FIELDS = {
    "run": {"started", "script", "argv", "plan", "total", "seed", "workers", "device", "backend", "wire"}
    | {"lr_reference", "momentum", "parameters", "host", "versions"},
    "data": {"batch_size", "micro_batches", "samples"},
    "ledger": {"units", "pending", "used"},
    "start": {"import_ms", "rendezvous_ms", "broadcast_ms"},
    "phase": {"protocol", "units", "progress"},
    "switch": {"from", "to", "units", "progress", "drain_ms", "settle_ms", "transfer_ms"},
    "step": {"protocol", "clock", "units", "progress", "loss", "lr"},
    "workers": {"workers"},
    "evaluation": {"units", "progress", "values"},
    "end": {"seconds", "units", "samples", "samples_per_s", "waiting", "loss"},
}


class Training:
    @pytest.mark.parametrize("plan", EACH)
    def test_consensus_is_the_mean_restores_to_the_bit_and_changes_nothing(
        self, engine: Any, plan: str
    ) -> None:
        setup = Setup(plan, 22, momentum=0.9)
        plain = engine.run(2, scripts.train, setup)
        found = engine.run(2, scripts.consenting, setup, range(1, 11))
        same_traces(plain, found)
        all_hold_the_same(found)
        for one, two in zip(found[0].notes["consensus"], found[1].notes["consensus"], strict=True):
            mean = (one[0] + two[0]) / 2
            for before, inside, after in (one, two):
                assert apart(inside, mean) <= 1e-12
                assert torch.equal(before, after)

    @pytest.mark.parametrize("plan", ["bsp", "local(3)", "dasgd(4,2)", "bsp:50% dasgd(2,1)"])
    @pytest.mark.parametrize(("workers", "total"), [(2, 40), (3, 40), (2, 7)])
    def test_every_is_the_same_on_all_and_often_enough(
        self, engine: Any, plan: str, workers: int, total: int
    ) -> None:
        texts = ["5%", "7u", "25%", "100%", "30%"]
        found = engine.run(workers, scripts.asking, Setup(plan, total), texts)
        steps = -(-total // workers)
        for rows in found:
            assert rows == found[0]
            for words, share in (("5%", 0.05 * total), ("7u", 7.0), ("25%", total / 4), ("100%", total)):
                crossed = [
                    units
                    for units in range(workers, workers * steps + 1, workers)
                    if units == workers * steps  # the end
                    or int(units / share + 1e-9) > int((units - workers) / share + 1e-9)
                ]
                assert rows[words] == crossed, (words, plan)
            assert rows["100%"] == [workers * steps]

    @pytest.mark.parametrize("plan", ["bsp", "local(2)", "dasgd(3,1)", "bsp:50% local(2)"])
    def test_clipping_sees_the_gradient_that_the_protocol_promised(self, engine: Any, plan: str) -> None:
        found = engine.run(2, scripts.gradients, Setup(plan, 24), 0.3)
        for step, (one, two) in enumerate(zip(*found, strict=True)):
            averaged = plan == "bsp" or (plan.startswith("bsp:") and step < 6)
            for own, after, clipped in (one, two):
                want = (one[0] + two[0]) / 2 if averaged else own
                assert apart(after, want) <= 1e-12
                assert apart(clipped, want * min(0.3 / (float(want.norm()) + 1e-6), 1.0)) <= 1e-9

    @pytest.mark.parametrize("phases", [[Phase("bsp")], [Phase("local", 2)], [Phase("dasgd", 3, 1)]])
    def test_autocast_bf16(self, engine: Any, phases: list[Phase]) -> None:
        setup = Setup(text(phases), 22, dtype=torch.float32, momentum=0.9)
        found = engine.run(2, scripts.autocasting, setup)
        as_reference(found, setup, phases, bound=1e-3, loss=scripts.autocast_loss)

    @pytest.mark.parametrize("model", ["checkpoint", "tied", "channels_last", "pictures"])
    @pytest.mark.parametrize(
        "phases", [[Phase("bsp")], [Phase("local", 2, end=0.5), Phase("bsp")], [Phase("dasgd", 3, 1)]]
    )
    def test_unusual_models(self, engine: Any, model: str, phases: list[Phase]) -> None:
        setup = Setup(text(phases), 22, model, momentum=0.9)
        as_reference(engine.run(2, scripts.train, setup), setup, phases)

    def test_reentrant_checkpointing_is_right_or_refused(self, engine: Any) -> None:
        setup = Setup("bsp", 20, "reentrant", momentum=0.9)
        found = engine.outcomes(2, scripts.train, setup)
        if all(isinstance(one, scripts.Result) for one in found):
            as_reference(found, setup, [Phase("bsp")])
        else:
            assert all("use_reentrant=False" in one.message for one in found), found

    @pytest.mark.parametrize("plan", ["bsp", "local(2)", "dasgd(3,1)"])
    def test_two_backwards_before_a_step_add_up(self, engine: Any, plan: str) -> None:
        setup = Setup(plan, 22, "plain", momentum=0.9)
        same_traces(engine.run(2, scripts.train, setup), engine.run(2, scripts.twice, setup), 1e-12)

    @pytest.mark.parametrize("plan", EACH)
    @pytest.mark.parametrize("workers", [1, 2, 3])
    def test_total_is_overshot_by_less_than_one_step_of_all(
        self, engine: Any, plan: str, workers: int
    ) -> None:
        for one in engine.run(workers, scripts.train, Setup(plan, 20, "linear")):
            assert 20 <= one.units < 20 + workers
            assert one.units == one.clock * workers

    @pytest.mark.parametrize(
        ("workers", "settings"), [(1, {}), (2, {}), (3, {}), (2, {"shuffle": False}), (2, {"num_workers": 1})]
    )
    def test_units_are_dealt_exactly_once_per_epoch(
        self, engine: Any, workers: int, settings: dict[str, Any]
    ) -> None:
        found = engine.run(workers, scripts_endings.dealt_with, Setup("local(2)", 18, "linear"), settings)
        steps = len(found[0].notes["seen"])
        units = [one.notes["seen"][step] for step in range(steps) for one in found]
        for epoch in range(len(units) // 6):
            rows = list(itertools.chain(*units[6 * epoch : 6 * epoch + 6]))
            assert Counter(rows) == Counter(range(22))
            assert (rows == list(range(22))) == (settings == {"shuffle": False})
        assert units[:6] != units[6:12] or settings == {"shuffle": False}

    @pytest.mark.parametrize(("workers", "epochs"), [(1, 2), (2, 2), (3, 2), (2, 0.5)])
    def test_epochs_are_passes_over_the_data(self, engine: Any, workers: int, epochs: float) -> None:
        for one in engine.run(
            workers, scripts_endings.until_total, Setup("dasgd(3,1)", model="linear"), 50, 8, epochs
        ):
            assert one.notes["total"] == int(7 * epochs + 0.5)
            assert one.notes["total"] <= one.units < one.notes["total"] + workers

    def test_the_journal_has_the_documented_records(self, engine: Any) -> None:
        setup = Setup("bsp:25% local(2):50% dasgd(3,1)", momentum=0.9)
        found = engine.run(2, scripts_endings.until_total, setup, 50, 8, 4)
        rows = journal.read(Path(engine.out))
        kinds = Counter(row["type"] for row in rows)
        for row in rows:
            assert {"type", "t"} <= row.keys()
            assert row["type"] in FIELDS, row
            assert FIELDS[row["type"]] <= row.keys(), row
        assert kinds["run"] == kinds["end"] == kinds["start"] == kinds["data"] == 1
        assert (kinds["switch"], kinds["phase"]) == (2, 3)
        for row in rows:
            if row["type"] == "switch":
                assert min(row["drain_ms"], row["settle_ms"], row["transfer_ms"]) >= 0
        (end,) = [row for row in rows if row["type"] == "end"]
        seen = sum(len(part) for one in found for part in one.notes["seen"])
        assert (end["samples"], end["units"]) == (seen, 28)
        (run,) = [row for row in rows if row["type"] == "run"]
        assert (run["total"], run["workers"], run["plan"]) == (28, 2, str(offbeat.parse_plan(setup.plan)))
        logged = [row for row in rows if row["type"] == "evaluation"]
        assert len(logged) == len(found[0].notes["seen"])

    def test_the_journal_counts_the_samples_of_uneven_micro_batches(self, engine: Any) -> None:
        found = engine.run(2, scripts.dealt, Setup("local(2)", 14, "plain"), 22, 4, 3)
        (end,) = [row for row in journal.read(Path(engine.out)) if row["type"] == "end"]
        assert end["samples"] == sum(len(part) for one in found for part in one.notes["seen"])

    def test_a_plan_may_be_a_protocol(self, engine: Any) -> None:
        for plan in (offbeat.LocalSGD(3), offbeat.Switch(offbeat.BSP(), offbeat.DaSGD(3, 1), 0.25)):
            setup = Setup(plan, 22, momentum=0.9)
            same_traces(
                engine.run(2, scripts.train, setup),
                engine.run(2, scripts.train, replace(setup, plan=str(plan))),
            )
