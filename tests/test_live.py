"""What a person sees of a run, from records alone; and the comparison of plans."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from offbeat import live
from offbeat.compare import Run, compare, table
from offbeat.events import event
from offbeat.journal import Record
from offbeat.screen import Screen


def row(kind: str, t: float, **fields: Any) -> Record:
    return {"type": kind, "t": t, **fields}


def workers(t: float, samples: int, busy: float, wait: float) -> Record:
    half = {"samples": samples / 2, "busy_s": busy / 2, "wait_s": wait / 2, "clock": 0}
    return row("workers", t, workers=[{"rank": 0, **half}, {"rank": 1, **half}])


START = [
    row("run", 2.0, plan="bsp:50% local", total=200, workers=2),
    row("phase", 2.0, protocol="bsp", units=0, progress=0.0),
]
# 20 units a second, a quarter of the time waiting
STEADY = [
    one
    for second in range(1, 5)
    for one in (
        row("step", 2.0 + second, protocol="bsp", units=20 * second, progress=0.1 * second, loss=1 / second),
        workers(2.0 + second, 200 * second, 1.5 * second, 0.5 * second),
    )
]


def pushes(t: float, *each: int, mean: float = 3.0, most: int = 9, **wait: float) -> Record:
    """The end of a phase on shards, in which rank r made `each[r]` pushes."""
    rows = [
        {"rank": rank, "pushes": count, "mean_staleness": mean, "max_staleness": most - rank, **wait}
        for rank, count in enumerate(each)
    ]
    where = {"protocol": "asp", "units": 200, "progress": 1.0}
    return row("pushes", t, **where, mean_staleness=mean, staleness={"3": sum(each)}, workers=rows)


END = row("end", 12.0, seconds=10.0, units=200, samples=2000, samples_per_s=200.0, waiting=0.25, loss=0.1)


def test_before_anything_is_known() -> None:
    assert live.line(live.View()) == "starting"
    assert live.line(live.view(START)) == "  0.0%  bsp"


def test_the_line_of_a_steady_run() -> None:
    assert live.line(live.view(START + STEADY)) == (
        " 40.0%  bsp  200 samples/s  loss 0.25  waiting 25%  ETA 6 s"
    )


def test_recent_speed_counts_not_the_mean() -> None:
    slow = [
        one
        for s in range(1, 31)
        for one in (
            row("step", 6.0 + s, protocol="local", units=80 + s, progress=0.4 + s / 200, loss=0.2),
            workers(6.0 + s, 800 + 10 * s, 6.0 + 0.2 * s, 2.0 + 1.8 * s),
        )
    ]
    view = live.view(START + STEADY + slow)
    assert view.samples_per_s == pytest.approx(10)
    assert view.waiting == pytest.approx(0.9)
    assert view.seconds_left == pytest.approx(90, rel=1e-3)
    assert len(view.points) <= 13
    assert live.line(view) == " 55.0%  local  10 samples/s  loss 0.2  waiting 90%  ETA 1:30"


def test_a_loss_that_is_no_number() -> None:
    view = live.view([*START, row("step", 3.0, protocol="bsp", units=1, progress=0.1, loss="nan")])
    assert "loss nan" in live.line(view)


def test_staleness_stands_in_the_line_while_shards_are_in_charge() -> None:
    step = row("step", 6.0, protocol="asp", units=80, progress=0.4, loss=0.2, staleness=4)
    assert "  asp  200 samples/s  loss 0.2  staleness 4  waiting 25%" in live.line(
        live.view([*START, *STEADY, step])
    )
    back = row("phase", 8.0, protocol="bsp", units=120, progress=0.6)
    assert "staleness" not in live.line(live.view([*START, *STEADY, step, back]))


def test_unknown_and_incomplete_records_are_harmless() -> None:
    kinds = ["step", "pushes", "diverged", "rollback", "end"]
    strange = [row("novel", 1.0), {"type": "workers", "t": 1}, *({"type": kind} for kind in kinds)]
    assert live.view(START + strange).plan == "bsp:50% local"
    assert sum(event(record) is not None for record in strange) == 3


def test_lines_of_their_own() -> None:
    switch = {"from": "bsp", "to": "local", "drain_ms": 1, "settle_ms": 9, "transfer_ms": 2}
    told = event(row("switch", 7.0, units=100, progress=0.5, **switch))
    assert told == "switch bsp → local at 50.0% (100 units): 12.0 ms (drain 1.0, settle 9.0, transfer 2.0)"
    assert event(START[1]) == "0.0%: bsp"
    assert event(row("warning", 1.0, message="odd")) == "warning: odd"
    assert event(STEADY[0]) is None
    assert event(pushes(9.0, 600, 604)) == "asp: 1,204 pushes, staleness 3.0 on average, 9 at most"
    assert event(pushes(9.0, 45, 43, 12, bound_waits=2, bound_wait_s=0.5)) == (
        "asp: 100 pushes, staleness 3.0 on average, 9 at most; rank 2 made 12% of them; "
        "6 waits at the bound, 1.5 s"
    )
    diverged = {"rank": 2, "clock": 31, "units": 120, "loss": "nan", "reason": "the loss is nan"}
    assert event(row("diverged", 8.0, **diverged, staleness=7)) == (
        "diverged on rank 2 (its step 31, 120 units, staleness 7): the loss is nan"
    )
    assert event(row("diverged", 8.0, **diverged, staleness=None)) == (
        "diverged on rank 2 (its step 31, 120 units): the loss is nan"
    )
    rollback = {"units": 120, "path": "a.pt", "to_units": 100, "reason": "the loss is nan"}
    assert event(row("rollback", 9.0, **rollback)) == (
        "rollback from 120 to 100 units (a.pt), on with bsp: the loss is nan"
    )


def test_summary() -> None:
    evaluation = row("evaluation", 12.0, units=200, progress=1.0, values={"accuracy": 0.9312345, "n": 3})
    assert live.summary(live.view([*START, *STEADY, evaluation, END])) == (
        "bsp:50% local on 2 workers: 10.0 s, 200 samples/s, waiting 25.0%, final loss 0.1\n"
        "last evaluation: accuracy 0.9312, n 3"
    )
    phases = [pushes(9.0, 30, 30, mean=1.0), pushes(11.0, 10, 10, mean=5.0)]
    assert "waiting 25.0%, mean staleness 2.0, final loss 0.1" in live.summary(
        live.view([*START, *STEADY, *phases, END])
    )
    assert live.line(live.view([*START, *STEADY, END])).startswith("100.0%")
    assert live.summary(live.view(START + STEADY)) == "stopped at 40.0% of bsp:50% local"
    assert live.summary(live.View()) == "no run recorded"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(3.24, "3 s"), (60, "1:00"), (125.4, "2:05"), (3725, "1:02:05"), (float("inf"), "?")],
)
def test_clock(seconds: float, text: str) -> None:
    assert live.clock(seconds) == text


def test_follower_reads_each_record_once_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    follower = live.Follower(path)
    assert follower.read() == []
    first, second = (
        json.dumps(row("warning", 1.0, message="ä"), ensure_ascii=False).encode() + b"\n",
        b'{"type": "end"}\n',
    )
    cut = first.index(b"\xa4")  # inside a character
    with path.open("wb", buffering=0) as file:
        file.write(first[:cut])
        assert follower.read() == []
        file.write(first[cut:] + b"no json\n[1]\n" + second)
        assert [record["type"] for record in follower.read()] == ["warning", "end"]
        assert follower.read() == []


def test_plain_lines_where_there_is_no_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offbeat.screen.EVERY", 0.0)
    path = tmp_path / "journal.jsonl"
    screen = Screen(label="x: ")
    screen.follow(tmp_path)
    for records in (START, STEADY, STEADY[:1]):
        with path.open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
        screen.update()
    screen.output(0, "out", "from the script\n")
    screen.close()
    out, err = capsys.readouterr()
    assert out == "from the script\n"
    assert err.startswith("offbeat: x: 0.0%: bsp\noffbeat: x:  40.0%  bsp  200 samples/s")


def test_one_line_at_the_bottom_of_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    screen = Screen()
    screen.follow(tmp_path)
    (tmp_path / "journal.jsonl").write_text("".join(json.dumps(r) + "\n" for r in START + STEADY))
    screen.update()
    screen.output(0, "out", "10%\r20%\nplain [bold]words[/bold]\n")
    screen.close()
    text = terminal.getvalue()
    assert "40.0%  bsp  200 samples/s" in text
    assert "plain [bold]words[/bold]" in text
    assert "10%" not in text


def test_quiet_says_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "journal.jsonl").write_text("".join(json.dumps(r) + "\n" for r in START))
    screen = Screen(quiet=True)
    screen.follow(tmp_path)
    screen.update()
    assert capsys.readouterr() == ("", "")


# The comparison


def run(plan: str, seconds: float, curve: list[tuple[float, float]], **end: Any) -> Run:
    """A run that begins 2 s after its spawn; `curve` is in seconds since the first step."""
    evaluations = [row("evaluation", 2 + t, values={"accuracy": a, "loss": 1.0}) for t, a in curve]
    return Run(plan, [*START, *evaluations, {**END, "seconds": seconds, **end}])


def test_compare_uses_the_worst_plans_best_accuracy() -> None:
    result = compare(
        [
            run("bsp", 10.0, [(2, 0.5), (4, 0.7), (10, 0.9)]),
            run("local", 5.0, [(1, 0.6), (3, 0.8), (5, 0.75)], loss="nan"),
        ]
    )
    assert result.target == 0.8
    bsp, local = result.rows
    assert (bsp.to_target, local.to_target) == (10, 3)
    assert (bsp.relative, local.relative) == (1.0, 0.5)
    assert (bsp.accuracy, local.accuracy) == (0.9, 0.75)
    assert (bsp.samples_per_s, bsp.waiting, bsp.loss) == (200.0, 0.25, 0.1)
    assert json.loads(json.dumps(result.as_json(), allow_nan=False))["plans"][1]["loss"] == "nan"


def shown(*runs: Run) -> str:
    console = Console(file=io.StringIO(), width=140)
    console.print(table(compare(runs)))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_policy_is_shown_beside_its_plan() -> None:
    assert "bsp:10% asp [elastic(count=2)]" in shown(run("bsp:10% asp [elastic(count=2)]", 5.0, []))


def test_staleness_is_weighted_by_pushes_and_has_a_column_only_then() -> None:
    bsp, asp = run("bsp", 10.0, []), run("asp:10% bsp:50% asp", 5.0, [])
    stale = Run(asp.plan, [*asp.records, pushes(3.0, 30, 30, mean=1.0), pushes(9.0, 15, 5, mean=5.0)])
    idle = Run("bsp:100% asp", [*bsp.records, pushes(9.0, 0, 0, mean=0.0)])
    result = compare([bsp, stale, idle])
    assert [one.staleness for one in result.rows] == [None, 2.0, None]
    assert [one["staleness"] for one in result.as_json()["plans"]] == [None, 2.0, None]
    failed = Run("ssp", START, error="rank 1 failed")
    lines = shown(bsp, stale, failed).splitlines()
    head = next(line for line in lines if "waiting" in line)
    assert head.index("waiting") < head.index("staleness") < head.index("final loss")
    edge = head.index("staleness") + len("staleness")
    under = {line.strip().split("  ")[0]: line[:edge].split()[-1] for line in lines if line.strip()}
    assert (under["bsp"], under[stale.plan]) == ("–", "2.0")
    assert "staleness" not in shown(bsp, asp, failed)


def test_a_failed_plan_has_a_row_and_no_say() -> None:
    failed = Run("local", [*START, row("evaluation", 3, values={"accuracy": 0.1})], error="rank 1 failed")
    result = compare([failed, Run("asp", START), run("bsp", 10.0, [(2, 0.5)])])
    assert result.target == 0.5
    assert [one.error for one in result.rows] == ["rank 1 failed", "it did not end", None]
    assert result.rows[2].relative is None
    assert shown(failed, Run("asp", START), run("bsp", 10.0, [(2, 0.5)])).count("failed") == 2


def test_plans_without_evaluations() -> None:
    result = compare([run("bsp", 10.0, []), run("local", 8.0, [])])
    assert result.target is None
    assert [(one.accuracy, one.to_target) for one in result.rows] == [(None, None)] * 2
    assert "time to the target" in shown(run("bsp", 10.0, []), run("local", 8.0, []))


def test_units_stand_in_for_samples_that_nobody_counted() -> None:
    steady = [one if one["type"] == "step" else workers(one["t"], 0, 1.5, 0.5) for one in STEADY]
    assert "  20 units/s  " in live.line(live.view(START + steady))
    end = {**END, "samples": 0, "samples_per_s": 0.0}
    assert ", 20 units/s, " in live.summary(live.view([*START, *steady, end]))
