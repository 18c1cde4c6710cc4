"""`offbeat search`, `offbeat jobs` and `--plan recurring`, as a person uses them."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from pathlib import Path

import pytest
from commands import Command
from typer.testing import CliRunner

from offbeat.cli import app
from offbeat.cluster.spec import LaunchSpec
from offbeat.identity import FIELDS, description, fingerprint, identity, structure
from offbeat.search.core import SearchError, Trial, Wish
from offbeat.search.trials import Kind, found_in, name_of, trial_of

RUNS = Path(__file__).parent / "sync_switch_runs.csv"

TRAIN = """
import sys
import torch, offbeat
offbeat.init()
x = torch.randn(256, 4, generator=torch.Generator().manual_seed(0)); y = x.sum(1, keepdim=True)
model = torch.nn.Linear(4, 1)
sync = offbeat.Synchronizer(model, torch.optim.SGD(model.parameters(), 0.1), total=48)
for a, b in sync.batches((x, y), batch_size=8):
    torch.nn.functional.mse_loss(model(a), b).backward()
    sync.step()
if offbeat.rank() == 0:
    sync.log(accuracy=max(0.0, 1 - float(torch.nn.functional.mse_loss(model(x), y))))
"""


@pytest.fixture(autouse=True)
def _cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OFFBEAT_STORE", "jobs.sqlite")
    Path("train.py").write_text(TRAIN)


def search(*words: object) -> Command:
    return Command("search", "--virtual", 2, "--out", "found", *words, "train.py")


def made() -> dict[str, int]:
    """The journals of finished trials (they log when they have ended), with the time of their last change."""
    return {
        path.parent.name: path.stat().st_mtime_ns
        for path in Path("found").glob("trials/*/journal.jsonl")
        if '"type": "evaluation"' in path.read_text()
    }


def test_a_search_and_what_comes_of_it() -> None:
    words = ["--runs", 1, "--target-runs", 1, "--depth", 1, "--tolerance", 0.9]
    code, out, err = search(*words).end()
    assert code == 0, err
    assert 'use --plan "bsp:50% asp"' in out
    assert "the search cost " in out
    result = json.loads(Path("found/search.json").read_text())["result"]
    assert (result["plan"], result["share"]) == ("bsp:50% asp", 0.5)
    assert [point["share"] for point in result["points"]] == [1.0, 0.5]
    code, _, err = Command("run", "--virtual", 2, "--plan", "recurring", "train.py").end()
    assert code == 0, err
    assert "offbeat: recurring: bsp:50% asp" in err
    assert "recurrence 1 of " in err
    code, out, _ = Command("jobs").end()
    assert code == 0
    assert "train.py" in out
    assert "bsp:50% asp" in out


@pytest.mark.slow
def test_killed_again_and_again_it_repeats_no_finished_trial() -> None:
    words = ["--runs", 2, "--target-runs", 2, "--depth", 2, "--tolerance", 0.9, "--jobs", 2]
    seen: dict[str, int] = {}
    for number in range(4):
        command = search(*words)
        end = time.monotonic() + 120
        while len(made()) < min(len(seen) + 1, 6) and time.monotonic() < end:
            time.sleep(0.05)
        time.sleep(0.7 * number)  # at another moment each time
        with contextlib.suppress(ProcessLookupError):  # it may be over by now
            command.signal(signal.SIGKILL)
        command.process.join()
        now = made()
        assert {name: now.get(name) for name in seen} == seen
        seen = now
    code, out, err = search(*words).end()
    assert code == 0, err
    assert 'use --plan "bsp:25% asp"' in out
    now = made()
    assert {name: now.get(name) for name in seen} == seen
    assert len(now) == 2 + 2 * 2
    code, out, _ = search(*words).end()  # everything is there already
    assert (code, made()) == (0, now)
    code, _, err = search(*words, "--seed", 7).end()
    assert code == 2
    assert "holds a search with another seed: 0, not 7" in err


@pytest.mark.slow
def test_a_script_that_logs_nothing_and_one_that_fails() -> None:
    Path("train.py").write_text(TRAIN[: TRAIN.index("if offbeat.rank")])
    code, _, err = search("--runs", 1, "--target-runs", 1).end()
    assert code == 1
    assert "logged no accuracy: call sync.log(accuracy=...) in the script" in err
    Path("train.py").write_text(TRAIN.replace("total=48", "total=48 + no"))
    code, _, err = Command("search", "--virtual", 2, "train.py").end()
    assert code == 2
    assert "train.py cannot be looked at: " in err
    assert "NameError" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "which script?"),
        (["no.py"], "there is no script no.py"),
        (["train.py", "--runs", "0"], "--runs 0: a whole number from 1"),
        (["train.py", "--target", "92"], "--target 92: an accuracy above 0 and up to 1"),
        (["train.py", "--jobs", "2"], "--jobs 2: trials go side by side"),
        (["train.py", "--then", "bsp"], "--then bsp: what comes after BSP is another protocol"),
        (["train.py", "--then", "dasdg"], "did you mean 'dasgd'?"),
        (["train.py", "--where", "a=1"], "--where a=1 belongs to --simulate"),
        (["train.py", "--virtual", "2", "--timing-only"], "--timing-only trains nothing"),
        (["train.py", "--recurring", "--target", "0.9"], "leave out --target 0.9"),
        (["--simulate", "no.csv"], "--simulate no.csv: No such file"),
        (["--simulate", str(RUNS), "train.py"], "trains nothing: leave out train.py"),
        (["--simulate", str(RUNS), "--where", "setup"], "--where setup: write COLUMN=VALUE"),
    ],
)
def test_wrong_words_are_named(words: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["search", *words])
    assert result.exit_code == 2
    assert message in result.output


def test_other_options_need_the_recurring_plan() -> None:
    result = CliRunner().invoke(app, ["run", "--job", "mine", "train.py"])
    assert result.exit_code == 2
    assert "--job mine belongs to --plan recurring" in result.output


def test_published_figures_by_one_command() -> None:
    words = ["search", "--simulate", str(RUNS), "--where", "setup=1", "--where", "in_authors_search=True"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0
    assert "48 runs at 9 shares of BSP; the search over their means finds 6.25%" in result.output
    assert len([line for line in result.output.splitlines() if line.startswith("  new")]) == 12


def rows(*records: dict[str, object]) -> list[dict[str, object]]:
    return [{"t": 1.0, "type": "phase"}, *records]


class TestTrialOfAJournal:
    wish = Wish(0.25, 1)

    def test_one_that_ended(self) -> None:
        journal = rows(
            {"type": "evaluation", "t": 2.0, "values": {"accuracy": 0.5}},
            {"type": "evaluation", "t": 3.0, "values": {"accuracy": 0.75, "loss": 2.0}},
            {"type": "end", "t": 4.0, "seconds": 2.5},
        )
        assert trial_of(journal, self.wish) == Trial(0.25, 1, 0.75, 2.5)
        assert trial_of(journal, self.wish, "accuracy") == Trial(0.25, 1, 0.75, 2.5)
        with pytest.raises(SearchError, match=r"call sync.log\(top5=...\)"):
            trial_of(journal, self.wish, "top5")

    def test_one_that_did_not(self) -> None:
        assert trial_of(rows(), self.wish) is None
        assert trial_of(rows({"type": "evaluation", "t": 2.0, "values": {"acc": 0.5}}), self.wish) is None

    def test_one_that_diverged(self) -> None:
        assert trial_of(rows({"type": "diverged", "t": 3.0}), self.wish) == Trial(0.25, 1, None, 2.0)
        nan = {"type": "evaluation", "t": 2.0, "values": {"accuracy": "nan"}}
        assert trial_of(rows(nan, {"type": "end", "t": 4.0, "seconds": 2.5}), self.wish) == Trial(
            0.25, 1, None, 2.5
        )

    def test_an_accuracy_that_is_none(self) -> None:
        percent = {"type": "evaluation", "t": 2.0, "values": {"accuracy": 92.0}}
        with pytest.raises(SearchError, match="an accuracy of 92; it must be a share, 0 to 1"):
            trial_of(rows(percent, {"type": "end", "t": 4.0, "seconds": 2.5}), self.wish)

    def test_a_folder_of_trials(self, tmp_path: Path) -> None:
        for share in (1.0, 0.0009765625, 3 * 48 / 1000):
            folder = tmp_path / "trials" / name_of(Wish(share, 2))
            folder.mkdir(parents=True)
            journal = rows(
                {"type": "evaluation", "t": 2.0, "values": {"acc": 0.5}},
                {"type": "end", "t": 4.0, "seconds": 2.5},
            )
            text = "".join(json.dumps(row) + "\n" for row in journal)
            (folder / "journal.jsonl").write_text(text + '{"type": "cut o')
        (tmp_path / "trials" / "0.5-0").mkdir()
        killed = tmp_path / "trials" / "0.5-1"  # when it was through, and had not logged its accuracy yet
        killed.mkdir()
        text = "".join(json.dumps(row) + "\n" for row in rows({"type": "end", "t": 4.0, "seconds": 2.5}))
        (killed / "journal.jsonl").write_text(text)
        assert {(t.share, t.number) for t in found_in(tmp_path)} == {
            (1.0, 2),
            (0.0009765625, 2),
            (3 * 48 / 1000, 2),
        }


class TestPlans:
    spec = LaunchSpec(script=__file__)

    def test_shares(self) -> None:
        kind = Kind(self.spec)
        shares = (1.0, 0.5, 0.0625, 0.03125)
        assert [kind.plan(share) for share in shares] == [
            "bsp",
            "bsp:50% asp",
            "bsp:6.25% asp",
            "bsp:3.125% asp",
        ]

    def test_units_and_another_second_protocol(self) -> None:
        kind = Kind(self.spec, "dasgd(period=4,delay=2)", total=1000, grid=48)
        assert kind.plan(5 * kind.grain) == "bsp:240u dasgd(period=4,delay=2)"


class TestIdentity:
    def test_what_makes_a_job(self) -> None:
        journal = [
            {
                "type": "run",
                "model": "m",
                "optimizer": "o",
                "workers": 2,
                "total": 9,
                "seed": 3,
                "plan": "bsp",
            },
            {"type": "data", "batch_size": 8, "samples": 90},
        ]
        found = identity(journal)
        assert found is not None
        assert (found["batch_size"], found["samples"], set(found)) == (8, 90, set(FIELDS))
        assert identity(journal[:1]) is None
        assert fingerprint(found) == fingerprint(dict(reversed(found.items())))
        assert fingerprint({**found, "workers": 3}) != fingerprint(found)

    def test_structures_and_optimizers(self) -> None:
        import torch

        def net(width: int) -> torch.nn.Module:
            return torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Tanh())

        assert structure([net(3)]) == structure([net(3)])
        assert structure([net(3)]) != structure([net(4)])
        parameters = list(net(3).parameters())
        assert description([torch.optim.SGD(parameters, 0.1)]) == "SGD(lr=0.1)"
        text = description([torch.optim.SGD(parameters, 0.1, momentum=0.9, nesterov=True)])
        assert text == "SGD(lr=0.1,momentum=0.9,nesterov=True)"
        group = [{"params": parameters, "lr": 0.05, "initial_lr": 0.1}]
        assert description([torch.optim.SGD(group, 1.0)]) == "SGD(lr=0.1)"
