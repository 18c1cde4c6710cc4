"""Asynchronous jobs: units and data, evaluation, checkpoints, leaving, divergence, deaths, misuse."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from offbeat import journal
from tests import scripts, scripts_checkpoints, scripts_endings, scripts_shards
from tests.contract_parity import all_hold_the_same, apart, same_traces
from tests.contract_shards import as_replay, asp, both, bsp, each_of, half, hosts_of, pushes_of, ssp
from tests.engines import Died, RemoteError
from tests.reference import text
from tests.scripts_shards import Job

EACH = ["asp", "ssp(1)", "bsp:30% asp", "asp:40% bsp", "asp:30% ssp(1):60% asp"]


def tickets_of(found: Sequence[Any]) -> list[int]:
    return sorted(ticket for one in found for _, ticket, _ in one.notes["log"].steps)


def once_an_epoch(found: Sequence[Any], samples: int, batch_size: int, total: int) -> None:
    """Every sample as often as there were epochs."""
    epochs, rest = divmod(total, math.ceil(samples / batch_size))
    assert rest == 0
    rows = [row for one in found for unit in one.notes["seen"] for row in unit]
    assert Counter(rows) == dict.fromkeys(range(samples), epochs)
    assert sum(len(one.notes["seen"]) for one in found) == total


def buffers_at(one: Any, when: float) -> torch.Tensor:
    """What it had published last."""
    return [buffers for at, buffers in one.notes["published"] if at < when or at == 0][-1]


def records(engine: Any, kind: str, number: int = 0) -> list[dict[str, Any]]:
    """Of the last run's `number`-th job."""
    jobs: list[list[dict[str, Any]]] = []
    for row in journal.read(Path(engine.out)):
        if row["type"] == "run":
            jobs.append([])
        jobs[-1].append(row)
    return [row for row in jobs[number] if row["type"] == kind]


