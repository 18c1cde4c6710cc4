"""The ledger's sums, and what an audit makes of a journal."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from commands import Command

from offbeat.audit import Audit, audit
from offbeat.ledger import WORD, dealt, mark, marks, pending, used
from tests import scripts_losses
from tests.engines import RealEngine

RUN = {"type": "run", "t": 0.0, "plan": "bsp", "workers": 2, "total": 10}
DATA = {"type": "data", "t": 0.0, "batch_size": 4, "micro_batches": 1, "samples": 18}


def entry(units: int, waiting: tuple[int, ...] = (), **other: Any) -> dict[str, Any]:
    sum = f"{used(units, waiting):016x}"
    return {"type": "ledger", "t": 1.0, "units": units, "pending": list(waiting), "used": sum, **other}


def end(units: int) -> dict[str, Any]:
    return {"type": "end", "t": 2.0, "units": units}


def one(*rows: dict[str, Any]) -> Audit:
    (found,) = audit([RUN, DATA, *rows])
    return found


def test_marks_are_the_sum_of_each() -> None:
    for first, last in ((0, 0), (0, 1), (5, 900), (2**40, 2**40 + 3)):
        assert marks(first, last) == sum(map(mark, range(first, last))) % WORD
    assert marks(0, (1 << 20) + 5) == (marks(0, 77) + marks(77, (1 << 20) + 5)) % WORD


def test_small_mistakes_change_the_sum() -> None:
    """One unit twice and another never, for all pairs of a few hundred."""
    differences = {mark(a) - mark(b) for a in range(300) for b in range(300) if a != b}
    assert 0 not in {d % WORD for d in differences}
    assert len(differences) == 300 * 299


def test_a_deal_with_units_that_were_given_back() -> None:
    """Whatever was dealt, given back and dealt again: what is used and what waits are all units together."""
    draw = random.Random(1)
    for _ in range(200):
        dealt_to = draw.randrange(1, 40)
        waiting = sorted(draw.sample(range(dealt_to), draw.randrange(dealt_to + 1)))
        done = dealt_to - len(waiting)
        redeal = {done + i: unit for i, unit in enumerate(waiting) if done + i != unit}
        found = pending(done, redeal)
        assert set(found) <= set(waiting)
        assert used(done, found) == used(
            done, waiting
        )  # those that the numbers name by themselves add nothing
        rest = sum(map(mark, waiting))
        assert dealt(done, dealt_to, redeal) == rest % WORD
        assert (used(done, found) + rest) % WORD == marks(0, dealt_to)


def test_a_clean_journal() -> None:
    found = one(entry(0), entry(6, (3,)), entry(10), end(10))
    assert found.clean
    assert found.lines() == [
        "bsp on 2 workers: 10 units committed of 10",
        "clean: each unit was used by exactly one committed update; of 18 samples, 2 whole epochs",
    ]


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([entry(4), entry(10, used=f"{used(9, ()):016x}"), end(10)], "the entry before it: 4"),
        ([entry(10, used=f"{used(10, (3,)):016x}"), end(10)], "WRONG at 1.000 s: 10 units committed"),
        ([entry(8), end(10)], "WRONG: the job ended with 10 units, the ledger with 8"),
        ([entry(9, (2,)), end(9)], "WRONG: 1 unit never done (2)"),
    ],
)
def test_what_is_wrong_is_said(rows: list[dict[str, Any]], text: str) -> None:
    found = one(*rows)
    assert not found.clean
    assert text in "\n".join(found.lines())


def test_what_was_done_again_is_listed() -> None:
    died = {"type": "recovery", "t": 1.0, "units": 6, "again": [5, 7], "partly": [5]}
    found = one(entry(6, (5,)), died, entry(11), end(11))
    assert found.clean
    assert (
        found.lines()[0]
        == "bsp on 2 workers: 11 units committed of 10 (1 over: the last step is everybody's)"
    )
    assert "recoveries: 1; 2 units dealt again (5, 7)" in found.lines()
    assert (
        "1 unit applied twice by some shards (5): their worker died between two hosts' shards"
        in found.lines()
    )


def test_a_journal_without_a_ledger_or_without_an_end() -> None:
    (found,) = audit([RUN, end(10)])
    assert not found.clean
    assert "no proof: nothing was dealt by sync.batches" in found.lines()[1]
    assert "up to there (the journal has no end)" in one(entry(4)).lines()[1]


def test_a_unit_that_was_used_twice_is_found(tmp_path: Path) -> None:
    """A worker that takes another batch than its own."""
    engine = RealEngine(tmp_path)
    for plan in ("bsp", "local(2)", "asp"):
        with pytest.raises(AssertionError, match=r"WRONG at .* units committed"):
            engine.run(2, scripts_losses.stray, scripts_losses.Loss(plan, 40, who=1))


def test_the_command_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = Command("audit", tmp_path).end()
    assert code == 2
    assert err == f"offbeat: error: {tmp_path} holds no journal.jsonl\n"
