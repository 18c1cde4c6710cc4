"""A host that is cut off silently, in the middle of something: the others go on, and nothing is lost.

Over an emulated network that is no part of this repository: HOSTS_TOOL names its hosts.py; needs root."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from offbeat import journal
from offbeat.audit import audit
from tests.jobs import same_end

TOOL = os.environ.get("HOSTS_TOOL", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not Path(TOOL).is_file() or os.geteuid() != 0,
        reason="emulated hosts need HOSTS_TOOL=PATH/hosts.py and root",
    ),
]

TRAIN = """
import sys, time
from pathlib import Path
import offbeat
from tests import scripts_losses
from tests.scripts_losses import Loss

def vanish():
    if not Path("now").exists():
        Path("now").touch()
        while not Path("cut").exists():
            time.sleep(0.01)

scripts_losses.die = vanish
plan, moment, total = sys.argv[1:]
saves = "40u" if moment == "checkpoint" else ""
found = scripts_losses.mortal(Loss(plan, int(total), who=2, moment=moment, saves=saves, pace=0.02, after=12))
print("ended with", found.units, float(found.final.double().sum()))
"""
ROOT = Path(__file__).resolve().parent.parent
HOSTS, TOTAL, PORT = 3, 400, 29553


@pytest.fixture(scope="module")
def lab() -> Iterator[Any]:
    spec = importlib.util.spec_from_file_location("hosts", TOOL)
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    with tool.Hosts(HOSTS, rate="200mbit", name="cuts") as hosts:
        yield hosts


@pytest.mark.parametrize(
    ("plan", "moment"),
    [
        ("bsp", "backward"),
        ("bsp", "step"),
        ("bsp:60u local(2)", "switch"),
        ("bsp", "checkpoint"),
        ("local(3)", "average"),
        ("asp", "backward"),
        ("asp", "push"),
        ("asp", "pull"),
        ("asp:60u bsp", "switch"),
        ("asp", "checkpoint"),
    ],
)
def test_the_others_go_on_without_a_host_that_is_cut(
    lab: Any, tmp_path: Path, plan: str, moment: str
) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    place = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    launchers = []
    for host in range(HOSTS):
        words = [sys.executable, "-m", "offbeat", "run", "-n", 1, "--nnodes", HOSTS, "--node-rank", host]
        words += ["--rdzv-endpoint", f"{lab.address(0)}:{PORT}", "--min", 1, "--heartbeat", 2, "--plan", plan]
        words += ["--out", "out", "--all-output", "train.py", plan, moment, TOTAL]
        with (tmp_path / f"h{host}.log").open("wb") as log:
            options = {"cwd": tmp_path, "stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            launchers.append(lab.popen(host, [str(word) for word in words], extra=place, **options))

    def said() -> str:
        return "".join((tmp_path / f"h{host}.log").read_text(errors="replace") for host in range(HOSTS))

    try:
        end = time.monotonic() + 120
        while not (tmp_path / "now").exists():
            assert time.monotonic() < end, said()
            time.sleep(0.02)
        lab.cut(2)
        (tmp_path / "cut").touch()
        assert [one.wait(180) for one in launchers[:2]] == [0, 0], said()
    finally:
        for one in launchers:  # that of the host that is cut waits on
            one.kill()
            one.wait(10)
        lab.mend(2)
    rows = journal.read(tmp_path / "out")
    assert next(row["units"] for row in rows if row["type"] == "end") >= TOTAL
    assert [row["members"] for row in rows if row["type"] == "members"][-1] == [0, 1]
    same_end("".join((tmp_path / f"h{host}.log").read_text() for host in range(2)), 2)
    (proof,) = audit(rows)
    assert proof.clean, proof.lines()
    assert proof.ended
    assert proof.missing <= 8
