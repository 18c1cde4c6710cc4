"""Every command that the documentation shows. Each is parsed as Offbeat would; the slow tests run them, page
by page, in a folder with what a reader would have there.

What can't be run as it is shown is run smaller, by `smaller`, which says why."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import pytest
from pages import PAGES, ROOT, commands, program, quoted, unset
from typer.main import get_command

from offbeat.cli import app

NAME = "20260101-120000-train"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OFFBEAT_STORE": "jobs.sqlite"}
COMMON = [line for page in PAGES for line in commands(page)]

TRAIN = """
import argparse, time
from pathlib import Path
import torch, offbeat
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--pause", type=float, default=0)
args = parser.parse_args()
offbeat.init(seed=args.seed)
x = torch.randn(512, 4, generator=torch.Generator().manual_seed(0))
y = (x.sum(1) > 0).long()
model = torch.nn.Linear(4, 2)
sync = offbeat.Synchronizer(model, torch.optim.SGD(model.parameters(), args.lr), epochs=2)

for a, b in sync.batches((x, y), batch_size=4):
    torch.nn.functional.cross_entropy(model(a), b).backward()
    time.sleep(args.pause)
    sync.step()
    if sync.every("50%"):
        with sync.consensus(), torch.no_grad():
            sync.log(accuracy=(model(x).argmax(1) == y).float().mean())
"""
CLUSTER = '[compute]\nunit = "10 ms"\n[link]\nrate = "100 Mbit/s"\n'


# Parsed


def parsed(words: list[str]) -> click.Context:
    """The context of `offbeat WORDS`, as if it were about to run. Raises click's errors."""
    command: Any = get_command(app)
    names: list[str] = []
    while hasattr(command, "commands"):
        word = words.pop(0)
        command = command.commands[word]
        names.append(word)
    return command.make_context(" ".join(names), words)


def test_every_command_has_an_example() -> None:
    assert len(COMMON) > 60
    command: Any = get_command(app)
    for name in command.commands:
        assert any(line.startswith(f"offbeat {name}") for line in COMMON), name


@pytest.mark.parametrize("line", [line for line in dict.fromkeys(COMMON) if program(line) == "offbeat"])
def test_commands_of_offbeat_parse(line: str) -> None:
    assert "…" not in line or line.startswith("offbeat plan")
    if "$D" in line:
        line = line.replace("$D", "examples/cifar10.py").replace("$W", "")
    parsed(shlex.split(re.sub(r"\[(\w+)\]", r"\1", line))[1:])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_quoted_commands_have_options_that_exist(page: Path) -> None:
    known: dict[str, set[str]] = {}
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        known[name] = {option for param in getattr(command, "params", []) for option in param.opts}
    for line in quoted(page):
        if program(line) == "offbeat":
            for word in re.findall(r" (--[\w-]+)", line.split(".py")[0]):
                assert word in known[line.split()[1]], line


def test_what_make_and_pip_are_asked_for_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    for line in COMMON + [line for page in PAGES for line in quoted(page)]:
        words = line.split()
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE), line
        if words[0] == "pip":
            wanted = re.findall(r"\[(.*)\]", words[2])
            assert words[2].strip('"').split("[")[0] in (".", "offbeat"), line
            assert set(wanted) <= set(extras), line


def test_recipes_are_called_with_what_they_read() -> None:
    for line in COMMON:
        if not (found := re.search(r"(examples/launch/\S+)(.*)", line)):
            continue
        text = (ROOT / found[1]).read_text()
        for name in re.findall(r"\b([A-Z_]+)=", line[: found.start()]):
            assert re.search(rf"\$\{{?{name}\b", text), f"{found[1]} reads no {name}: {line}"
        if found[1].endswith("ray_job.py"):
            own, theirs = (shlex.split(part) for part in found[2].split(" -- "))
            assert all(f'"{word}"' in text for word in own if word.startswith("--"))
            assert parsed(["run", *theirs]).params["script"] == "train.py"
    (patch,) = [json.loads(shlex.split(line)[-1]) for line in COMMON if line.startswith("kubectl patch")]
    assert patch == {"spec": {"parallelism": 6, "completions": 6}}


# Run

