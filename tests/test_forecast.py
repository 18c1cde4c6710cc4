"""Predicted against actual: what a run with a profile writes down, and when it says that they part."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import Command

from offbeat.journal import read
from offbeat.planner.actual import AGAIN, ENOUGH, WARM, Forecast, Seen
from offbeat.planner.forms import Forms
from offbeat.protocols import BSP, DaSGD
from offbeat.virtual.cluster import Profile
from tests.test_forms import SMALL, cluster
from tests.test_profile import TRAIN


class Told:
    def __init__(self, found: Any = None, batch: int | None = None) -> None:
        self.rows: list[dict[str, Any]] = []
        self.warnings: list[str] = []
        self.cluster = found or cluster(4)
        self.forecast = Forecast(self.cluster, SMALL, 1.0, self._record, self.warnings.append, batch)

    def _record(self, type: str, **fields: Any) -> None:
        self.rows.append({"type": type, **fields})

    def run(
        self, protocol: Any, seconds: float, slower: float = 1.0, own: float = 0.102, since: float = 0.0
    ) -> None:
        """Looks once a second at a run whose iterations take `slower` times what is predicted."""
        each = Forms(self.cluster, SMALL).of(protocol).seconds * slower
        at = since
        while at <= since + seconds:
            steps = int((at - since) / each)
            self.forecast.look(protocol, 4, Seen(at, 4 * steps, 4 * steps, 4 * steps * own))
            at += 1.0


def test_a_run_as_predicted_is_written_down_and_not_warned_of() -> None:
    told = Told()
    told.run(BSP(), WARM + ENOUGH + AGAIN + 5)
    told.forecast.end()
    assert [row["type"] for row in told.rows] == ["forecast", "forecast"]
    row = told.rows[-1]
    assert (row["protocol"], row["members"]) == ("bsp", 4)
    assert row["predicted_ms"] == pytest.approx(1e3 * Forms(told.cluster, SMALL).of(BSP()).seconds, abs=1e-3)
    assert row["predicted_ms"] == pytest.approx(sum(row["parts"].values()), abs=1e-3)
    assert abs(row["error"]) < 0.02
    assert row["own_ms"] == pytest.approx(102, rel=0.01)
    assert told.warnings == []


def test_it_says_once_that_they_part_and_why() -> None:
    told = Told()
    told.run(BSP(), 30, slower=1.5)
    assert len(told.warnings) == 1
    assert told.warnings[0].startswith("under bsp an iteration takes ")
    predicted = 1e3 * Forms(told.cluster, SMALL).of(BSP()).seconds
    assert re.search(f"(49|50|51)% more than the {predicted:.0f} ms of the profile", told.warnings[0])
    assert told.warnings[0].endswith("though a worker's own part takes 102 ms: it is the links")
    told.run(DaSGD(2, 1), 30, slower=1.5, own=0.153, since=100)
    assert told.warnings[1].endswith("a worker's own part takes 153 ms, not 102 ms")
    told.run(BSP(), 30, slower=0.7, since=200)
    assert re.search("(29|30|31)% less than", told.warnings[2])


def test_too_little_says_nothing() -> None:
    told = Told()
    told.run(BSP(), WARM + ENOUGH - 2, slower=3.0)
    assert told.warnings == []
    assert told.rows == []


def test_a_profile_of_fixed_size_has_no_others() -> None:
    told = Told()
    told.forecast.look(BSP(), 5, Seen(0.0, 0))
    told.forecast.look(DaSGD(2, 1), 5, Seen(1.0, 5))
    assert len(told.warnings) == 1
    assert "nothing is predicted for 5 members" in told.warnings[0]


def test_another_batch_scales_the_units() -> None:
    found = replace(cluster(4), profile=Profile(batch=16))
    told = Told(found, batch=32)
    told.forecast.look(BSP(), 4, Seen(0.0, 0))
    assert told.forecast._predicted is not None
    assert told.forecast._predicted.computing == pytest.approx(0.202)


@pytest.mark.slow
def test_a_real_run_with_its_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(TRAIN.replace("epochs=1", "epochs=240").replace("out=False", "out='out'"))
    code, _, err = Command("profile", "-n", 2, "--steps", 12, "train.py").end()
    assert code == 0, err
    code, _, err = Command("run", "-n", 2, "--profile", "profile.toml", "--out", "out", "train.py").end()
    assert "went on training" in err  # how the script ends
    rows = [row for row in read("out") if row["type"] == "forecast"]
    assert rows
    assert rows[-1]["protocol"] == "bsp"
    assert rows[-1]["predicted_ms"] > 20


def test_a_profile_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from offbeat.cli import app

    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    done = CliRunner().invoke(app, ["run", "--profile", "none.toml", "train.py"])
    assert done.exit_code == 2
    assert "--profile none.toml: there is no such file; `offbeat profile train.py` makes one" in done.output
