"""Jobs that survive deaths, by the command line."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from commands import Command

from offbeat import journal
from tests.jobs import free_port, job, same_end, wait_for, wait_for_file


@pytest.fixture(autouse=True)
def _cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("number", "plan"),
    [
        (signal.SIGKILL, "bsp:50% asp"),
        pytest.param(signal.SIGKILL, "dasgd(4,2)", marks=pytest.mark.slow),
        pytest.param(signal.SIGSTOP, "bsp", marks=pytest.mark.slow),
        pytest.param(signal.SIGSTOP, "asp", marks=pytest.mark.slow),
    ],
)
def test_a_killed_or_hung_worker_is_replaced(number: signal.Signals, plan: str) -> None:
    command = job(3000, "--min", 2, "--heartbeat", 1, "--plan", plan)
    os.kill(wait_for("pid1.0"), number)
    code, out, err = command.end()
    assert code == 0, err
    assert "rank 1" in err
    assert "starts again (1 of 3 times)" in err
    same_end(out, 3)
    rows = journal.read("out")
    members = [row["members"] for row in rows if row["type"] == "members"]
    assert members[0] == [0, 2]
    assert members[-1] == [0, 1, 2]
    assert next(row["units"] for row in rows if row["type"] == "end") >= 3000
    found = Command("audit", "out").end()
    assert found[0] == 0, found
    assert "clean: each unit was used by exactly one committed update; of 4,000 samples, 3 whole" in found[1]


@pytest.mark.slow
def test_a_worker_that_dies_before_all_have_met_is_replaced() -> None:
    command = job(3000, "--min", 2, early=True)
    os.kill(wait_for("pid1.0"), signal.SIGKILL)
    code, out, err = command.end()
    assert code == 0, err
    same_end(out, 3)


@pytest.mark.slow
def test_a_worker_that_is_stopped_while_it_starts_is_replaced() -> None:
    command = job(3000, "--min", 2, "--heartbeat", 1, early=True)
    os.kill(wait_for("pid1.0"), signal.SIGSTOP)
    code, out, err = command.end()
    assert code == 0, err
    assert "rank 1" in err
    assert "has given no sign of life for" in err
    same_end(out, 3)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "all workers that held the job's state have died: go on from a checkpoint"),
        (["--restarts", 0], "failed with signal 9, SIGKILL"),
        (
            ["--restarts", 0, "--max", 4],
            "no worker is left: each has died more often than --restarts 0 allows",
        ),
    ],
)
def test_a_job_whose_workers_are_all_killed_at_once_has_failed(words: list[object], text: str) -> None:
    command = job(3000, "--min", 1, "--rdzv-endpoint", f"127.0.0.1:{free_port()}", *words)
    pids = [wait_for(f"pid{rank}.0") for rank in range(3)]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    code, _, err = command.end()
    assert code == 1, err
    assert text in err


@pytest.mark.slow
def test_without_restarts_the_others_go_on_alone() -> None:
    command = job(900, "--min", 1, "--restarts", 0)
    os.kill(wait_for("pid1.0"), signal.SIGKILL)
    code, out, err = command.end()
    assert code == 0, err
    assert "the others go on without it" in err
    same_end(out, 2)


@pytest.mark.slow
def test_below_the_minimum_the_job_is_saved_and_ends() -> None:
    command = job(3000, "--min", 3, "--restarts", 0)
    os.kill(wait_for("pid1.0"), signal.SIGKILL)
    code, _, err = command.end()
    assert code == 1
    assert "BelowMinimum: 2 workers are left, fewer than --min 3" in err
    assert Path("out/last.pt").exists()


@pytest.mark.slow
def test_an_error_of_the_script_still_ends_the_job() -> None:
    code, _, err = job(3000, "--min", 2, fails=True).end()
    assert code == 1
    assert "ValueError: no luck" in err
    assert "starts again" not in err


RESUMES = """
import os, time
from pathlib import Path
import torch, offbeat
offbeat.init(seed=3)
data = torch.randn(4000, 8), torch.randn(4000, 1)
model = torch.nn.Linear(8, 1)
sync = offbeat.Synchronizer(model, torch.optim.SGD(model.parameters(), 0.01), plan="bsp:40% asp", total=1500)
if Path("last.pt").exists():
    sync.restore("last.pt")
    print("goes on at", sync.units)
for x, y in sync.batches(data, batch_size=4):
    torch.nn.functional.mse_loss(model(x), y).backward()
    time.sleep(0.02)
    sync.step()
    if sync.every("20%"):
        sync.save("last.pt")
    Path(f"pid{offbeat.rank()}.0").write_text(str(os.getpid()))
"""


@pytest.mark.slow
def test_after_the_first_launchers_death_the_job_is_resumed() -> None:
    Path("resumes.py").write_text(RESUMES)
    first = Command("run", "-n", 3, "--min", 2, "--out", "first", "resumes.py")
    workers = [wait_for(f"pid{rank}.0") for rank in range(3)]
    wait_for_file("last.pt")
    first.kill()
    end = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < end, "workers outlive their launcher"
        time.sleep(0.05)
    code, out, err = Command("run", "-n", 3, "--min", 2, "--out", "second", "resumes.py").end()
    assert code == 0, err
    assert "goes on at 3" in out  # 300 units, or one step's more
    (end_row,) = [row for row in journal.read("second") if row["type"] == "end"]
    assert 1500 <= end_row["units"] < 1503
    code, out, _ = Command("audit", "second").end()
    assert code == 0
    assert "clean: each unit was used by exactly one committed update; of 4,000 samples, 1 whole" in out


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["bsp", "asp"])
def test_a_worker_that_comes_back_restores_nothing(plan: str) -> None:
    """Its script asks for it, as it did in the beginning, when there was no checkpoint."""
    Path("resumes.py").write_text(RESUMES)
    command = Command("run", "-n", 3, "--min", 2, "--out", "out", "--plan", plan, "resumes.py")
    wait_for_file("last.pt")
    os.kill(wait_for("pid1.0"), signal.SIGKILL)
    code, _, err = command.end()
    assert code == 0, err
    assert [row["members"] for row in journal.read("out") if row["type"] == "members"] == [[0, 2], [0, 1, 2]]
    assert not [row for row in journal.read("out") if row.get("action") == "restored"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--min", 0], "--min 0: at least one worker"),
        (["--min", 4], "--min 4: more than the 3 workers"),
        (["--heartbeat", 3], "--heartbeat 3 belongs to a job that survives deaths: add --min"),
        (["--min", 2, "--heartbeat", 0], "--heartbeat 0: seconds, from 0.1 to 600"),
        (["--stragglers", "lazy"], "--stragglers is one of off, observe, greedy, elastic; got 'lazy'"),
        (["--stragglers", "elastic(window=few)"], "window is a whole number; got 'few'"),
    ],
)
def test_wrong_words_start_nothing(words: list[object], text: str) -> None:
    code, _, err = job(30, *words).end()
    assert code == 2
    assert text in err
