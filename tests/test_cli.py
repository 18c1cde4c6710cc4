"""The command line: words, errors, exit codes, `run` and `compare` from end to end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from commands import Command
from typer.testing import CliRunner

from offbeat.cli import PLANS, app
from offbeat.options import slug, split_plans, split_words, units

ROOT = Path(__file__).parent.parent
KNOWN = {"-n": True, "--workers": True, "--plan": True, "--quiet": False, "-q": False, "--help": False}

# Writes the journal that a real job would, faster than one could.
JOB = """
import json, os, sys
from pathlib import Path
plan = os.environ.get("OFFBEAT_PLAN", "bsp")
if os.environ["RANK"] == "0":
    print("script says", sys.argv[1:], *filter(None, [os.environ.get("OFFBEAT_ON_DIVERGE")]))
    rows = [
        {"type": "run", "t": 0, "plan": plan, "workers": 2, "total": 100, "batch_size": 8},
        {"type": "phase", "t": 1, "protocol": plan, "units": 0, "progress": 0.0},
        {"type": "evaluation", "t": 3, "units": 100, "progress": 1.0, "values": {"accuracy": 0.5}},
        {"type": "end", "t": 3, "seconds": 2.0, "units": 100, "samples": 800, "samples_per_s": 400.0,
         "waiting": 0.25, "loss": 0.125},
    ]
    text = "".join(json.dumps(row) + "\\n" for row in rows)
    (Path(os.environ["OFFBEAT_OUT"]) / "journal.jsonl").write_text(text)
elif "local" in plan and "fail" in sys.argv:
    sys.exit("no luck")
