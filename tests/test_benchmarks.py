"""The benchmarks' machinery: the page is what the results say, and a part runs. No figure is asserted."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports one of the benchmarks' modules, which find each other by their plain names."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def named(name: str) -> ModuleType:
        return importlib.import_module(name)

    yield named
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(BENCHMARKS)):
            del sys.modules[name]


def test_the_page_is_what_the_results_say(module: Any) -> None:
    page = module("page")
    assert page.PAGE.read_text() == page.written(page.RESULTS), "run: python benchmarks --page"


def test_results_name_what_they_depend_on(module: Any) -> None:
    record, parts = module("record"), module("parts")
    for path in module("page").RESULTS.glob("*.json"):
        found = record.Record.read(path)
        assert found.part == path.stem
        assert found.part in parts.PARTS
        assert {"cpu", "cores", "date"} <= set(found.machine)
        assert {"python", "torch", "offbeat"} <= set(found.versions)
        assert found.rows


def test_a_record_comes_back_as_it_was_written(module: Any, tmp_path: Path) -> None:
    record = module("record")
    row = record.Row("bsp", {"workers": 2}, {"ms": 1.5}, 0.5, "none", (0.4, 0.6))
    made = record.Record("throughput", {"steps": 8}, [row], ["a part"], 1.0, {"cores": 2}, {"torch": "2"})
    assert record.Record.read(made.write(tmp_path)) == made


def test_rows_that_were_measured_again_replace_the_old_ones(module: Any) -> None:
    record = module("record")
    old = [record.Row(name, {"workers": 2}, {"ms": 1.0}) for name in ("bsp", "asp")]
    new = record.Record("throughput", {}, [record.Row("bsp", {"workers": 2}, {"ms": 2.0})])
    merged = new.merged(record.Record("throughput", {}, old))
    assert [(row.name, row.values["ms"]) for row in merged.rows] == [("bsp", 2.0), ("asp", 1.0)]


def test_ratios_are_taken_round_by_round(module: Any) -> None:
    ratio, spread = module("record").compared([1.0, 2.0, 4.0], [2.0, 2.0, 2.0])
    assert (ratio, spread) == (1.0, (0.5, 2.0))


def test_a_plan_that_is_slower_than_its_peer_is_named(module: Any) -> None:
    record, throughput = module("record"), module("throughput")
    where = {"network": "50 Mbit", "workers": 2, "model": "resnet8", "batch": 32, "sleep": 0.0}

    def page(own: list[float]) -> str:
        seconds = {"none": [1.0, 1.0], "DDP": [2.0, 2.0], "bsp": own}
        found = {"compute_ms": 1.0, "average_ms": 1.0, "seconds": seconds}
        rows = list(throughput.rows_of(where, found))
        return "\n".join(throughput.page(record.Record("throughput", {}, rows)))

    assert "more than the spread: no row" in page([1.9, 2.1])
    assert "more than the spread: `bsp` against DDP" in page([2.2, 2.1])


def test_an_unknown_peer_is_named_with_those_there_are(module: Any) -> None:
    with pytest.raises(ValueError, match="no peer 'horovod'; there are accelerate, torchft"):
        module("peers.environment").requirements("torchft", "horovod")


def test_a_part_runs_and_keeps_its_results(tmp_path: Path) -> None:
    words = [sys.executable, str(BENCHMARKS), "simulator", "--quick", "--results", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "simulator.json").read_text())
    assert [row["name"] for row in found["rows"]] == ["bsp"]


def test_a_part_that_needs_hosts_is_skipped_by_name(tmp_path: Path) -> None:
    words = [sys.executable, str(BENCHMARKS), "forecasts", "--results", str(tmp_path), "--hosts-tool", ""]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "skipped: what needs emulated hosts" in done.stdout
    assert not list(tmp_path.iterdir())


def test_a_part_that_is_not_there_is_named(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(BENCHMARKS), "speed"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "no part is called speed; there are throughput" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("part", ["growth", "switching", "recovery"])
def test_the_parts_that_need_no_peers_run(part: str, tmp_path: Path) -> None:
    words = [sys.executable, str(BENCHMARKS), part, "--quick", "--results", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / f"{part}.json").read_text())["rows"]


@pytest.mark.slow
@pytest.mark.parametrize("script", ["warmup", "skipped"])
def test_offbeat_is_right_where_a_peer_is_wrong(script: str) -> None:
    """Of the scripts that need nothing but PyTorch."""
    words = [sys.executable, str(BENCHMARKS / "defects" / f"{script}.py"), "--json"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    sides = json.loads(done.stdout.splitlines()[-1])["sides"]
    assert [one["right"] for one in sides] == [False, True]
    assert sides[1]["side"].startswith("offbeat")
