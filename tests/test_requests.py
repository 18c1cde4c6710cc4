"""A person at the keyboard: `offbeat ctl`, and workers that come by the same command (`--max`)."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from commands import Command

from offbeat import journal
from offbeat.plan import parse, to_text
from offbeat.policies.switches import Stragglers
from offbeat.protocols import Protocol
from offbeat.requests import following
from tests.jobs import free_port, job, same_end, wait_for


@pytest.fixture(autouse=True)
def _cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def ctl(*words: object) -> tuple[int, str, str]:
    return Command("ctl", "out", *words).end()


def rows(kind: str) -> list[journal.Record]:
    return [row for row in journal.read("out") if row["type"] == kind]


@pytest.mark.parametrize(
    "plan",
    [
        "bsp:95% asp",
        pytest.param("asp:95% bsp", marks=pytest.mark.slow),
        pytest.param("dasgd(4,2):95% bsp", marks=pytest.mark.slow),
    ],
)
def test_what_a_person_asks_is_done(plan: str) -> None:
    command = job(3000, "--min", 2, "--plan", plan)
    wait_for("pid1.0")
    code, out, _ = ctl("status")
    assert code == 0
    assert "members: 0, 1, 2 of 3 at the start" in out
    code, out, _ = ctl("checkpoint", "here.pt")
    assert (code, Path("here.pt").exists()) == (0, True), out
    assert out.startswith(f"saved {Path('here.pt').absolute()} at ")
    code, _, err = ctl("checkpoint", "here.pt/below-a-file.pt")
    assert code == 1
    assert err.startswith("offbeat: not done: the checkpoint ")
    code, out, _ = ctl("switch")
    assert code == 0
    assert out.startswith(plan.rpartition(" ")[2] + " from ")
    code, _, err = ctl("switch")
    assert code == 1
    assert "nothing comes after" in err
    code, out, _ = ctl("switch", "local(3)")
    assert code == 0, out
    code, out, _ = ctl("drop", 1)
    assert code == 0
    assert out == "rank 1 has ended; members are ranks 0, 2\n"
    code, _, err = ctl("drop", 1)
    assert code == 1
    assert "rank 1 is no member; members are ranks 0, 2" in err
    code, _, err = ctl("drop", 0)
    assert code == 1
    assert "--min is 2" in err
    code, out, err = command.end()
    assert code == 0, err
    same_end(out, 2)
    assert [row["do"] for row in rows("request") if row["ok"]] == ["checkpoint", "switch", "switch", "drop"]
    assert [row["to"] for row in rows("switch")] == [plan.rpartition(" ")[2], "local(period=3)"]
    assert [row["members"] for row in rows("members")] == [[0, 2]]
    assert Command("audit", "out").end()[0] == 0
    code, out, _ = ctl("status")
    assert out.endswith("the job has ended\n")
    code, _, err = ctl("drop", 0)
    assert code == 2
    assert err == "offbeat: error: no job runs in out (it has no launcher.json)\n"


@pytest.mark.slow
def test_rank_0_may_be_dropped() -> None:
    command = job(1000, "--min", 2)
    wait_for("pid1.0")
    assert ctl("drop", 0)[0] == 0
    code, out, err = command.end()
    assert code == 0, err
    same_end(out, 2)
    assert rows("end")[0]["units"] >= 1000
    assert Command("audit", "out").end()[0] == 0


@pytest.mark.slow
def test_without_min_a_person_may_ask_too() -> None:
    command = job(1000)
    wait_for("pid1.0")
    assert ctl("checkpoint")[0] == 0
    assert Path("out/ctl.pt").exists()
    code, out, err = command.end()
    assert code == 0, err
    same_end(out, 3)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["drop"], "drop: which rank? A number from 0"),
        (["drop", "first"], "drop first: which rank? A number from 0"),
        (["switch", "bps"], "did you mean 'bsp'?"),
        (["checkpoint"], "no job runs in out"),
        (["status"], "out holds no journal.jsonl"),
    ],
)
def test_what_cannot_be_asked(words: list[object], text: str) -> None:
    code, _, err = ctl(*words)
    assert code == 2
    assert text in err


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["bsp:50% asp", "dasgd(4,2)"])
def test_the_same_command_adds_workers(plan: str) -> None:
    words = ["--min", 2, "--max", 7, "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--plan", plan]
    first = job(3000, *words)
    wait_for("pid1.0")
    more = job(3000, *words)
    wait_for("pid5.0")
    code, _, err = job(3000, *words).end()
    assert code == 2
    assert "-n 3: the job at 127.0.0.1:" in err
    assert "has had 6 workers, and there may be 7 (--max)" in err
    code, out, err = first.end()
    assert code == 0, err
    same_end(out, 3)
    code, others, err = more.end()
    assert code == 0, err
    assert "comes to the job at 127.0.0.1:" in err
    same_end(out + others, 6)
    assert rows("members")[-1]["members"] == [0, 1, 2, 3, 4, 5]
    assert rows("end")[0]["units"] >= 3000
    assert Command("audit", "out").end()[0] == 0


@pytest.mark.slow
def test_those_that_came_may_be_killed_and_dropped() -> None:
    words = ["--min", 2, "--max", 6, "--heartbeat", 1, "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    first = job(6000, *words)
    wait_for("pid1.0")
    more = job(6000, *words)
    os.kill(wait_for("pid4.0"), signal.SIGKILL)
    os.kill(wait_for("pid1.0"), signal.SIGKILL)
    wait_for("pid4.1")
    assert ctl("drop", 5)[0] == 0
    code, _, err = first.end()
    assert code == 0, err
    code, _, err = more.end()
    assert code == 0, err
    assert rows("members")[-1]["members"] == [0, 1, 2, 3, 4]
    assert Command("audit", "out").end()[0] == 0


@pytest.mark.slow
def test_a_host_that_came_may_go() -> None:
    """Its launcher is asked to stop: the others go on."""
    words = ["--min", 2, "--max", 6, "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    first = job(4000, *words)
    wait_for("pid1.0")
    more = job(4000, *words)
    wait_for("pid4.0")
    time.sleep(2)
    more.signal(signal.SIGTERM)
    assert more.end()[0] == 128 + signal.SIGTERM
    code, out, err = first.end()
    assert code == 0, err
    same_end(out, 3)
    assert rows("members")[-1]["members"] == [0, 1, 2]
    assert Command("audit", "out").end()[0] == 0


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--max", 5], "--max 5 belongs to a job whose members may change: add --min"),
        (["--max", 5, "--min", 2], "--max 5 needs --rdzv-endpoint HOST:PORT"),
        (
            ["--max", 2, "--min", 2, "--rdzv-endpoint", "127.0.0.1:29999"],
            "--max 2: less than the 3 workers that the job begins with or needs",
        ),
    ],
)
def test_wrong_words_start_nothing(words: list[object], text: str) -> None:
    code, _, err = job(30, *words).end()
    assert code == 2
    assert text in err


@pytest.mark.parametrize(
    ("plan", "units", "left"),
    [
        ("bsp", 10, None),
        ("bsp:50% asp", 10, "asp"),
        ("bsp:50% asp", 60, None),
        ("bsp:20% local(2):60% asp", 10, "local(period=2):60% asp"),
        ("bsp:20% local(2):60% asp", 30, "asp"),
        ("bsp:20% local(2):60% asp", 70, None),
    ],
)
def test_what_comes_next(plan: str, units: int, left: str | None) -> None:
    class At:
        progress = units / 100

        def served(self, protocol: Protocol, at: float) -> bool:
            return units / 100 >= at

    At.units = units  # type: ignore[attr-defined]
    for policy in ("off", "greedy", "elastic"):
        found = following(Stragglers(policy).apply(parse(plan)), At())  # type: ignore[arg-type]
        assert (None if found is None else to_text(found)) == left


CLUSTER = """
[compute]
unit = "100 ms"
kind = "lognormal"
sigma = 0.1
[[workers]]
[link]
rate = "1 Gbit/s"
latency = "1 ms"
[[failures]]
worker = 0
at = "5 s"
restart = "6 s"
[[failures]]
worker = 2
at = "8 s"
[[joins]]
at = "10 s"
count = 2
"""


@pytest.mark.parametrize("plan", ["bsp:50% asp", pytest.param("dasgd(4,2)", marks=pytest.mark.slow)])
def test_a_virtual_cluster_loses_and_gains_workers(plan: str) -> None:
    Path("cluster.toml").write_text(CLUSTER)
    job(30).kill()  # for its script
    words = ["run", "--virtual", 4, "--cluster", "cluster.toml", "--plan", plan, "--total", 1000]
    journals = []
    for number in range(2):
        out = f"run{number}"
        code, _, err = Command(*words, "--min", 2, "--out", out, "train.py").end()
        assert code == 0, err
        journals.append(Path(out, "journal.jsonl").read_bytes())
        assert Command("audit", out).end()[0] == 0
    assert journals[0] == journals[1]
    found = [row for row in journal.read("run0") if row["type"] == "members"]
    assert [row["members"] for row in found][-1] == [0, 1, 3, 4, 5]
    assert [row["reason"] for row in found[:2]] == ["rank 0 died", "rank 2 died"]
    assert found[0]["t"] > 5.0
    code, _, err = Command(*words, "train.py").end()
    assert code == 2
    assert "cluster.toml: joins: members change only with --min; add it" in err
    code, _, err = Command(*words, "--min", 2, "--timing-only", "train.py").end()
    assert code == 2
    assert "--timing-only knows no newcomers" in err
