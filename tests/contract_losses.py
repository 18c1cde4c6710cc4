"""Workers that die: the others go on, nothing is lost, and a new process takes the dead one's place."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import pytest

from offbeat import journal
from tests import scripts_losses
from tests.contract_parity import all_hold_the_same
from tests.engines import Died, RemoteError, audit_of
from tests.scripts_losses import Loss

SHARDS = [
    ("asp", "backward"),
    ("asp", "push"),
    ("asp", "pull"),
    ("asp", "claim"),
    ("ssp(2)", "push"),
    ("ssp(2)", "backward"),
    ("bsp:32u asp", "push"),
    ("bsp:32u asp", "switch"),
    ("asp:48u bsp", "switch"),
    ("asp", "checkpoint"),
]
REPLICAS = [
    ("bsp", "backward"),
    ("bsp", "step"),
    ("bsp", "checkpoint"),
    ("local(3)", "backward"),
    ("local(3)", "average"),
    ("dasgd(4,2)", "average"),
    ("dasgd(4,2)", "backward"),
    ("local(3)", "checkpoint"),
    ("bsp:32u local(2)", "switch"),
]
COMES = [
    "bsp",
    "local(3)",
    "dasgd(4,2)",
    "asp",
    "ssp(2)",
    "bsp:30% asp",
    "asp:30% bsp",
    "bsp:30% dasgd(4,2)",
]


def samples_seen(engine: Any, workers: int) -> Counter[int]:
    found: Counter[int] = Counter()
    for path in [engine.out / f"seen{rank}.jsonl" for rank in range(workers)]:
        for line in path.read_text().splitlines() if path.exists() else ():  # who came too late has none
            found.update(json.loads(line))
    return found


def survivors(engine: Any, loss: Loss, workers: int = 4, script: Any = None, **more: Any) -> list[Any]:
    """What those returned who were there at the end; a process that comes back too late leaves."""
    found = engine.outcomes(workers, script or scripts_losses.mortal, loss, minimum=2, **more)
    errors = [one for one in found if isinstance(one, RemoteError)]
    if errors:
        raise errors[0]
    left = [one.rank for one in found if isinstance(one, Died)]
    assert set(left) <= {loss.who, loss.too}, left
    return [one for one in found if one is not None and not isinstance(one, Died)]


class Losses:
    @pytest.mark.parametrize("who", [0, 2])
    @pytest.mark.parametrize(("plan", "moment"), REPLICAS)
    def test_the_others_go_on(self, engine: Any, plan: str, moment: str, who: int) -> None:
        saves = "16u" if moment == "checkpoint" else ""
        loss = Loss(plan, 160, momentum=0.9, who=who, moment=moment, saves=saves, pace=0.01)
        found = survivors(engine, loss)
        all_hold_the_same(found)
        assert 160 <= found[0].units < 164, found[0].units
        assert math.isfinite(float(found[0].final.sum()))
        kinds = Counter(row["type"] for row in journal.read(engine.out))
        assert kinds["recovery"] >= 1
        assert kinds["end"] == 1
        assert all(one.clean and one.ended for one in audit_of(engine.out))

    @pytest.mark.parametrize("who", [0, 2])
    @pytest.mark.parametrize("hosts", [(0, 0, 0, 0), (0, 0, 1, 1)])
    @pytest.mark.parametrize(("plan", "moment"), SHARDS)
    def test_the_others_go_on_with_the_shards(
        self, engine: Any, plan: str, moment: str, hosts: tuple[int, ...], who: int
    ) -> None:
        saves = "16u" if moment == "checkpoint" else ""
        loss = Loss(plan, 240, momentum=0.9, who=who, moment=moment, saves=saves, pace=0.01, samples=960)
        found = survivors(engine, loss, hosts=hosts)
        all_hold_the_same(found)
        assert 240 <= found[0].units < (244 if plan.endswith("bsp") else 241)
        assert math.isfinite(float(found[0].final.sum()))
        assert [row for row in journal.read(engine.out) if row["type"] == "recovery"]
        (proof,) = audit_of(engine.out)
        assert proof.clean
        assert proof.ended
        assert len(proof.partly) <= (1 if len(set(hosts)) > 1 else 0)
        # A unit that was pushed when its worker died, before that could write it down, is missing here.
        seen = samples_seen(engine, 4)
        assert len(seen) >= 960 - 4

    @pytest.mark.parametrize("plan", ["asp", "ssp(2)", "bsp:32u asp", "bsp"])
    @pytest.mark.parametrize("moment", ["backward", "push"])
    def test_a_whole_host_dies(self, engine: Any, plan: str, moment: str) -> None:
        """Its shards go on from what a survivor has pulled last; what is lacking there is told."""
        moment = "backward" if plan == "bsp" else moment
        loss = Loss(plan, 240, momentum=0.9, who=2, too=3, moment=moment, pace=0.01, samples=960)
        found = survivors(engine, loss, hosts=(0, 0, 1, 1))
        all_hold_the_same(found)
        assert 240 <= found[0].units < 244
        assert math.isfinite(float(found[0].final.sum()))
        (proof,) = audit_of(engine.out)
        assert proof.clean
        assert proof.ended
        assert proof.missing <= 8

    @pytest.mark.parametrize(
        ("moment", "who"),
        [("meeting", 0), ("meeting", 2), ("receiving", 2), ("preparing", 0), ("preparing", 2)],
    )
    def test_a_death_before_the_first_step(self, engine: Any, moment: str, who: int) -> None:
        """But for rank 0's while its parameters travel: nobody else may have the right ones."""
        loss = Loss("asp", 160, momentum=0.9, who=who, moment=moment, pace=0.01, samples=640)
        found = survivors(engine, loss)
        all_hold_the_same(found)
        (proof,) = audit_of(engine.out)
        assert proof.clean
        assert proof.ended
        assert len(samples_seen(engine, 4)) == 640

    def test_under_bsp_every_sample_is_used_once(self, engine: Any) -> None:
        loss = Loss("bsp", 160, momentum=0.9, who=1, samples=640, pace=0.01)
        found = survivors(engine, loss)
        units = found[0].units
        seen = samples_seen(engine, 4)
        assert len(seen) == 640
        assert sum(seen.values()) == 4 * units

    def test_a_step_that_was_lost_leaves_a_scaler_as_it_was(self, engine: Any) -> None:
        """Whoever unscales before clipping can do so in the next step again, at the same scale."""
        loss = Loss("bsp", 160, momentum=0.9, who=1, pace=0.01, samples=640)
        found = survivors(engine, loss, script=scripts_losses.scaled)
        all_hold_the_same(found)
        assert found[0].notes["voids"] == 1
        assert set(found[0].notes["scales"]) == {256.0}

    def test_a_new_process_takes_part_again(self, engine: Any) -> None:
        loss = Loss("bsp", 600, momentum=0.9, who=1, pace=0.02)
        found = survivors(engine, loss)
        all_hold_the_same(found)
        assert found[1].notes["attempt"] == 1
        members = [row["members"] for row in journal.read(engine.out) if row["type"] == "members"]
        assert members[0] == [0, 2, 3]
        assert [0, 1, 2, 3] in members[1:]

    def test_a_new_process_comes_while_a_straggler_is_out(self, engine: Any) -> None:
        """It knows who is outside: its learning rate is the members', and at the switch all are back."""
        options = {"stragglers": "elastic"}
        loss = Loss("bsp:70% asp", 600, momentum=0.5, who=1, pace=0.02, flags={3: [2]}, options=options)
        found = survivors(engine, loss)
        all_hold_the_same(found)
        assert found[1].notes["attempt"] == 1
        members = [row["members"] for row in journal.read(engine.out) if row["type"] == "members"]
        assert members == [[0, 1, 3], [0, 3], [0, 1, 3], [0, 1, 2, 3]]
        (proof,) = audit_of(engine.out)
        assert proof.clean
        assert proof.ended

    def test_a_new_process_comes_where_stragglers_are_watched(self, engine: Any) -> None:
        options = {"stragglers": "observe(window=5)"}
        loss = Loss("asp", 600, momentum=0.5, who=1, pace=0.02, options=options)
        found = survivors(engine, loss)
        all_hold_the_same(found)
        assert found[1].notes["attempt"] == 1

    @pytest.mark.parametrize("plan", ["bsp", "asp", "bsp:30% dasgd(4,2)"])
    @pytest.mark.parametrize("delay", [-0.5, 0.5])
    def test_one_that_begins_alone_is_joined(self, engine: Any, plan: str, delay: float) -> None:
        loss = Loss(plan, 300, momentum=0.9, who=-1, pace=0.01, samples=1200, delay=delay)
        found = engine.outcomes(1, scripts_losses.mortal, loss, minimum=1, later=2)
        assert [one for one in found if isinstance(one, RemoteError | Died)] == []
        all_hold_the_same(found)
        assert 300 <= found[0].units < 303
        (proof,) = audit_of(engine.out)
        assert proof.clean
        assert proof.ended

    @pytest.mark.parametrize("who", [0, 2])
    @pytest.mark.parametrize("moment", ["giving", "telling"])
    @pytest.mark.parametrize("plan", ["bsp", "dasgd(4,2)", "asp"])
    def test_a_member_dies_while_another_comes(self, engine: Any, plan: str, moment: str, who: int) -> None:
        """Be it the one whose state the newcomer is given: the others hold the same."""
        loss = Loss(plan, 900, momentum=0.5, who=who, moment=moment, after=1, pace=0.01, delay=0.3)
        found = engine.outcomes(3, scripts_losses.mortal, loss, minimum=1, later=1)
        assert [one for one in found if isinstance(one, RemoteError)] == []
        all_hold_the_same([one for one in found if not isinstance(one, Died)])
        rows = journal.read(engine.out)
        reasons = [row["reason"] for row in rows if row["type"] == "members"]
        assert f"rank {who} died" in reasons
        assert {row["type"] for row in rows} >= {"recovery", "end"}
        (proof,) = audit_of(engine.out)
        assert proof.clean
        assert proof.ended

    @pytest.mark.parametrize("then", ["reconciling", "telling"])
    @pytest.mark.parametrize("plan", ["bsp", "local(8)", "asp"])
    def test_another_dies_in_the_recovery(self, engine: Any, plan: str, then: str) -> None:
        """What the dead had under way is counted by the members of the epoch in which it was."""
        options = {"who": 2, "too": 1, "moment": "backward", "then": then}
        loss = Loss(plan, 240, momentum=0.5, pace=0.01, samples=960, **options)
        found = survivors(engine, loss)
        all_hold_the_same(found)
        (proof,) = audit_of(engine.out)
        assert proof.clean
        assert proof.ended

    @pytest.mark.parametrize("then", ["reconciling", "telling"])
    def test_another_dies_when_the_newcomer_has_half_of_it(self, engine: Any, then: str) -> None:
        """It has some parameters, or not yet what else belongs to the job, and gives nobody anything; who was
        a member before is whole all the time."""
        options = {"who": 0, "too": 1, "moment": "giving", "then": then}
        loss = Loss("bsp", 900, momentum=0.5, after=1, pace=0.01, delay=0.3, **options)
        found = engine.outcomes(4, scripts_losses.mortal, loss, minimum=1, later=1)
        assert [one for one in found if isinstance(one, RemoteError)] == []
        all_hold_the_same([one for one in found if not isinstance(one, Died)])
        (proof,) = audit_of(engine.out)
        assert proof.clean
        assert proof.ended

    @pytest.mark.parametrize("delay", [0.0, 0.2, 0.5])
    @pytest.mark.parametrize("hosts", [(0, 0, 0, 0), (0, 1, 0, 2)])
    @pytest.mark.parametrize("plan", COMES)
    def test_others_may_come_at_any_time(
        self, engine: Any, plan: str, hosts: tuple[int, ...], delay: float
    ) -> None:
        """Two begin, two more come on their own, on hosts of the job or on one that it didn't have."""
        loss = Loss(plan, 400, momentum=0.9, who=-1, pace=0.01, samples=1600, delay=delay)
        found = engine.outcomes(2, scripts_losses.mortal, loss, minimum=1, later=2, hosts=hosts)
        assert [one for one in found if isinstance(one, RemoteError)] == []
        came = [one for one in found if not isinstance(one, Died)]
        all_hold_the_same(came)
        (proof,) = audit_of(engine.out)
        assert proof.clean
        assert proof.ended
        assert proof.again == []
        members = [row["members"] for row in journal.read(engine.out) if row["type"] == "members"]
        assert members[-1] == list(range(len(came)))
        assert len(samples_seen(engine, 4)) == 1600
