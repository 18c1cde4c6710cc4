"""The papers' figures and tables: every item is whole, its commands are right, its rule is the rule. No
figure of a training is asserted."""

from __future__ import annotations

import json
import math
import random
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from test_commands import parsed
from test_examples import write_parquet

from offbeat.plan import parse
from offbeat.policies.switches import Stragglers
from offbeat.virtual.description import find
from reproduce import ROOT, page, rule, scale, train
from reproduce.__main__ import main
from reproduce.item import Item
from reproduce.items import ITEMS
from reproduce.rule import Claim, average, combined, exact, gap, near, verdict
from reproduce.runs import WORST, Result, Run, RunError, Store

MODES = ("small", "full", "quick")
EVERY = list(ITEMS.values())
TRAINED = [item for item in EVERY if item.all_runs("small")]


def reproduce(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "reproduce"), *map(str, words)], capture_output=True, text=True
    )


# Items


@pytest.mark.parametrize("item", EVERY, ids=lambda item: item.name)
def test_an_item_is_whole(item: Item) -> None:
    assert item.title.startswith(("Sync-Switch, ", "DaSGD, "))
    assert item.about
    assert 0 < item.time("small") <= 120, "what two cores do in two hours"
    for some in item.runs("small").values():
        assert len({run.seed for run in some}) == len(some) >= 3, "accuracy is compared over three seeds"


def test_the_papers_figures_and_tables_are_all_there() -> None:
    switch = {"fig5", "fig6", "fig7", "momentum", "table1", "fig11", "fig12", "fig13", "fig14", "fig15"}
    switch |= {"table2", "table3"}
    averaging = {"table1", "table2", "fig4", "fig5", "fig6", "fig7"}
    assert set(ITEMS) == {f"sync-switch-{one}" for one in switch} | {f"dasgd-{one}" for one in averaging}


def test_items_share_their_runs() -> None:
    shared = set(ITEMS["sync-switch-fig5"].all_runs("small"))
    assert set(ITEMS["sync-switch-fig11"].all_runs("small")) <= shared
    assert set(ITEMS["dasgd-fig5"].all_runs("small")) <= set(ITEMS["dasgd-table1"].all_runs("small"))
    names = [run.name for item in TRAINED for run in set(item.all_runs("small"))]
    runs = {run for item in TRAINED for run in item.all_runs("small")}
    assert len(set(names)) == len(runs), "a folder is one run's"


