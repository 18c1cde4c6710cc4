"""Stragglers: detected from what each worker does itself, excluded and readmitted, or avoided by a detour."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from offbeat import journal
from tests import scripts, scripts_stragglers
from tests.contract_parity import all_hold_the_same, apart
from tests.models import flat
from tests.reference import usual
from tests.scripts import Setup

ELASTIC = {"stragglers": "elastic"}
GREEDY = {"stragglers": "greedy"}


def records(engine: Any, kind: str) -> list[dict[str, Any]]:
    return [row for row in journal.read(engine.out) if row["type"] == kind]


def serial(setup: Setup, teams: list[tuple[list[int], float]]) -> Any:
    """One process: each step applies the mean gradient of its members, at a factor of the learning rate."""
    model, optimizer = setup.parts()
    for clock, (members, factor) in enumerate(teams):
        for rank in members:
            (usual(model, rank, clock) / len(members)).backward()
        for group in optimizer.param_groups:
            group["lr"] = setup.lr * factor
        optimizer.step()
        optimizer.zero_grad()
    return flat(model)


class StragglersContract:
    def test_elastic_may_try_whether_a_straggler_is_fast_again(self, engine: Any) -> None:
        """Out from step 6 on, back after step 8 and slow again, out from step 12 on, back after step 16."""
        setup = Setup("bsp:80u local(1)", 96, "plain", options={"stragglers": "elastic(trial=8)"})
        found = engine.run(4, scripts_stragglers.trained, setup, {5: [1], 8: [], 11: [1], 16: []})
        all_hold_the_same(found)
        sizes = [len(members) for members in found[0].notes["members"]]
        assert sizes[:20] == [4] * 5 + [3] * 2 + [4] * 4 + [3] * 4 + [4] * 5
        teams = [(list(range(4)), 1.0)] * 6 + [([0, 2, 3], 0.75)] * 2 + [(list(range(4)), 1.0)] * 4
        teams += [([0, 2, 3], 0.75)] * 4 + [(list(range(4)), 1.0)] * (found[0].clock - 16)
        assert apart(found[0].final, serial(setup, teams)) <= 1e-12

    @pytest.mark.parametrize("who", [[1], [0], [2, 3]])
    @pytest.mark.parametrize("reference", ["global", "worker"])
    def test_elastic_is_bsp_over_those_that_stay(self, engine: Any, who: list[int], reference: str) -> None:
        """Flagged with step 5's words, hence out from step 6 on, and back at the switch; local(1) is BSP."""
        options = {**ELASTIC, "lr_reference": reference}
        setup = Setup("bsp:40u local(1)", 64, "plain", options=options)
        found = engine.run(4, scripts_stragglers.trained, setup, {5: who})
        all_hold_the_same(found)
        few = [rank for rank in range(4) if rank not in who]
        scale = (lambda n: float(n)) if reference == "worker" else (lambda n: n / 4)
        teams = [(list(range(4)), scale(4))] * 6
        units = 24
        while units < 40:
            teams.append((few, scale(len(few))))
            units += len(few)
        while units < 64:
            teams.append((list(range(4)), 1.0))
            units += 4
        assert apart(found[0].final, serial(setup, teams)) <= 1e-12
        assert [one.units for one in found] == [units] * 4
        for one in found:
            outside = one.rank in who
            assert len(one.trace) == len(teams) - (sum(team == few for team, _ in teams) if outside else 0)

    @pytest.mark.parametrize("then", ["asp", "ssp(2)", "local(3)", "dasgd(4,2)", "asp:80% bsp"])
    @pytest.mark.parametrize("hosts", [None, (0, 0, 1, 1)])
    def test_elastic_deals_every_sample_once(self, engine: Any, then: str, hosts: Any) -> None:
        setup = Setup(f"bsp:40% {then}", 60, momentum=0.9, options=ELASTIC)
        found = engine.run(4, scripts_stragglers.dealt, setup, {2: [3], 4: [0, 3]}, 240, 4, hosts=hosts)
        all_hold_the_same(found)
        seen = Counter(sample for one in found for rows in one.notes["seen"] for sample in rows)
        units = found[0].units
        assert 60 <= units < 64
        assert sum(seen.values()) == 4 * units
        assert all(seen[sample] == 1 for sample in range(240)) or units > 60
        assert len(seen) == 240

    @pytest.mark.parametrize("then", ["asp", "ssp(2)", "local(3)", "dasgd(4,2)"])
    @pytest.mark.parametrize("hosts", [None, (0, 0, 1, 1)])
    def test_greedy_serves_the_share_in_full(self, engine: Any, then: str, hosts: Any) -> None:
        setup = Setup(f"bsp:40% {then}", 120, momentum=0.9, options=GREEDY)
        flags = {2: [1], (9 if then in ("local(3)", "dasgd(4,2)") else 3): []}
        found = engine.run(4, scripts_stragglers.dealt, setup, flags, 480, 4, hosts=hosts)
        all_hold_the_same(found)
        turns = [(row["protocol"].split("(")[0], row["units"]) for row in records(engine, "phase")]
        word = then.split("(")[0]
        assert [name for name, _ in turns][:3] == ["bsp", word, "bsp"]
        ends = [*(units for _, units in turns[1:]), found[0].units]
        served = sum(end - begin for (name, begin), end in zip(turns, ends, strict=True) if name == "bsp")
        assert served >= 48
        assert turns[-1][0] == word
        seen = Counter(sample for one in found for rows in one.notes["seen"] for sample in rows)
        assert len(seen) == 480
        if then in ("asp", "ssp(2)"):
            assert found[0].units == 120
            assert set(seen.values()) == {1}

    def test_greedy_may_go_there_and_back_often(self, engine: Any) -> None:
        flags = {step: ([1] if step % 3 else []) for step in range(2, 60)}
        setup = Setup("bsp:60% asp", 200, options=GREEDY)
        found = engine.run(3, scripts_stragglers.dealt, setup, flags, 800, 4, 2)
        all_hold_the_same(found)
        assert 200 <= found[0].units < 203
        assert len(records(engine, "switch")) > 4
        seen = Counter(sample for one in found for rows in one.notes["seen"] for sample in rows)
        assert len(seen) == 800
        assert sum(seen.values()) == 4 * found[0].units

    def test_greedy_to_the_end_of_the_job(self, engine: Any) -> None:
        """A straggler that stays: the share is never served, and the job ends in the detour."""
        setup = Setup("bsp:60% asp", 80, options=GREEDY)
        found = engine.run(3, scripts_stragglers.dealt, setup, {2: [1]}, 320, 4, 10**6)
        all_hold_the_same(found)
        assert found[0].units == 80
        assert [row["protocol"] for row in records(engine, "phase")] == ["bsp", "asp"]

    @pytest.mark.parametrize("policy", ["elastic", "greedy"])
    @pytest.mark.parametrize("lengths", [(9, 4, 12, 9), (3, 12, 12, 12), (6, 6, 6, 6)])
    def test_data_may_end_while_somebody_is_outside(
        self, engine: Any, policy: str, lengths: tuple[int, ...]
    ) -> None:
        setup = Setup("bsp:24u local(2)", 400, options={"stragglers": policy})
        found = engine.run(4, scripts_stragglers.uneven, setup, {2: [1]}, lengths)
        all_hold_the_same(found)

    def test_a_checkpoint_while_somebody_is_outside(self, engine: Any, tmp_path: Path) -> None:
        path = tmp_path / "here.pt"
        setup = Setup("bsp:48u local(3)", 96, momentum=0.9, options=ELASTIC)
        found = engine.run(4, scripts_stragglers.saved, setup, {2: [1]}, path, 20)
        all_hold_the_same(found)
        again = engine.run(4, scripts_stragglers.restored, setup, path)
        all_hold_the_same(again)
        assert apart(again[1].notes["held"], found[0].notes["held"]) == 0
        assert 20 <= again[0].notes["units"] < 24
        assert again[0].units >= 96

    @pytest.mark.parametrize("then", ["asp", "local(3)"])
    def test_a_checkpoint_in_a_detour(self, engine: Any, then: str, tmp_path: Path) -> None:
        """What counts for the switch is what was done under BSP, in both runs together."""
        path = tmp_path / "here.pt"
        flags = {2: [1], (12 if then == "local(3)" else 3): []}
        setup = Setup(f"bsp:48u {then}", 160, momentum=0.9, options=GREEDY)
        found = engine.run(4, scripts_stragglers.saved, setup, flags, path, 32)
        all_hold_the_same(found)
        first = records(engine, "phase")
        assert [row["protocol"].split("(")[0] for row in first][:3] == ["bsp", then.split("(")[0], "bsp"]
        again = engine.run(4, scripts_stragglers.restored, setup, path)
        all_hold_the_same(again)
        units = again[0].notes["units"]
        then_row = next(row for row in records(engine, "phase") if row["units"] > units)
        assert then_row["protocol"] != "bsp"
        assert 48 <= first[1]["units"] + then_row["units"] - units < 52

    def test_without_stragglers_the_policies_change_nothing(self, engine: Any) -> None:
        plain = Setup("bsp:50% local(2)", 64, momentum=0.9)
        (one, *_) = engine.run(3, scripts.train, plain)
        for policy in ("observe", "greedy", "elastic"):
            setup = Setup("bsp:50% local(2)", 64, momentum=0.9, options={"stragglers": policy})
            (other, *_) = engine.run(3, scripts_stragglers.trained, setup, {})
            assert apart(one.final, other.final) == 0

    @pytest.mark.parametrize("plan", ["bsp", "local(5)", "dasgd(5,2)", "asp"])
    def test_a_slow_processor_is_found(self, engine: Any, plan: str) -> None:
        """Not how fast: 4 times slower for all but the first steps, so at some time it must be seen."""
        options = {"stragglers": "observe(window=5,count=2)"}
        setup = Setup(plan, 200, options=options)
        engine.run(4, scripts_stragglers.slowed, setup, {2: 4.0}, 10, 10**6)
        flagged = [row for row in records(engine, "straggler") if row["action"] == "flagged"]
        row = next(row for row in flagged if row["rank"] == 2)
        assert row["speeds"]["2"] < row["limit"] < max(row["speeds"].values())

    def test_a_probe_tells_every_member_the_same(self, engine: Any) -> None:
        for workers in (2, 3, 5):
            found = engine.run(workers, scripts_stragglers.probed, 2)
            for rows in found[0]:
                assert len(rows) == workers
                assert all(len(row) == min(3, workers - 1) for row in rows)
                assert all(seconds > 0 for row in rows for seconds in row)
            assert all(one == found[0] for one in found)
