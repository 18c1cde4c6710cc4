"""`offbeat watch`: the view that it draws, and the command in a pseudo-terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from journals import calm, eventful, spoiled, write
from rich.console import Console
from typer.testing import CliRunner

from offbeat.cli import app
from offbeat.journal import Record
from offbeat.live import View, line, summary, view
from offbeat.panel import panel, sparkline
from offbeat.scalars import Scalars


def drawn(state: View, width: int = 100, height: int = 30, note: str = "") -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(panel(state, width, height, note))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def until(rows: list[Record], t: float) -> View:
    return view(row for row in rows if row["t"] <= t)


def test_an_eventful_run_half_way() -> None:
    lines = drawn(until(eventful(), 6.5))
    text = "\n".join(lines)
    assert lines[0].startswith("╭─ bsp:50% asp ")
    assert re.search(r"━+ 21.2%  \d+ s left  4 s", text)
    assert re.search(
        r"bsp  \S+ samples/s  loss \S+  waiting \d+%  lr 0\.1  evaluated: accuracy \S+, loss", text
    )
    assert re.search(r"loss █+[▁-█]+  2\.19 → ", text)
    assert re.search(r"^│ +2 +\S+ +– +– +absent", text, re.MULTILINE)
    assert re.search(r"^│ +3 +\d+ +\S+ +\d+% +│", text, re.MULTILINE)
    assert "2 s  rank 2 flagged as a straggler: 4 units/s of its own time, limit 8" in text
    assert "2 s  members now 0, 1, 3: without rank 2, which is slow" in text
    flagged = drawn(until(eventful(), 4.05))
    assert any("straggler" in line and line.split()[1] == "2" for line in flagged)


def test_the_end_is_a_summary() -> None:
    text = "\n".join(drawn(view(eventful())))
    assert "100.0%  ended  15 s" in text
    assert "15.1 s, 1,060 samples/s, waiting 20.0%, mean staleness 3.0, final loss 0.05" in text
    assert "switch bsp → asp at 50.0% (500 units): 25.5 ms" in text


def test_of_many_workers_the_notable_are_shown() -> None:
    rows = calm("bsp", 60.0, workers=256)
    flag: Record = {"type": "straggler", "t": 30.0, "rank": 77, "action": "flagged"}
    gone: Record = {
        "type": "members",
        "t": 31.0,
        "members": [r for r in range(256) if r != 99],
        "reason": "x",
    }
    lines = drawn(view([*(r for r in rows if r["t"] < 40), flag, gone]))
    text = "\n".join(lines)
    assert re.search(r"│ +77 .* straggler", text)
    assert re.search(r"│ +99 .* absent", text)
    assert re.search(r"│ +255 ", text)  # it waits least: the others wait for it
    assert re.search(r"\d+ more .* medians; members 0–98, 100–255", text)


@pytest.mark.parametrize("workers", [1, 4, 256])
@pytest.mark.parametrize(("width", "height"), [(40, 10), (80, 24), (200, 60)])
def test_it_fits_the_terminal(workers: int, width: int, height: int) -> None:
    rows = eventful(workers) if workers == 4 else calm("bsp", 20.0, workers=workers)
    for t in (0.0, 2.0, 5.0, 12.2, 99.0):
        lines = drawn(until(rows, t), width, height, note="a note")
        assert max(map(len, lines)) == width
        assert len(lines) <= max(height, 12)


@settings(max_examples=60, deadline=None)
@given(spoiled())
def test_spoiled_fields_never_end_a_look(rows: list[Record]) -> None:
    state = view(rows)
    assert drawn(state)
    assert line(state)
    assert summary(state)
    assert [one for row in rows for one in Scalars().read(row)]


def test_nothing_is_known_yet() -> None:
    assert "starting" in "\n".join(drawn(View()))


@given(st.lists(st.floats(), max_size=300), st.integers(1, 90))
def test_a_sparkline_has_its_width(values: list[float], width: int) -> None:
    assert len(sparkline(values, width)) == min(width, len(values))


def test_a_sparkline_shows_the_shape() -> None:
    assert sparkline([1, 2, 3, 4, 5, 6, 7, 8], 8)[0] == "▁"
    assert sparkline([-4, -2, 0, 3], 4) == "▁▃▅█"
    assert sparkline([1, float("nan"), 1], 3) == "▁·▁"
    assert sparkline([float("inf")], 3) == "·"


def test_where_there_is_no_terminal_it_shows_once(tmp_path: Path) -> None:
    run = write(tmp_path / "run", eventful()[:60])
    done = CliRunner().invoke(app, ["watch", str(run)])
    assert done.exit_code == 0
    assert "bsp:50% asp" in done.output
    done = CliRunner().invoke(app, ["watch", str(tmp_path)])
    assert (done.exit_code, done.output) == (2, f"offbeat: error: {tmp_path} holds no journal.jsonl\n")


class Terminal:
    """`offbeat watch` in a pseudo-terminal."""

    def __init__(self, run: Path):
        self._leader, follower = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "offbeat", "watch", str(run)],
            stdin=follower,
            stdout=follower,
            stderr=follower,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"},
            start_new_session=True,
            # tests that run in the background ignore it, and their children would
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        os.close(follower)
        self.text = ""

    def wait_for(self, what: str, limit: float = 60) -> None:
        end = time.monotonic() + limit
        while what not in self.text:
            assert time.monotonic() < end, f"{what!r} did not come:\n{self.text[-3000:]}"
            self._read(0.2)

    def _read(self, seconds: float) -> None:
        if select.select([self._leader], [], [], seconds)[0]:
            try:
                self.text += os.read(self._leader, 100_000).decode(errors="replace")
            except OSError:  # nobody writes any more
                time.sleep(seconds)

    def end(self, limit: float = 60) -> int:
        """Its exit code."""
        end = time.monotonic() + limit
        while self.process.poll() is None:
            if time.monotonic() > end:
                self.process.kill()
            self._read(0.1)
        self._read(0.1)
        os.close(self._leader)
        return self.process.returncode


def test_watching_a_run_that_is_being_written(tmp_path: Path) -> None:
    rows = [json.dumps(row) + "\n" for row in eventful()]
    path = tmp_path / "journal.jsonl"
    path.write_text("".join(rows[:40]))
    terminal = Terminal(tmp_path)
    terminal.wait_for("bsp:50% asp")
    terminal.wait_for("Ctrl-C leaves; the run goes on")
    assert "asp: 500 pushes" not in terminal.text
    with path.open("a") as file:
        file.write("".join(rows[40:-1]) + rows[-1][:20])
        file.flush()
        terminal.wait_for("asp: 500 pushes")
        assert terminal.process.poll() is None
        file.write(rows[-1][20:])
    assert terminal.end() == 0
    assert "ended" in terminal.text


def test_leaving_by_ctrl_c(tmp_path: Path) -> None:
    terminal = Terminal(write(tmp_path, eventful()[:40]))
    terminal.wait_for("Ctrl-C leaves")
    os.kill(terminal.process.pid, signal.SIGINT)
    assert terminal.end() == 0
    assert "Traceback" not in terminal.text