def made(run: Run, chance: random.Random) -> Result:
    """What a run may find."""
    progress = [k / 25 for k in range(1, 26)]
    looks = [
        (at, {name: chance.random() for name in ("gradient", "moved", "change", "cosine")}) for at in progress
    ]
    return Result(
        chance.random(),
        chance.random(),
        chance.random(),
        100 * chance.random(),
        tuple((at, 10 * at, chance.random(), chance.random()) for at in progress),
        tuple((at, chance.random()) for at in progress),
        tuple(looks if "--look" in run.script else ()),
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("item", TRAINED, ids=lambda item: item.name)
def test_rows_say_all_that_they_must(item: Item, mode: str) -> None:
    """Whatever the trainings find."""
    chance = random.Random(0)
    found = {name: [made(run, chance) for run in some] for name, some in item.runs(mode).items()}
    rows = list(item.trained(mode, found))
    assert len({row.name for row in rows}) == len(rows) > 0
    page.table(page.COLUMNS, [page.shown(row) for row in rows])  # refuses an empty cell
    for row in rows:
        assert json.loads(json.dumps(row.values)) == row.values


CHEAP = ["sync-switch-" + name for name in ("table1", "table2", "fig5", "fig11", "fig12", "fig14")]


@pytest.mark.parametrize("name", CHEAP)
def test_the_logs_tell_the_same_again(name: str) -> None:
    rows = list(ITEMS[name].known("small"))
    path = page.RESULTS / f"{name}.json"
    kept = {row.name: row for row in page.record.Record.read(path).rows}
    for row in rows:
        assert kept[row.name].values["reproduced"] == row.values["reproduced"]
        assert kept[row.name].values["ours"] == row.values["ours"]


# Commands


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("item", TRAINED, ids=lambda item: item.name)
def test_commands_parse(item: Item, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path, {"cifar10": "DIR", "cifar100": "DIR100"})
    for run in {(run.launch, run.script): run for run in item.all_runs(mode)}.values():
        program, *words = store.command(run)
        assert program == "offbeat"
        given_ = parsed(list(words)).params
        assert given_["script"] == "reproduce/train.py"
        assert Path(given_["out"]).parent == tmp_path
        parse(given_["plan"])
        monkeypatch.setattr(sys, "argv", [given_["script"], *given_["args"]])
        asked = train.arguments()
        assert asked.data == ("DIR100" if run.data == "cifar100" else "DIR")
        monkeypatch.chdir(ROOT)
        if given_["virtual"] is not None:
            find(given_["cluster"]).sized(given_["virtual"])
        if given_["stragglers"] is not None:
            Stragglers.parse(given_["stragglers"])
        if mode == "full":
            assert asked.device == "cuda"
            assert (asked.width, asked.depth, asked.subset, asked.bf16) == (1, 1, None, False)
            assert given_["virtual"] is None or item.name == "sync-switch-fig15", "stragglers are virtual"


def test_full_is_the_published_size() -> None:
    one, two, three = (scale.switched("full", number) for number in "123")
    assert (one.workers, one.units, two.workers, two.units) == (8, 64_000, 8, 128_000)
    assert (three.workers, three.units) == (16, 64_000)
    assert {one.seeds, two.seeds, three.seeds} == {5}
    assert scale.averaged("full").units == 2450 * 32


def test_a_dry_run_prints_commands_and_runs_nothing(tmp_path: Path) -> None:
    done = reproduce("dasgd-fig5", "--dry-run", "--data", "DIR", "--runs", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    head, *lines = done.stdout.splitlines()
    assert head == "# dasgd-fig5"
    assert len(lines) == 9
    for line in lines:
        assert shlex.split(line)[:2] == ["offbeat", "run"]
        assert line.endswith("--data DIR")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fig5"], "no item is called fig5; there are all, sync-switch-fig5"),
        (["--full", "--quick"], "--full and --quick are two sizes"),
        (["all", "--jobs", "0"], "--jobs 0: one training at a time, or more"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    words: Sequence[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["reproduce", *words])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert message in capsys.readouterr().err


def test_a_data_set_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    none = str(tmp_path / "none")
    monkeypatch.setattr(sys, "argv", ["reproduce", "--quick", "sync-switch-fig13", "--data", none])
    with pytest.raises(SystemExit, match=f"trains on cifar10, and {none} is no folder: give --data DIR"):
        main()


# The rule


def test_an_effect_counts_when_it_exceeds_two_standard_errors() -> None:
    a, b = [10.0, 11.0, 12.0], [9.0, 10.0, 11.0]  # a difference of 1, an error of √(1/3 + 1/3) = 0.816
    assert gap("a less b", a, b, least=0).verdict == "undecided"
    assert gap("a less b", [x + 0.64 for x in a], b, least=0).verdict == "yes"  # 1.64 > 1.633
    assert gap("a less b", [x - 2.64 for x in a], b, least=0).verdict == "no"
    assert gap("a less b", a, b, -3, 3).verdict == "yes"
    assert gap("a less b", a, b, -2, 2).verdict == "undecided"
    found = gap("a less b", a, b)
    assert found.high - found.middle == pytest.approx(rule.ERRORS * math.sqrt(2 / 3))


def test_one_seed_tells_nothing() -> None:
    assert average("a", [5.0], least=0).verdict == "undecided"
    assert "one seed" in average("a", [5.0], least=0).found


def test_what_has_no_chance_in_it_is_compared_as_it_is() -> None:
    assert [near("t", value, 4.0, 0.05).verdict for value in (3.79, 3.81, 4.2, 4.21)] == [
        "no",
        "yes",
        "yes",
        "no",
    ]
    assert [exact("d", d, 1, 2).verdict for d in (0, 1, 2, 3)] == ["no", "yes", "yes", "no"]


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [("yy", "yes"), ("yn", "partly"), ("yu", "partly"), ("nn", "no"), ("nu", "no"), ("uu", "undecided")],
)
def test_a_row_is_what_its_claims_are(verdicts: str, expected: str) -> None:
    claims = {"y": exact("y", 1, 0, 2), "n": exact("n", 3, 0, 2), "u": Claim("u", 2, 1, 3, 0, 2)}
    assert verdict([claims[one] for one in verdicts]) == expected


def test_a_row_without_a_claim_is_refused() -> None:
    with pytest.raises(ValueError, match="a row without a claim"):
        verdict([])


NUMBERS = st.floats(-100, 100)


@given(st.lists(NUMBERS, min_size=2, max_size=5), st.lists(NUMBERS, min_size=2, max_size=5))
def test_a_gap_is_the_other_way_round_the_negative(a: list[float], b: list[float]) -> None:
    there, back = gap("a − b", a, b, least=0), combined("b − a", [(1, b), (-1, a)], most=0)
    assert (there.low, there.high) == pytest.approx((-back.high, -back.low), abs=1e-9)
    if abs(there.low) > 1e-6 and abs(there.high) > 1e-6:
        assert there.verdict == back.verdict


@given(st.lists(NUMBERS, min_size=1, max_size=4), NUMBERS)
def test_claims_come_back_from_json(values: list[float], least: float) -> None:
    claim = average("a", values, least=least, unit="points")
    assert Claim.of(json.loads(json.dumps(claim.as_json(), allow_nan=False))) == claim


# The page


def test_the_page_is_what_the_results_say() -> None:
    assert page.PAGE.read_text() == page.written(page.RESULTS), "run: python reproduce --page"


def test_results_follow_from_their_figures() -> None:
    paths = list(page.RESULTS.glob("*.json"))
    assert paths
    for path in paths:
        found = page.record.Record.read(path)
        assert found.part == path.stem
        assert found.part in ITEMS
        assert {"cpu", "cores", "date"} <= set(found.machine)
        assert {"python", "torch", "offbeat"} <= set(found.versions)
        assert found.rows
        for row in found.rows:
            assert row.values["reproduced"] == verdict([Claim.of(claim) for claim in row.values["claims"]])


def test_an_empty_cell_is_refused() -> None:
    with pytest.raises(ValueError, match="the row 'a' says nothing in the column 'here'"):
        page.table(("row", "here"), [("a", " ")])


def test_an_item_without_results_says_how_to_run_it(tmp_path: Path) -> None:
    text = page.written(tmp_path)
    for item in EVERY:
        assert f"Not run yet: `python reproduce {item.name}`, about" in text


# Runs


def test_one_cycle_is_dasgd_s() -> None:
    assert [train.one_cycle(at) for at in (0, 0.3, 1)] == pytest.approx([0.01, 1, 0.01])
    assert train.one_cycle(0.15) == pytest.approx(train.one_cycle(0.65))


def test_a_look_sees_what_a_step_changes() -> None:
    """On a loss whose gradient is known: of a linear net it changes in proportion to the distance, and not at
    all without a step."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.BatchNorm1d(3 * 4 * 4), torch.nn.Linear(48, 10))
    images, labels = torch.randint(0, 256, (40, 3, 4, 4), dtype=torch.uint8), torch.randint(0, 10, (40,))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    look = train.Look(net, images, labels, torch.device("cpu"))
    look.begin()
    assert look.end() == pytest.approx(
        {"gradient": look_norm(net, images, labels), "moved": 0, "change": 0, "cosine": 1}
    )
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    look.begin()
    with torch.no_grad():
        net[2].bias[0] += 3.0
    found = look.end()
    assert found["moved"] == pytest.approx(3.0)
    assert found["change"] > 0
    assert found["cosine"] < 1


def look_norm(net: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    loss = F.cross_entropy(net(train.data.normalize(images)), labels)
    found = math.sqrt(sum(float(g.square().sum()) for g in torch.autograd.grad(loss, list(net.parameters()))))
    net[1].reset_running_stats()  # type: ignore[operator, index]
    return found


def journal(folder: Path, *rows: dict[str, Any]) -> None:
    folder.mkdir(parents=True)
    lines = [json.dumps({"t": number, **row}) + "\n" for number, row in enumerate(rows)]
    (folder / "journal.jsonl").write_text("".join(lines))


END = {"type": "end", "seconds": 5.0}
LAST = {"type": "evaluation", "progress": 1.0, "values": {"accuracy": 0.5, "loss": 1.0, "train_loss": "nan"}}
STEP = {"type": "step", "progress": 0.5, "loss": "inf"}


def test_a_run_is_over_with_its_last_evaluation(tmp_path: Path) -> None:
    runs = scale.switched("quick", "1").runs("bsp")
    store = Store(tmp_path, {"cifar10": "DIR"})
    assert store.missing([*runs, *runs]) == runs
    journal(tmp_path / runs[0].name, STEP, END)
    assert store.missing(runs) == runs
    with pytest.raises(LookupError, match="is not over"):
        store.finished(runs[0])
    journal(tmp_path / runs[1].name, STEP, END, LAST)
    assert store.missing(runs) == runs[:1]
    found = store.finished(runs[1])
    assert (found.accuracy, found.seconds) == (0.5, 5.0)
    assert (found.train_loss, found.steps) == (WORST, ((0.5, WORST),)), (
        "what has diverged counts as the worst"
    )


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    draw = np.random.default_rng(0)
    for split, count in (("train", 256), ("test", 100)):
        pixels = draw.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
        write_parquet(folder, split, pixels, draw.integers(0, 10, count).tolist())
    return folder


def test_runs_are_done_once_and_an_interrupted_one_again(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two virtual workers, BSP and then ASP."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    store = Store(tmp_path / "runs", {"cifar10": str(pictures)})
    (run, *_) = scale.switched("quick", "1").runs("bsp:50% asp", "--look 25%")
    store.complete([run, run], 2)
    found = store.finished(run)
    assert [at for at, _ in found.looks] == sorted({at for at, _ in found.looks})
    assert len(found.looks) >= 3
    assert {name for _, values in found.looks for name in values} == {"gradient", "moved", "change", "cosine"}
    assert 0 <= found.accuracy <= 1
    assert len(found.curve) >= 4
    path = tmp_path / "runs" / run.name / "journal.jsonl"
    written = path.stat().st_mtime_ns
    store.complete([run], 1)
    assert path.stat().st_mtime_ns == written, "it is kept"
    text = path.read_text()
    path.write_text(text[: len(text) // 2])
    store.complete([run], 1)
    assert store.finished(run).accuracy == found.accuracy, "the same seed, the same run"
    wrong = Store(tmp_path / "wrong", {"cifar10": str(tmp_path)})
    with pytest.raises(RunError, match=r"a run ended with code 1:\noffbeat run (?s:.*)no train-\*\.parquet"):
        wrong.complete([run], 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sync-switch-fig13", "dasgd-fig5", "sync-switch-table3"])
def test_an_item_runs_small(name: str, pictures: Path) -> None:
    before = {path: path.read_bytes() for path in [page.PAGE, *page.RESULTS.glob("*")]}
    done = reproduce("--quick", name, "--data", pictures)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not kept" in done.stdout
    assert before == {path: path.read_bytes() for path in [page.PAGE, *page.RESULTS.glob("*")]}