PAGES_WITH_COMMANDS = [page for page in PAGES if page.stem != "start" and commands(page)]
"""start.md has a test of its own, in test_docs."""
ELSEWHERE = ("make ", "pip ", "sbatch ", "kubectl ", "examples/launch/", "python examples/launch/")
"""By test_newcomer and test_launch_recipes."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    for name in ("examples", "benchmarks", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def smaller(line: str, data: str) -> str:
    """The command as it is run."""
    line = re.sub(r"\[(\w+)\]", r"\1", line)  # what may be left out
    line = line.replace("RUN RUN...", f"runs/{NAME} runs/{NAME}").replace("RUN", f"runs/{NAME}")
    line = (
        line.replace("FILE", "saved.pt").replace(" PLAN", ' "dasgd(period=4,delay=1)"').replace("RANK", "2")
    )
    line = line.replace("--tensorboard ...", "--tensorboard -n 2 train.py")
    if line.startswith("offbeat search") and "--simulate" not in line:  # dozens of trainings
        line += " --runs 1 --target-runs 1 --depth 1 --tolerance 0.9"
    if line.startswith("offbeat compare"):  # the same again with other seeds
        line = line.replace("--repeat 3", "--repeat 1")
    if "$D" in line:  # up to 70 minutes
        d = f"examples/cifar10.py --data {data} --subset 128 --width 4 --batch-size 4 --evaluate 50%"
        line = line.replace("$D", d).replace("$W", "--schedule step --lr-reference worker --lr 0.03")
        line = re.sub(r"--epochs \d+", "", line) + " --epochs 1"
    return line


def arguments(line: str) -> list[str]:
    words = shlex.split(line)
    return [sys.executable, *(["-m", "offbeat"] if words[0] == "offbeat" else []), *words[1:]]


def run(line: str, folder: Path, limit: float = 900) -> str:
    done = subprocess.run(
        arguments(line), cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=limit
    )
    assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@contextmanager
def running(line: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    one = subprocess.Popen(arguments(line), cwd=folder, env=ENVIRONMENT, stderr=subprocess.DEVNULL)
    try:
        yield one
    finally:
        one.terminate()
        one.wait()


def on_hosts(line: str, folder: Path, done: set[str]) -> None:
    """A command that names host0: this machine, with the other node of two beside it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        line = line.replace("host0:29400", f"127.0.0.1:{free.getsockname()[1]}")
    if "--nnodes 2" not in line:
        run(line, folder)
        return
    if "nodes" in done:
        return
    done.add("nodes")
    other = line.replace("--node-rank 0", "--node-rank 9").replace("--node-rank 1", "--node-rank 0")
    with running(other.replace("--node-rank 9", "--node-rank 1"), folder) as second:
        run(line, folder)
        assert second.wait(60) == 0


def to_a_job(lines: list[str], folder: Path) -> None:
    """Commands to a job that runs: `offbeat ctl`."""
    with running(f"offbeat run -n 4 --min 2 --out runs/{NAME} --total 100k train.py --pause 0.02", folder):
        end = time.monotonic() + 120
        while not (folder / "runs" / NAME / "journal.jsonl").exists():
            assert time.monotonic() < end
            time.sleep(0.1)
        for line in lines:
            run(line, folder)
    shutil.rmtree(folder / "runs" / NAME)


def data_for_cifar(folder: Path) -> None:
    import numpy as np
    from test_examples import write_parquet

    for split, count in (("train", 128), ("test", 32)):
        pixels = np.random.default_rng(0).integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
        write_parquet(folder / "data", split, pixels, [i % 10 for i in range(count)])


def help_of(line: str, folder: Path) -> None:
    """A benchmark takes from minutes to hours: that it knows what it is given must do."""
    found = re.match(r"python (benchmarks/\w+\.py)(.*?)(?: -- .*)?$", line)
    assert found, line
    known = run(f"python {found[1]} --help", folder)
    for word in re.findall(r"--[\w-]+", found[2]):
        assert word in known, line


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES_WITH_COMMANDS, ids=lambda page: page.stem)
def test_commands_run(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENVIRONMENT, "XDG_CACHE_HOME", str(folder / "cache"))
    lines = [line for line in commands(page) if not unset(line).startswith(ELSEWHERE)]
    if ctl := [smaller(line, "") for line in lines if line.startswith("offbeat ctl")]:
        to_a_job(ctl, folder)
    if any(NAME in line or "RUN" in line for line in lines):
        run(f"offbeat run -n 2 --out runs/{NAME} train.py", folder)
    if any("recurring" in line for line in lines):
        for job in ("", " --job nightly"):
            run(smaller(f"offbeat search --virtual 8{job} train.py", ""), folder)
    if any("$D" in line for line in lines):
        data_for_cifar(folder)
    done: set[str] = set()
    for line in lines:
        if line.startswith("python benchmarks/"):
            help_of(line, folder)
        elif "host0" in line:
            on_hosts(line, folder, done)
        elif not line.startswith("offbeat ctl"):
            run(smaller(line, str(folder / "data")), folder)


@pytest.mark.slow
def test_quoted_benchmarks_know_their_options(folder: Path) -> None:
    lines = [line for page in PAGES for line in quoted(page) if line.startswith("python benchmarks/")]
    assert lines
    for line in lines:
        help_of(line, folder)


def test_no_command_is_left_out() -> None:
    """A new kind of command needs a way to be run here."""
    ways = ("offbeat ", "python benchmarks/", "python first.py", *ELSEWHERE)
    for line in COMMON:
        assert unset(line).startswith(ways), line