class Asynchronous:
    # Units and data

    @both
    def test_every_ticket_is_done_once_and_the_fast_do_more(self, engine: Any, wire: bool) -> None:
        plans = ["asp", "ssp(2)", "bsp:9u asp:31u ssp(1)", "asp:1u asp:50u ssp(0)"]
        jobs = [Job(plan, 61, "linear", "torch sgd", slow={0: 0.003, 1: 0.02, 2: 0.003}) for plan in plans]
        jobs += [Job(plan, total, "linear", "torch sgd") for plan in ("asp", "ssp(0)") for total in (1, 2, 5)]
        jobs = half(jobs, wire)
        rows = each_of(engine, 3, [(scripts_shards.train, job) for job in jobs], wire)
        for job, found in zip(jobs, rows, strict=True):
            all_hold_the_same(found)
            assert found[0].units == job.total
            begun = 9 if "bsp" in job.plan else 0
            assert [t for t in tickets_of(found) if t >= begun] == list(range(begun, job.total or 0))
            steps = [len(one.trace) for one in found]
            assert steps[1] < min(steps[0], steps[2]) or not job.slow or "ssp(0)" in job.plan

    @both
    def test_every_sample_once_an_epoch(self, engine: Any, tmp_path: Path, wire: bool) -> None:
        path, calls = str(tmp_path / "job.pt"), []
        for plan in ("asp", "ssp(1)", "asp:20u ssp(1):45u asp", "bsp:12u asp:36u bsp"):
            job = Job(plan, 60, "plain", "torch sgd", slow={2: 0.002})
            for how, micro, every in (("tensors", 1, "40%"), ("plain", 2, "")):
                calls.append((scripts_shards.dealt, job, 24, 4, micro, how, every, path))
        for found in each_of(engine, 3, half(calls, wire), wire):
            all_hold_the_same(found)
            once_an_epoch(found, 24, 4, 60)

    @both
    def test_every_sample_once_an_epoch_from_processes(self, engine: Any, tmp_path: Path, wire: bool) -> None:
        plans = [("asp", "40%"), ("asp:33u asp", ""), ("bsp:12u asp:36u bsp", ""), ("ssp(2):20u asp", "40%")]
        path, calls = str(tmp_path / "job.pt"), []
        for plan, every in half(plans, wire):
            job = Job(plan, 60, "plain", "torch sgd", slow={2: 0.002})
            calls.append((scripts_shards.dealt_workers, job, 1, 24, 4, 1, "plain", every, path))
        for found in each_of(engine, 3, calls, wire):
            all_hold_the_same(found)
            once_an_epoch(found, 24, 4, 60)

    @both
    def test_units_of_those_who_leave_are_done_by_others(self, engine: Any, wire: bool) -> None:
        stops, calls = [{1: 3}, {0: 4}, {1: 2, 2: 5}], []
        for stop in stops:
            for plan in ("asp", "asp:20u ssp(1)"):
                job = Job(plan, 60, "plain", "torch sgd", slow=dict.fromkeys(range(3), 0.001))
                calls.append((scripts_shards.dealt, job, 24, 4, 1, "tensors", "", "", stop))
        calls = half(calls, wire)
        for (*_, stop), found in zip(calls, each_of(engine, 3, calls, wire), strict=True):
            all_hold_the_same(found)
            once_an_epoch(found, 24, 4, 60)
            for rank, steps in stop.items():
                assert len(found[rank].notes["seen"]) == steps

    def test_epochs_of_asynchronous_jobs_are_passes_over_the_data(self, engine: Any) -> None:
        for plan in ("asp", "ssp(1)"):
            job = Job(plan, None, "linear", "torch sgd")
            for one in engine.run(3, scripts_endings.until_total, job, 50, 8, 2):
                assert one.units == one.notes["total"] == 14

    # sync.every, consensus

    @pytest.mark.parametrize(
        ("plan", "total"),
        [("asp", 45), ("asp:50% bsp", 45), ("asp:34u bsp", 61), ("bsp:25% asp:50% local(2)", 61)],
    )
    def test_every_mark_is_told(self, engine: Any, plan: str, total: int) -> None:
        texts = ["50%", "10%", "33.3%", "30%", "7u"]
        job = Job(plan, total, "linear", "torch sgd", slow={2: 0.002})
        found = engine.run(3, scripts_shards.asking, job, texts)
        for words in texts:
            step = Fraction(words[:-1]) * (Fraction(total, 100) if words.endswith("%") else 1)
            rows = [one["told"][words] for one in found]
            for k in range(1, int(total / step) + 1):
                mark, following = k * step, (k + 1) * step
                told = [mark <= units < following for row in rows for units, _ in row]
                assert any(told), f"{words}: nobody was told of {float(mark)}"
            for row in rows:
                assert row[-1][1], f"{words}: all are told of the end"
                marks = [units // step for units, done in row if not done]
                assert all(a < b for a, b in itertools.pairwise(marks)), "once each"

    @both
    def test_evaluating_and_saving_join_nobody_who_is_not_told(
        self, engine: Any, tmp_path: Path, wire: bool
    ) -> None:
        cases = [
            ("asp", 45, "20%", "consensus save"),
            ("asp:34u bsp", 61, "9u", "save"),
            ("asp:50% bsp", 46, "50%", "consensus save"),
            ("ssp(0):20u asp:40u ssp(2)", 60, "19u", "lonely save"),
            ("asp:25% ssp(1):50% local(2)", 61, "3u", "consensus"),
            ("bsp:25% asp", 37, "33.3%", "lonely save"),
            ("asp", 12, "1u", "lonely save"),
            ("asp:20u bsp", 36, "1u", "save"),  # now and then the last tickets before the boundary
        ]
        path, calls, cases = str(tmp_path / "job.pt"), [], half(cases, wire)
        for plan, total, words, do in cases:
            job = Job(plan, total, "plain", "torch sgd", momentum=0.9, slow={2: 0.004})
            calls.append((scripts_shards.asking, job, [words], do, path))
        rows = each_of(engine, 3, calls, wire, timeout=40)
        for (plan, total, *_), found in zip(cases, rows, strict=True):
            all_hold_the_same([one["result"] for one in found])
            last = plan.split()[-1]
            assert found[0]["result"].units - total in range(3 if last[0] in "bl" else 1)

    def test_marks_at_the_end_of_a_phase_in_which_some_get_no_ticket(
        self, engine: Any, tmp_path: Path
    ) -> None:
        """They pass it inside Synchronizer(...)."""
        path = str(tmp_path / "job.pt")
        for do in ("consensus", "save"):
            job = Job("asp:2u bsp", 20, "plain", "torch sgd")
            found = engine.run(3, scripts_shards.asking, job, ["2u"], do, path, timeout=20)
            all_hold_the_same([one["result"] for one in found])

    @pytest.mark.parametrize(("plan", "wire"), [("asp", False), ("asp", True), ("ssp(1)", True)])
    def test_consensus_shows_the_newest_and_gives_the_buffers_back(
        self, engine: Any, plan: str, wire: bool
    ) -> None:
        """On rank 0 alone. Rank 1 is slow: what it last pushed and published is known."""
        job = Job(plan, 24, "mlp", "torch sgd", lr=0.1, momentum=0.9, shard=300, slow={1: 0.05})
        found = engine.run(2, scripts_shards.consenting, job, hosts=hosts_of(2, wire))
        world = as_replay(found, job, [asp() if plan == "asp" else ssp(1)])
        size, rows = found[0].parameters.numel(), found[0].notes["consensus"]
        assert len(rows) > 6
        for before, inside, after, pulled, then, at in rows:
            assert torch.equal(before[size:], after[size:])
            assert apart(after[:size], world.at(then)) <= 1e-12  # the last pull's
            ranges = [range(v, v + 2 if v < 24 else v + 1) for v in pulled]
            newest = [world.at(versions) for versions in itertools.product(*ranges)]
            assert min(apart(inside[:size], one) for one in newest) <= 1e-12
            mine = buffers_at(found[0], at)
            theirs = [
                buffers_at(found[1], at + late) for late in (-0.03, 0.0, 0.03)
            ]  # it may just be pushing
            assert min(apart(inside[size:], (mine + one) / 2) for one in theirs) <= 1e-12

    # Checkpoints

    @both
    def test_a_job_goes_on_from_a_checkpoint(self, engine: Any, tmp_path: Path, wire: bool) -> None:
        plans = {
            "asp": "20%",
            "ssp(1)": "35%",
            "bsp:25% asp": "40%",
            "asp:50% bsp": "30%",
            "asp:20u asp": "45%",
        }
        saving, resuming = [], []
        for number, (plan, every) in enumerate(half(plans.items(), wire)):
            options, path = {"momentum": "ramp"}, str(tmp_path / f"{number}.pt")
            job = Job(plan, 60, "mlp", "adam", lr=0.01, slow={2: 0.004}, shard=300, options=options)
            saving.append((scripts_shards.saves, job, path, every))
            resuming.append((scripts_shards.resumes, job, path))
        rows = each_of(engine, 3, saving, wire)
        for saved, resumed in zip(rows, each_of(engine, 3, resuming, wire), strict=True):
            all_hold_the_same(saved)
            all_hold_the_same(resumed)
            begun, state, adam = saved[0].notes["saved"]
            for one in resumed:
                assert one.notes["begun"][0] == begun
                assert torch.equal(one.notes["begun"][1], state)
                assert str(one.notes["begun"][2]) == str(adam)
            once_an_epoch(saved, 24, 4, 60)
            # Of the units that were done when it was saved none is done again, and none is left out.
            units = [unit for one in saved for unit in one.notes["before"]]
            units += [unit for one in resumed for unit in one.notes["seen"]]
            assert Counter(itertools.chain(*units)) == dict.fromkeys(range(24), 10)

    def test_one_asynchronous_worker_resumes_to_the_bit(self, engine: Any, tmp_path: Path) -> None:
        saving, resuming = [], []
        for plan in ("asp", "ssp(1)", "bsp:25% asp", "asp:9u local(2)"):
            for loop in ("own", "batches", "loader"):
                job = Job(plan, 24, "dropout", "adam", dtype=torch.float32)
                path = str(tmp_path / f"{plan.replace(' ', '-')}-{loop}.pt")
                saving.append((scripts_checkpoints.saves, job, path, 7, loop, scripts.half_cosine))
                resuming.append((scripts_checkpoints.resumes, job, path, loop, scripts.half_cosine))
        rows = each_of(engine, 1, saving)
        for saved, resumed in zip(rows, each_of(engine, 1, resuming), strict=True):
            same_traces(saved, resumed)

    @pytest.mark.parametrize("workers", [1, 2, 4])
    def test_another_worker_count_goes_on(self, engine: Any, tmp_path: Path, workers: int) -> None:
        job, path = Job("bsp:20% asp", 60, "mlp", "torch sgd", momentum=0.9), str(tmp_path / "job.pt")
        saved = engine.run(3, scripts_shards.saves, job, path, "45%")
        found = engine.run(workers, scripts_shards.resumes, job, path)
        all_hold_the_same(found)
        begun, state, _ = saved[0].notes["saved"]
        assert torch.equal(found[0].notes["begun"][1], state)
        assert found[0].units == 60
        assert sum(len(one.notes["seen"]) for one in found) == 60 - begun

    @both
    def test_saving_while_a_fast_worker_waits_at_the_phase_s_end(
        self, engine: Any, tmp_path: Path, wire: bool
    ) -> None:
        """One ticket before the boundary is the slow worker's: it saves with it in hand."""
        plans = [("asp:20u bsp", 44), ("asp:20u ssp(1)", 44), ("asp", 20), ("asp:20u local(2)", 44)]
        calls = []
        for number, (plan, total) in enumerate(half(plans, wire)):
            job = Job(plan, total, "mlp", "torch sgd", momentum=0.9)
            calls.append((scripts_shards.saves_last, job, str(tmp_path / f"{number}.pt"), 20))
        for (_, job, path, _), found in zip(calls, each_of(engine, 3, calls, wire, timeout=20), strict=True):
            all_hold_the_same(found)
            assert found[0].units - job.total in range(1 if job.plan.endswith(("asp", "ssp(1)")) else 3)
            assert torch.load(path, weights_only=True)["position"]["units"] == 19

    # Leaving

    @both
    def test_uneven_loaders(self, engine: Any, wire: bool) -> None:
        cases = half(itertools.product(EACH, [(5, 4, 5), (1, 9, 3)]), wire)
        calls = [
            (scripts_endings.uneven, Job(plan, None, "mlp", "torch sgd", momentum=0.9), lengths, 2)
            for plan, lengths in cases
        ]
        for (*_, lengths, _), found in zip(calls, each_of(engine, 3, calls, wire), strict=True):
            all_hold_the_same(found)
            assert [len(one.trace) for one in found] == [2 * length for length in lengths]
            assert found[0].units == 2 * sum(lengths)

    @both
    def test_asynchronous_loops_that_break_and_close(self, engine: Any, wire: bool) -> None:
        ways = [(3, None, None), (0, 5, None), (4, 4, 4)]
        cases = half(itertools.product(EACH, ways), wire)
        calls = [
            (scripts_endings.stops_early, Job(plan, 40, "plain", "torch sgd", momentum=0.9), steps)
            for plan, steps in cases
        ]
        for (plan, steps), found in zip(cases, each_of(engine, 3, calls, wire), strict=True):
            all_hold_the_same(found)
            taken = [one.notes["taken"] for one in found]
            assert found[0].units == sum(taken)
            for stop, count in zip(steps, taken, strict=True):
                assert count == stop or stop is None or found[0].units >= 40
            if None in steps:
                assert found[0].units in range(40, 43 if plan.endswith("bsp") else 41)

    @both
    def test_saving_under_asp_goes_on_while_a_worker_leaves(
        self, engine: Any, tmp_path: Path, wire: bool
    ) -> None:
        script, calls = scripts_checkpoints.saves_while_leaving, []
        cases = half(itertools.product((0, 1), ("asp", "ssp(1)", "asp:6u bsp")), wire)
        for number, (leaver, plan) in enumerate(cases):
            job = Job(plan, 24, "mlp", "torch sgd", momentum=0.9)
            calls.append((script, job, str(tmp_path / f"{number}.pt"), 3, leaver))
        for (_, _, path, *_), found in zip(calls, each_of(engine, 2, calls, wire), strict=True):
            assert Path(path).is_file()
            all_hold_the_same(found)
            assert found[0].units == 24

    def test_scripts_that_end_without_close_leave_too(self, engine: Any) -> None:
        job = Job("asp", 24, "plain", "torch sgd")
        zero, one = engine.run(2, scripts_endings.forgets_to_close, job, (4, None), timeout=20)
        assert (zero, one) == (4, 20)

    # GradScaler

    @both
    def test_steps_that_a_scaler_skips_count_and_change_nothing(self, engine: Any, wire: bool) -> None:
        turns = [asp(20), bsp(32), ssp(1)]
        base = Job(text(turns), 42, "plain", lr=0.01, momentum=0.9, slow={0: 0.001, 2: 0.001})
        jobs = [replace(base, optimizer=optimizer) for optimizer in ("torch sgd", "adam fused", "lars")]
        rows = each_of(engine, 3, [(scripts_shards.scaled, job, (1, 4)) for job in jobs], wire)
        for job, found in zip(jobs, rows, strict=True):
            as_replay(found, job, turns, skip=scripts.skips_one)
            assert {one.notes["scale"] for one in found} == {512.0}

    # Divergence

    def test_divergence_names_the_worker_and_the_step(self, engine: Any) -> None:
        job = Job("asp", 90, "plain", "torch sgd", options={"on_diverge": "raise"}, slow={2: 0.002})
        found = engine.outcomes(3, scripts_shards.diverging, job, (1, 5), timeout=15)
        assert [one.type for one in found] == ["PeerLost", "Diverged", "PeerLost"]
        for part in ("under asp", "rank 1", "step 5", "loss nan", "bsp:12.5% asp", "--on-diverge rollback"):
            assert part in found[1].message

    @both
    def test_rollback_returns_all_to_the_checkpoint_and_goes_on_with_bsp(
        self, engine: Any, tmp_path: Path, wire: bool
    ) -> None:
        plans, path = ("asp", "ssp(0)", "bsp:30% asp", "asp:75% ssp(1)"), str(tmp_path / "job.pt")
        options, slow = {"on_diverge": "rollback"}, {0: 0.002, 2: 0.002}
        base = Job("", 90, "mlp", "torch sgd", momentum=0.9, options=options, slow=slow)
        jobs = [replace(base, plan=plan) for plan in half(plans, wire)]
        calls = [(scripts_shards.diverging, job, (1, 20), "20%", path) for job in jobs]
        for number, found in enumerate(each_of(engine, 3, calls, wire, timeout=40)):
            all_hold_the_same(found)
            assert all(one.notes["back"] and one.notes["finite"] for one in found)
            assert found[0].units in range(90, 93)
            (back,) = records(engine, "rollback", number)
            assert 18 <= back["to_units"] < back["units"] <= 90
            (row,) = records(engine, "diverged", number)
            assert (row["rank"], row["reason"]) == (1, "the loss is nan")
            assert any("Going back" in one["message"] for one in records(engine, "warning", number))
            assert records(engine, "phase", number)[-1]["protocol"] == "bsp"

    @pytest.mark.parametrize(("processes", "wire"), [(0, False), (1, True)])
    def test_the_samples_after_a_rollback_are_those_after_the_checkpoint(
        self, engine: Any, tmp_path: Path, processes: int, wire: bool
    ) -> None:
        job = Job(
            "asp", 90, "plain", "torch sgd", options={"on_diverge": "rollback"}, slow={0: 0.002, 2: 0.002}
        )
        path = str(tmp_path / "job.pt")
        found = engine.run(
            3, scripts_shards.rolls_back, job, processes, 20, path, hosts=hosts_of(3, wire), timeout=20
        )
        all_hold_the_same(found)
        units = [unit for one in found for unit in (*one.notes["before"], *one.notes["after"])]
        assert len(units) == found[0].units == 90
        assert Counter(itertools.chain(*units)) == dict.fromkeys(range(24), 15)

    @both
    def test_rollback_while_the_others_are_through(self, engine: Any, tmp_path: Path, wire: bool) -> None:
        calls = [
            (
                scripts_shards.diverges_last,
                Job(plan, 40, "plain", "torch sgd", options={"on_diverge": "rollback"}),
                str(tmp_path / "job.pt"),
                boundary,
            )
            for plan, boundary in (("asp:40% bsp", 16), ("asp", 40))
        ]
        for found in each_of(engine, 3, calls, wire, timeout=20):
            all_hold_the_same(found)
            assert all(one.notes["back"] and one.notes["finite"] for one in found)

    @both
    def test_rollback_while_a_worker_leaves_or_evaluates(
        self, engine: Any, tmp_path: Path, wire: bool
    ) -> None:
        slow = dict.fromkeys(range(3), 0.005)
        job = Job("asp", 60, "plain", "torch sgd", options={"on_diverge": "rollback"}, slow=slow)
        path, leavers = str(tmp_path / "job.pt"), half([{0: 3}, {2: 3}, {}, {0: 2, 2: 4}], wire)
        calls = [
            (scripts_shards.diverging, job, (1, 8), "1u", path, leaves, not leaves) for leaves in leavers
        ]
        for leaves, found in zip(leavers, each_of(engine, 3, calls, wire, timeout=30), strict=True):
            all_hold_the_same(found)
            assert all(one.notes["finite"] for one in found)
            assert [one.rank for one in found if not one.notes["back"]] == sorted(leaves)

    @both
    def test_rollback_without_a_checkpoint_is_an_error_on_all(self, engine: Any, wire: bool) -> None:
        slow = dict.fromkeys(range(3), 0.005)
        job = Job("asp", 90, "plain", "torch sgd", options={"on_diverge": "rollback"}, slow=slow)
        for leaves in (None, {2: 3}):
            for one in engine.outcomes(
                3, scripts_shards.diverging, job, (1, 8), "", "", leaves, timeout=15, hosts=hosts_of(3, wire)
            ):
                assert one.type == "Diverged"
                assert "rank 1" in one.message

    def test_a_divergence_that_is_ignored_is_a_warning(self, engine: Any) -> None:
        job = Job("asp", 60, "plain", "torch sgd", options={"on_diverge": "ignore"}, slow={1: 0.001})
        found = engine.run(3, scripts_shards.diverging, job, (0, 3))
        assert found[0].units == 60
        (row,) = records(engine, "warning")
        assert "under asp" in row["message"]
        assert "rank 0" in row["message"]

    def test_an_exploding_loss_is_a_divergence(self, engine: Any) -> None:
        job = Job("asp", 600, "plain", "torch sgd", lr=30.0)
        found = engine.outcomes(3, scripts_shards.train, job, timeout=20)
        raised = {one.type for one in found}
        assert "Diverged" in raised
        assert raised <= {"Diverged", "PeerLost"}

    def test_a_cold_start_with_momentum_is_warned_of(self, engine: Any) -> None:
        cases = [("asp", 0.9, True), ("ssp(2)", 0.9, True), ("asp", 0.0, False), ("bsp:25% asp", 0.9, False)]
        jobs = [Job(plan, 12, "linear", "torch sgd", momentum=momentum) for plan, momentum, _ in cases]
        each_of(engine, 2, [(scripts_shards.train, job) for job in jobs])
        for number, (_, _, warned) in enumerate(cases):
            rows = [row["message"] for row in records(engine, "warning", number)]
            assert [("bsp:12.5%" in row and "momentum 0.9" in row) for row in rows] == [True] * warned

    # Deaths

    @pytest.mark.parametrize(
        ("plan", "victim", "wire"),
        [
            *[("asp", 0, False), ("asp", 2, False), ("asp", 0, True), ("asp", 1, True)],
            *[("ssp(0)", 0, False), ("ssp(0)", 1, True)],
        ],
    )
    def test_the_others_learn_of_a_death_within_seconds(
        self, engine: Any, plan: str, victim: int, wire: bool
    ) -> None:
        job = Job(plan, 100_000, "plain", "torch sgd", momentum=0.9)
        found = engine.outcomes(3, scripts_shards.dies, job, victim, 12, timeout=15, hosts=hosts_of(3, wire))
        for rank, one in enumerate(found):
            if rank == victim:
                assert one == Died(rank, -9)
            else:
                assert isinstance(one, RemoteError), one
                assert one.type == "PeerLost", one
        ended = [float(Path(engine.out, f"ended{rank}").read_text()) for rank in range(3) if rank != victim]
        assert max(ended) - float(Path(engine.out, "died").read_text()) < 5

    @both
    def test_the_others_learn_of_a_death_while_they_evaluate(self, engine: Any, wire: bool) -> None:
        hosts = [0, 1, 2, 3] if wire else None
        job = Job("asp", 100_000, "mlp", "torch sgd", shard=300, looks=(0, 1, 2, 3))
        for victim in (0, 2) if wire else (1,):
            found = engine.outcomes(4, scripts_shards.dies, job, victim, 20, timeout=15, hosts=hosts)
            assert found.pop(victim) == Died(victim, -9)
            assert [getattr(one, "type", one) for one in found] == ["PeerLost"] * 3

    @both
    def test_those_who_are_through_learn_of_a_death(self, engine: Any, wire: bool) -> None:
        job = Job("asp", 12, "plain", "torch sgd", slow={1: 0.3})
        found = engine.outcomes(3, scripts_shards.dies, job, 1, 0, timeout=15, hosts=hosts_of(3, wire))
        assert [getattr(one, "type", "") for one in found] == ["PeerLost", "", "PeerLost"]

    # Misuse

    @pytest.mark.parametrize(
        ("how", "kind", "parts"),
        [
            ("closure", "TypeError", ("Closing", "closure")),
            ("nested", "TypeError", ("Nested", "another optimizer", "'inner'")),
            ("cut", "ValueError", ("'foo'", "elements", "tensors")),
            ("gaps", "ValueError", ("weight", "gaps", "(12, 2)")),
            ("diverge", "ValueError", ("'foo'", "rollback")),
            ("rows", "TypeError", ("Muon", "'rows'", "cut='tensors'")),
            ("sparse", "TypeError", ("sparse", "Embedding(sparse=False)")),
            ("text", "TypeError", ("Wordy", "str", "'word'")),
            ("bound", "PlanError", ("bound=-1",)),
        ],
    )
    def test_wrong_use_is_an_error_on_all(
        self, engine: Any, how: str, kind: str, parts: tuple[str, ...]
    ) -> None:
        for one in engine.outcomes(2, scripts_shards.wrongly, how, timeout=20):
            assert isinstance(one, RemoteError), one
            assert one.type == kind, one
            for part in parts:
                assert part in one.message, one

    def test_one_worker_needs_no_memory(self, engine: Any) -> None:
        (found,) = engine.run(
            1, scripts_shards.needs_no_memory, Job("bsp:25% asp", 12, optimizer="torch sgd")
        )
        assert found == (12, None)

    # The journal

    @both
    @pytest.mark.parametrize("plan", ["asp", "bsp:12u asp:70u ssp(1)"])
    def test_pushes_add_up_to_the_phase_s_units(self, engine: Any, plan: str, wire: bool) -> None:
        job = Job(plan, 120, "plain", "torch sgd", slow={0: 0.004, 1: 0.004, 2: 0.004, 3: 0.009}, shard=300)
        found = engine.run(4, scripts_shards.train, job, hosts=hosts_of(4, wire))
        rows = records(engine, "pushes")
        begun = [0] if plan == "asp" else [12, 70]
        ends = [120] if plan == "asp" else [70, 120]
        assert [row["units"] for row in rows] == ends
        parts = pushes_of(found)
        for number, (row, first, end) in enumerate(zip(rows, begun, ends, strict=True)):
            assert sum(row["staleness"].values()) == end - first
            assert [one["rank"] for one in row["workers"]] == [0, 1, 2, 3]
            for one, mine in zip(row["workers"], parts, strict=True):
                stale = [max(map(push.staleness, push.applied)) for push in mine[number]]
                assert one["pushes"] == len(stale)
                assert one["max_staleness"] == max(stale)
                assert one["mean_staleness"] == pytest.approx(sum(stale) / len(stale), abs=1e-3)
            histogram = {int(k): n for k, n in row["staleness"].items()}
            mean = sum(k * n for k, n in histogram.items()) / (end - first)
            assert row["mean_staleness"] == pytest.approx(mean, abs=1e-3)
            assert 1.5 < mean < 5, "about workers - 1"
        if plan != "asp":
            assert any(one["bound_waits"] and one["bound_wait_s"] > 0 for one in rows[1]["workers"])

    def test_the_lr_trace_and_the_switches_are_in_the_journal(self, engine: Any) -> None:
        job = Job("bsp:20u asp", 60, "plain", "torch sgd", slow=dict.fromkeys(range(2), 0.05))
        engine.run(2, scripts_shards.shaped, job, scripts.half_cosine)
        steps = [row for row in records(engine, "step") if row["protocol"] == "asp"]
        assert len(steps) > 2
        for row in steps:
            assert row["staleness"] >= 0
            assert 0 < row["lr"] < 0.05 / 2
        (switch,) = records(engine, "switch")
        assert (switch["from"], switch["to"], switch["units"]) == ("bsp", "asp", 20)
        assert min(switch["drain_ms"], switch["settle_ms"], switch["transfer_ms"]) >= 0
