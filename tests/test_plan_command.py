"""`offbeat plan`: sizes, recommendations, pictures, errors."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner, Result

from offbeat.cli import app
from offbeat.planner.choice import PARTS, Question, Size, parse_workers
from offbeat.planner.picture import html, svg
from offbeat.virtual.cluster import Cluster
from offbeat.virtual.description import preset
from offbeat.virtual.model import Model
from tests.test_forms import LARGE, SMALL, UNEVEN, cluster

SCRIPT = """
import torch, offbeat
offbeat.init(seed=0)
print("loading")
model = torch.nn.Sequential(torch.nn.Linear(50, 100), torch.nn.Linear(100, 10))
sync = offbeat.Synchronizer(model, torch.optim.SGD(model.parameters(), 0.1), plan="bsp", epochs=2)
for x, y in sync.batches((torch.randn(640, 50), torch.zeros(640, dtype=int)), batch_size=64):
    torch.nn.functional.cross_entropy(model(x), y).backward()
    raise SystemExit("went too far")
"""
MODEL = "[model]\nparameters = 25_500_000\ntensors = 161\n"


def offbeat(*words: str) -> Result:
    return CliRunner().invoke(app, ["plan", *words])


@pytest.fixture(autouse=True)
def _cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("8,16,…,256", [8, 16, 32, 64, 128, 256]),
        ("8, 16, ..., 256", [8, 16, 32, 64, 128, 256]),
        ("1,…,2", None),
        ("2,4,…,10", [2, 4, 6, 8, 10]),
        ("4,8,…,16", [4, 8, 16]),
        ("10,20,…,50", [10, 20, 30, 40, 50]),
        ("8,3", [3, 8]),
        ("8,16,…,250", None),
        ("0", None),
        ("many", None),
        ("8,16,…", None),
        ("", None),
    ],
)
def test_numbers_of_workers(text: str, numbers: list[int] | None) -> None:
    if numbers is None:
        with pytest.raises(ValueError, match=re.escape(f"--workers {text}")):
            parse_workers(text)
    else:
        assert parse_workers(text) == numbers


def asked(found: Cluster, model: Model = SMALL) -> Size:
    return Question(found, model, batch=32, samples=50_000).answer(found.size or 1)


def test_each_kind_of_cluster_has_its_plan() -> None:
    quick = cluster(4, rate=1e10)
    assert asked(quick).recommended == "bsp"
    slow = cluster(4, rate=5e6)
    found = asked(slow)
    assert found.recommended == f"dasgd(period={found.delay + 1},delay={found.delay})"
    assert found.delay == 4
    assert re.search(r"an average takes 3\d\d ms, and 4 local steps of 102 ms hide it: 100%", found.reason)
    straggling = cluster(8, rate=1e10, slow=4.0)
    found = asked(straggling)
    assert found.recommended == "bsp:12.5% asp"
    assert "loses 72%" in found.reason
    assert any("asp is fastest, but from the first step" in text for text in found.warnings)
    assert asked(cluster(1)).reason == "one worker waits for nobody"


def test_a_long_delay_is_warned_of() -> None:
    found = asked(cluster(4, rate=5e6), LARGE)
    assert found.delay > 4
    assert any(text.startswith(f"a mean that lands {found.delay} steps late") for text in found.warnings)


def test_a_row_adds_up() -> None:
    for row in asked(cluster(8, UNEVEN, rate=125e6)).rows:
        one = row.iteration
        assert one.seconds == pytest.approx(sum(getattr(one, part) for part in PARTS))
        assert row.samples_per_s == pytest.approx(8 * 32 / one.seconds)
        assert row.epoch == pytest.approx(50_000 / row.samples_per_s)


def test_the_picture_is_stacked_bars(tmp_path: Path) -> None:
    sizes = [Question(preset("ethernet-256"), Model((25_500_000,)), batch=64).answer(n) for n in (8, 64)]
    text = svg(sizes, "a <title>")
    root = ElementTree.fromstring(text)
    bars = [e for e in root.iter("{http://www.w3.org/2000/svg}rect") if len(e)]
    heights: dict[str, float] = {}
    for bar in bars:
        heights[bar.attrib["x"]] = heights.get(bar.attrib["x"], 0.0) + float(bar.attrib["height"])
    rows = [row for size in sizes for row in size.rows]
    assert len(heights) == len(rows)
    scale = [height / row.iteration.seconds for height, row in zip(heights.values(), rows, strict=True)]
    assert max(scale) == pytest.approx(min(scale), rel=1e-3)
    assert "64 workers" in text
    assert html(sizes, "t").startswith("<!doctype html>")


def test_a_script_is_planned_without_being_run(tmp_path: Path) -> None:
    Path("train.py").write_text(SCRIPT)
    before = dict(os.environ)
    done = offbeat("train.py", "--cluster", "ethernet-256", "-n", "8", "--device", "k80", "--json")
    assert done.exit_code == 0, done.output
    assert dict(os.environ) == before  # the script has seen RANK and its like
    found = json.loads(done.stdout)
    size = found["sizes"][0]
    # 64 samples, three products for each but the first layer's, which needs none for its input.
    flop = 64 * 2 * (2 * 50 * 100 + 3 * 100 * 10)
    assert found["batch_size"] == 64
    assert size["t_p"] == pytest.approx(flop / (0.5 * 5.6e12))
    row = size["plans"][0]
    assert row["epoch_s"] == pytest.approx(640 / row["samples_per_s"])
    assert "50% of them reached (assumed)" in found["notes"][-1]


def test_a_script_is_remembered_until_it_or_a_module_of_its_changes(
    capfd: pytest.CaptureFixture[str],
) -> None:
    Path("sizes.py").write_text("WIDTH = 100\n")
    Path("train.py").write_text("from sizes import WIDTH\n" + SCRIPT.replace("100", "WIDTH"))
    words = ("train.py", "--cluster", "ethernet-256", "-n", "8", "--json")

    def looked(*more: str) -> tuple[bool, dict[str, Any]]:
        done = offbeat(*words, *more)
        assert done.exit_code == 0, done.output
        found = json.loads(done.stdout)
        return "loading" in done.stderr, {key: value for key, value in found.items() if key != "notes"}

    first = looked()
    assert looked() == (False, first[1])
    assert looked("--again") == first
    assert looked("another word of the script's")[0]
    Path("sizes.py").write_text("WIDTH = 2000\n")
    ran, found = looked()
    assert ran
    assert found["sizes"][0]["t_c"] > first[1]["sizes"][0]["t_c"]
    assert looked() == (False, found)
    (kept,) = (
        p for p in Path("cache").rglob("*.json") if "sizes.py" in p.read_text() and "2000" in p.read_text()
    )
    kept.write_text('{"files": {}, "job": {"flop": 1}}')
    assert looked() == (True, found)


def test_what_is_remembered_needs_no_torch() -> None:
    Path("train.py").write_text(SCRIPT)
    code = (
        "import sys\nfrom offbeat.cli import app\n"
        "try: app(['plan', 'train.py', '--cluster', 'ethernet-256', '-n', '8'])\n"
        "except SystemExit as end: assert not end.code\n"
        "print('torch' in sys.modules)"
    )
    said = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True) for _ in range(2)]
    assert [done.stdout.splitlines()[-1] for done in said] == ["True", "False"]


def test_a_script_that_fails_is_told_of() -> None:
    Path("train.py").write_text("import torch\nx = torch.zeros(1)\nprint(x.nothing)\n")
    done = offbeat("train.py", "--cluster", "here")
    assert done.exit_code == 2
    assert "the beginning of train.py failed at train.py:3: AttributeError" in done.output


def test_tables_and_pictures_for_a_model_without_a_script() -> None:
    done = offbeat("--cluster", "ethernet-256", "-n", "8,16", "--plot", "plan.svg", "--batch", "64")
    assert done.exit_code == 0, done.output
    assert "16 workers: t_p 256 ms" in done.output
    assert "take bsp: backward hides the gradients' way" in done.output
    assert Path("plan.svg").read_text().startswith("<svg")


def test_other_plans_may_be_asked_for() -> None:
    done = offbeat("--cluster", "ethernet-256", "-n", "8", "--plans", "local(8); bsp:50% local", "--json")
    names = [row["plan"] for row in json.loads(done.stdout)["sizes"][0]["plans"]]
    assert names[:2] == ["local(period=8)", "bsp:50% local"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cluster", "here"], "what is to be trained? give SCRIPT, or a cluster with a [model] (here)"),
        (["--cluster", "ethernet-257"], "did you mean 'ethernet-256'?"),
        (["--cluster", "ethernet-256", "--plot", "plan.png"], "--plot plan.png: an .svg or an .html file"),
        (["--cluster", "ethernet-256", "--efficiency", "3"], "--efficiency 3: a share of the peak rate"),
        (["--cluster", "ethernet-256", "--device", "A1000"], "there is no device 'A1000'; valid: TITAN X"),
        (["--cluster", "ethernet-256", "--device", "A100"], "needs the model's operations and a batch size"),
        (["--cluster", "ethernet-256", "--plans", "bsp:10u asp"], "an end in units needs the job's length"),
    ],
)
def test_errors(words: list[str], message: str) -> None:
    done = offbeat(*words)
    assert done.exit_code == 2
    assert message in done.output


def test_planning_needs_no_torch() -> None:
    code = (
        "import sys\nfrom offbeat.cli import app\n"
        "try: app(['plan', '--cluster', 'ethernet-256', '-n', '256'])\n"
        "except SystemExit as end: assert not end.code\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


# Profiles as clusters


def test_a_profiles_keys_are_read_and_checked(tmp_path: Path) -> None:
    from offbeat.virtual.description import ClusterError, read

    good = '[compute]\nunit = "100 ms"\n[model]\ntensors = [10, 20]\npassed = [1.0, 0.4]\nbuffers = 8\n'
    good += '[profile]\nscript = "train.py"\nbatch_size = 32\nforward = 1e6\nbackward = 2e6\nunits = [0.1]\n'
    path = tmp_path / "profile.toml"
    path.write_text(good)
    found = read(path)
    assert found.model is not None
    assert found.profile is not None
    assert Model.of(found.model).passed == (1.0, 0.4)
    assert (found.profile.batch, found.profile.flop) == (32, 3e6)
    for old, new, message in (
        ("[1.0, 0.4]", "[1.0, 4]", r"model.passed: \[1.0, 4\] is not a list of numbers from 0 to 1"),
        ("[1.0, 0.4]", "[1.0]", r"is not a list with a number for each of the 2 tensors \(line 5\)"),
        ("batch_size", "batch", "has no such key; valid: .* did you mean 'batch_size'"),
        ("= 32", "= 0", "profile.batch_size: 0 is not a whole number from 1"),
        ("[0.1]", "[0]", "profile.units: .* is not a list of times above 0"),
        ("[model]", "[model", r"it is no TOML: .*line 3"),
        ("100 ms", "100", r"compute.unit: '100' is not a time such as .* \(line 2\)"),
    ):
        path.write_text(good.replace(old, new))
        with pytest.raises(ClusterError, match=message):
            read(path)


def test_an_error_names_its_line(tmp_path: Path) -> None:
    from offbeat.virtual.description import ClusterError, read

    path = tmp_path / "c.toml"
    path.write_text('size = 3\n[compute]\nunit = "1 s"\n[[workers]]\n\n[[workers]]\ncount = 1\nslow = -2\n')
    with pytest.raises(ClusterError, match=r"workers\[2\].slow: -2 is not a number above 0 \(line 8\)"):
        read(path)
    path.write_text("sizes = 3\n")
    with pytest.raises(ClusterError, match=r"compute.unit: it is needed: [^(]*\(ns, us, [^(]*$"):
        read(path)


def test_a_profiled_script_need_not_run(tmp_path: Path) -> None:
    from offbeat.planner.known import text_of

    Path("train.py").write_text("raise SystemExit('ran')")
    text = f'[compute]\nunit = "10 ms"\n{MODEL}[profile]\ntext = "{text_of("train.py")}"\nbatch_size = 8\n'
    Path("profile.toml").write_text(text)
    done = offbeat("train.py", "--cluster", "profile.toml", "-n", "4", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["batch_size"] == 8
    Path("train.py").write_text("raise SystemExit('ran, being another')")
    assert "ran, being another" in offbeat("train.py", "--cluster", "profile.toml", "-n", "4").output


def test_another_batch_scales_a_unit() -> None:
    text = f'[compute]\nunit = "10 ms"\n{MODEL}[profile]\nbatch_size = 8\n'
    Path("profile.toml").write_text(text)
    found = json.loads(offbeat("--cluster", "profile.toml", "-n", "1", "--batch", "16", "--json").stdout)
    assert found["sizes"][0]["t_p"] == pytest.approx(0.02)
