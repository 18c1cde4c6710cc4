"""Whole scripts in virtual workers, by the command line: isolation, parity with processes, determinism,
errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import Command

from offbeat import journal

BESIDE = """
COUNT = 0

def tally(by):
    global COUNT
    COUNT += by
    return COUNT
"""

# Whatever a script may leave set while it waits; each rank leaves something else.
SCRIPT = """
import contextlib, json, os, pickle, random, sys
import numpy, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import offbeat
import beside
from beside import tally

SEEN = []

class Point:
    def __init__(self, x):
        self.x = x

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        return self.b(self.drop(torch.relu(self.norm(self.a(x)))))

def forever(loader):
    while True:
        yield from loader

offbeat.init(seed=5)
rank = offbeat.rank()
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
sync = offbeat.Synchronizer(model, optimizer, plan="bsp:50% local(3)", total=24)
torch.manual_seed(40 + rank)
numpy.random.seed(50 + rank)
random.seed(60 + rank)
data = TensorDataset(torch.rand(40, 6), torch.randint(0, 3, (40,)))
batches = forever(DataLoader(data, batch_size=4, shuffle=True, num_workers=rank))
step = 0
with sync:
    while not sync.done:
        x, y = next(batches)
        half = rank == 0 and step % 2 == 0
        with torch.autocast("cpu", dtype=torch.bfloat16) if half else contextlib.nullcontext():
            nn.functional.cross_entropy(model(x), y).backward()
            if rank == 1 and step == 3:
                torch.set_default_dtype(torch.float64)
            if rank == 1 and step == 8:
                torch.set_default_dtype(torch.float32)
            with torch.no_grad() if rank == step % 2 else contextlib.nullcontext():
                sync.step()
                grad = torch.is_grad_enabled()
            cast = [torch.is_autocast_enabled("cpu"), str((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)]
        if sync.every("25%"):
            model.eval()
            with torch.inference_mode(), sync.consensus():
                SEEN.append([float(model(x).sum()), torch.is_inference_mode_enabled()])
            model.train()
        copy = pickle.loads(pickle.dumps(Point(step)))
        SEEN.append([
            tally(rank + 1), beside.COUNT, cast, grad, torch.is_grad_enabled(), copy.x, type(copy) is Point,
            float(torch.rand(1).sum()), str(torch.rand(1).dtype), float(numpy.random.rand()), random.random(),
            __name__, sys.argv[1:], sys.modules["__main__"].SEEN is SEEN, os.environ["RANK"],
        ])
        step += 1
state = [value.double().flatten().tolist() for value in model.state_dict().values()]
rows = {"seen": SEEN, "state": state, "world": offbeat.world_size()}
with open(f"{os.environ['OFFBEAT_OUT']}/rank{rank}.json", "w") as file:
    json.dump(rows, file)
print("the end of", rank)
"""

TRAIN = """
import sys, torch, offbeat
from torch import nn
offbeat.init()
model = nn.Sequential(nn.Linear(6, 300), nn.ReLU(), nn.Linear(300, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
sync = offbeat.Synchronizer(model, optimizer, plan="bsp", total=60)
data = torch.rand(200, 6), torch.randint(0, 3, (200,))
for x, y in sync.batches(data, batch_size=5):
    nn.functional.cross_entropy(model(x), y).backward()
    if "fail" in sys.argv and offbeat.rank() == 2 and sync.units >= 20:
        raise ValueError("no luck")
    sync.step()
"""

CLUSTER = Path(__file__).with_name("hosts.toml").read_text()


@pytest.fixture(autouse=True)
def _cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cluster.toml").write_text(CLUSTER)
    Path("train.py").write_text(TRAIN)


def run(*words: object, out: str = "out") -> tuple[int, str, str]:
    return Command("run", "--out", out, *words).end()


def test_a_script_behaves_to_the_bit_as_in_processes_of_its_own() -> None:
    Path("beside.py").write_text(BESIDE)
    Path("job.py").write_text(SCRIPT)
    rows: dict[str, list[Any]] = {}
    for name, how in (("real", ["-n", 2]), ("virtual", ["--virtual", 2, "--cluster", "cluster.toml"])):
        code, out, err = run(*how, "job.py", "--", "word", out=name)
        assert code == 0, err
        assert "the end of 0" in out
        assert "the end of 1" not in out
        rows[name] = [json.loads(Path(name, f"rank{rank}.json").read_text()) for rank in (0, 1)]
    for here, there in zip(rows["virtual"], rows["real"], strict=True):
        assert len(here["seen"]) == 16
        for one, other in zip(here["seen"], there["seen"], strict=True):
            assert one == other
        assert here["state"] == there["state"]
    assert "the end of 1" in Path("virtual/logs/rank1.out").read_text()


def test_the_same_seed_gives_the_same_journal_byte_for_byte() -> None:
    plan = "bsp:20u asp:50u dasgd(4,2)"
    text = CLUSTER.replace('"100 ms"', '"100 ms"\nkind = "lognormal"\nsigma = 0.3')
    Path("cluster.toml").write_text(text)
    for name in ("one", "two"):
        words = ["--virtual", 3, "--cluster", "cluster.toml", "--plan", plan, "train.py"]
        code, _, err = run(*words, out=name)
        assert code == 0, err
    texts = [Path(name, "journal.jsonl").read_text() for name in ("one", "two")]
    assert texts[0] == texts[1]


def test_an_error_names_the_worker_the_virtual_time_and_the_line() -> None:
    code, _, err = run("--virtual", 4, "--cluster", "cluster.toml", "train.py", "fail")
    assert code == 1
    assert "ValueError: no luck" in err
    line = next(line for line in err.splitlines() if line.startswith("offbeat: rank 2 at "))
    assert "s of virtual time, train.py:12: ValueError: no luck" in line
    assert "engine.py" not in err


def test_a_dying_worker_ends_the_run_with_its_rank_and_time() -> None:
    Path("cluster.toml").write_text(CLUSTER + '[[failures]]\nworker = 1\nat = "0.45 s"\n')
    for how in ([], ["--timing-only"]):
        code, _, err = run(
            "--virtual", 3, "--cluster", "cluster.toml", *how, "train.py", out=f"out{len(how)}"
        )
        assert code == 1
        assert "rank 1" in err
        assert "0.45 s" in err


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("import torch.distributed as d\nd.init_process_group('gloo')", ["init_process_group", "job.py:2"]),
        ("import sys\nsys.exit('enough')", ["'enough'", "rank 0"]),
        ("def f(:", ["SyntaxError", "job.py"]),
        (
            "import torch, offbeat\nmodel = torch.nn.Linear(4000, 4000)\n"
            "offbeat.Synchronizer(model, torch.optim.SGD(model.parameters(), 0.1), total=9)",
            ["TooLarge", "5000 virtual workers need about", "available", "--timing-only"],
        ),
    ],
)
def test_scripts_that_cannot_be_virtual_are_told_why(text: str, parts: list[str]) -> None:
    Path("job.py").write_text(text)
    code, _, err = run("--virtual", 5000 if "TooLarge" in parts else 2, "job.py")
    assert code == 1
    for part in parts:
        assert part in err, err


def test_timing_only_needs_a_job() -> None:
    Path("job.py").write_text("print('nothing to train')")
    code, _, err = run("--virtual", 2, "--timing-only", "job.py")
    assert code == 1
    assert "it came to no Synchronizer" in err


EPOCHS = """
import torch, offbeat
from torch.utils.data import DataLoader, DistributedSampler
data = [(torch.randn(3), 0) for _ in range(48)]
offbeat.init()
model = torch.nn.Linear(3, 2)
sync = offbeat.Synchronizer(model, torch.optim.SGD(model.parameters(), 0.1), plan="bsp:50% asp", epochs=2)
sampler = DistributedSampler(data, offbeat.world_size(), offbeat.rank())
for x, y in sync.batches(DataLoader(data, 4, sampler=sampler)):
    torch.nn.functional.cross_entropy(model(x), y).backward()
    sync.step()
"""


def test_timing_only_has_the_length_that_all_workers_data_make() -> None:
    Path("job.py").write_text(EPOCHS)
    for how in ([], ["--timing-only"]):
        out = f"out{len(how)}"
        code, _, err = run("--virtual", 4, "--cluster", "cluster.toml", *how, "job.py", out=out)
        assert code == 0, err
        assert [row["units"] for row in journal.read(Path(out)) if row["type"] == "end"] == [24]


def test_timing_only_sees_to_stragglers() -> None:
    """By the job's own probe, and without the script."""
    straggler = '[[stragglers]]\nworker = 1\nat = "0 s"\nseconds = "inf"\nslow = 4\n'
    Path("cluster.toml").write_text(CLUSTER + straggler + "[model]\nparameters = 1000\n")
    words = ["--virtual", 3, "--cluster", "cluster.toml", "--timing-only", "--plan", "bsp:90% local(2)"]
    for number, total in enumerate(([], ["--total", 300])):
        code, _, err = run(
            *words, *total, "--stragglers", "elastic(window=1,count=1)", "train.py", out=f"out{number}"
        )
        assert code == 0, err
        rows = journal.read(Path(f"out{number}"))
        assert [row["members"] for row in rows if row["type"] == "members"] == [[0, 2], [0, 1, 2]]


def test_every_worker_is_heard_with_its_rank() -> None:
    Path("job.py").write_text("import offbeat; print('this is', offbeat.rank())")
    code, out, _ = run("--virtual", 2, "--all-output", "job.py")
    assert code == 0
    assert sorted(out.splitlines()) == ["[0] this is 0", "[1] this is 1"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--virtual", 0], "--virtual 0: a cluster has at least one worker"),
        (["--virtual", 4, "--cluster", "hier"], "'hier' is neither a file nor a preset"),
        (["--cluster", "here"], "--cluster belongs to a virtual run"),
        (["--timing-only"], "--timing-only belongs to a virtual run"),
        (["--virtual", 2, "-n", 2], "leave out -n"),
    ],
)
def test_wrong_words_start_nothing(words: list[object], text: str) -> None:
    code, _, err = run(*words, "train.py")
    assert code == 2
    assert text in err
    assert not Path("out").exists()


def test_compare_repeats_side_by_side() -> None:
    words = ["--virtual", 3, "--cluster", "cluster.toml", "--repeat", 2, "--jobs", 2]
    code, out, err = Command("compare", *words, "--plans", "bsp; asp", "--out", "all", "train.py").end()
    assert code == 0, err
    result = json.loads(Path("all/compare.json").read_text())
    assert [(row["plan"], row["runs"], row["failed"]) for row in result["plans"]] == [
        ("bsp", 2, 0),
        ("asp", 2, 0),
    ]
    assert sorted(p.name for p in Path("all").iterdir()) == [
        "1-bsp-0",
        "1-bsp-1",
        "2-asp-0",
        "2-asp-1",
        "compare.json",
        "report.html",
    ]
    assert "runs" in out


def test_a_deadlock_says_who_waits_for_what() -> None:
    Path("job.py").write_text(
        "import offbeat\nfrom offbeat.site import here\noffbeat.init(out=False)\n"
        "here().wait_for(lambda: False, lambda: 'for a word that nobody says')\n"
    )
    code, _, err = run("--virtual", 2, "job.py")
    assert code == 1
    assert "no worker can go on at 0 s" in err
    assert "rank 0 waits for a word that nobody says; rank 1 waits for a word that nobody says" in err