"""


@pytest.fixture(autouse=True)
def _cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.py").write_text(JOB)


@pytest.mark.parametrize("words", [["--help"], ["run", "--help"], ["--version"], ["run", "none.py"]])
def test_answers_without_torch_and_rich(words: list[str]) -> None:
    code = (
        "import sys, offbeat.cli\n"
        f"sys.argv = ['offbeat', *{words!r}]\n"
        "try: offbeat.cli.main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'rich.console'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "offbeat", "--version"], cwd=ROOT, capture_output=True)
    assert done.stdout.startswith(b"offbeat 0")


@pytest.mark.parametrize(
    ("words", "ours", "theirs"),
    [
        ("-n 2 x.py --subset 5000 --plan bsp", "-n 2 --plan bsp", "x.py --subset 5000"),
        ("x.py -e 3 --lr=0.1 -n 4 -v", "-n 4", "x.py -e 3 --lr=0.1 -v"),
        ("x.py --plan=bsp -n4 -name -5", "--plan=bsp -n 4", "x.py -name -5"),
        ("-q x.py a -- --plan z -- -n 3", "-q", "x.py a --plan z -- -n 3"),
        ("-n 2 -- x.py --plan z", "-n 2", "x.py --plan z"),
        ("x.py --plan --quiet", "--plan --quiet", "x.py"),
        ("x.py -", "", "x.py -"),
        ("x.py -n", "-n", "x.py"),
        ("", "", ""),
    ],
)
def test_whose_word_is_it(words: str, ours: str, theirs: str) -> None:
    assert split_words(words.split(), KNOWN) == (ours.split(), theirs.split())


def test_an_unknown_option_before_the_script() -> None:
    with pytest.raises(ValueError, match="no option --plam; did you mean --plan"):
        split_words(["--plam", "bsp", "x.py"], KNOWN)
    with pytest.raises(ValueError, match="no option --lr; options of the script come after it"):
        split_words(["--lr", "3", "x.py"], KNOWN)


@pytest.mark.parametrize(
    ("text", "value"),
    [("64000", 64000), ("64_000", 64000), ("64k", 64000), ("1.5k", 1500), ("2M", 2_000_000), ("1", 1)],
)
def test_units(text: str, value: int) -> None:
    assert units(text) == value


@pytest.mark.parametrize("text", ["0", "-4", "", "k", "1.5", "64 k", "1e3", "nan", "_", "0.5"])
def test_no_units(text: str) -> None:
    with pytest.raises(ValueError, match="--total"):
        units(text)


def test_plans_are_split_and_written_in_one_way() -> None:
    assert split_plans(" bsp ;local( period = 4 );; bsp:50% dasgd;") == ["bsp", "local", "bsp:50% dasgd"]
    assert split_plans(PLANS) == ["bsp", "local", "dasgd", "bsp:12.5% dasgd", "asp", "bsp:12.5% asp"]
    assert slug("bsp:12.5% dasgd(period=4,delay=2)") == "bsp-12.5-dasgd-period-4-delay-2"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "-n", "0", "job.py"], "-n 0: a host runs at least one worker"),
        (["run", "none.py"], "there is no script none.py"),
        (["run", "job.py", "--total", "0"], "--total 0"),
        (["run", "job.py", "--wire", "fp8"], "valid are bf16 and fp32"),
        (["run", "job.py", "--on-diverge", "stop"], "valid are raise, rollback and ignore"),
        (["compare", "job.py", "--on-diverge", "stop"], "--on-diverge stop: valid are raise"),
        (["run", "job.py", "--plan", "bspp"], "did you mean 'bsp'"),
        (["run", "job.py", "--nnodes", "2"], "--rdzv-endpoint"),
        (["run", "--plam", "bsp", "job.py"], "did you mean --plan"),
        (["compare", "job.py", "--plans", ";"], "holds no plan"),
        (["compare", "job.py", "--plans", "bsp; local; bsp"], "'bsp' twice"),
        (["compare", "none.py"], "there is no script none.py"),
        (["run"], "Missing argument"),
        (["run", "-n", "two", "job.py"], "-n"),
    ],
)
def test_mistakes_are_said_in_short(words: list[str], message: str) -> None:
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert result.stderr.count("\n") <= 4
    assert not Path("runs").exists()


def test_run_from_end_to_end() -> None:
    words = ["-n", 2, "job.py", "--subset", 5, "--plan", "local( period=4 )", "--", "--plan", "mine"]
    code, out, err = Command("run", *words, "").end()
    assert (code, out) == (0, "script says ['--subset', '5', '--plan', 'mine', '']\n")
    (run,) = Path("runs").iterdir()
    assert run.name.endswith("-job")
    lines = err.splitlines()
    assert lines[-3:] == [
        "offbeat: local on 2 workers: 2.0 s, 400 samples/s, waiting 25.0%, final loss 0.125",
        "offbeat: last evaluation: accuracy 0.5",
        f"offbeat: run directory: {run}",
    ]
    assert all(line.startswith("offbeat: ") for line in lines)


@pytest.mark.parametrize("how", ["raise", "rollback", "ignore"])
def test_on_diverge_reaches_the_workers(how: str) -> None:
    assert Command("run", "job.py", "-q", "--on-diverge", how).end() == (0, f"script says [] {how}\n", "")
    words = ["job.py", "-q", "--on-diverge", how, "--plans", "bsp", "--all-output"]
    assert f"[0] script says [] {how}\n" in Command("compare", *words).end()[1]


def test_quiet_leaves_the_script_alone() -> None:
    assert Command("run", "job.py", "-q").end() == (0, "script says []\n", "")


def test_all_output_names_the_rank() -> None:
    Path("two.py").write_text("import os; print('a\\nb', os.environ['RANK'])")
    code, out, _ = Command("run", "-n", 2, "two.py", "--all-output", "-q").end()
    assert code == 0
    assert sorted(out.splitlines()) == ["[0] a", "[0] b 0", "[1] a", "[1] b 1"]


def test_a_failed_run_shows_why() -> None:
    code, _, err = Command("run", "-n", 2, "job.py", "fail", "--plan", "local", "--out", "here").end()
    assert code == 1
    assert "  | no luck\n" in err
    assert "offbeat: rank 1 on " in err
    assert err.endswith("failed with exit code 1\noffbeat: logs: here/logs\n")


def test_compare_from_end_to_end() -> None:
    code, out, err = Command("compare", "-n", 2, "job.py", "fail", "--plans", "bsp; local; dasgd").end()
    assert code == 1
    (directory,) = Path("runs").iterdir()
    assert "-compare-job" in directory.name
    assert sorted(p.name for p in directory.iterdir()) == [
        *("1-bsp", "2-local", "3-dasgd", "compare.json", "report.html")
    ]
    assert f"{directory / 'report.html'} shows it in a browser: the verdict" in err
    result = json.loads((directory / "compare.json").read_text())
    assert result["target"] == 0.5
    first, failed, third = result["plans"]
    assert (first["plan"], first["seconds"], first["to_target"], first["relative"]) == ("bsp", 2.0, 2.0, 1.0)
    assert (third["plan"], third["accuracy"], third["error"]) == ("dasgd", 0.5, None)
    assert failed["error"].endswith("failed with exit code 1")
    assert "script says" not in out + err
    assert "time to 50.0%" in out
    assert "local failed: rank 1" in err
