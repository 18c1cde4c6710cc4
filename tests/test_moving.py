"""docs/moving.md: each peer's code and Offbeat's beside it, run by two workers."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pages import ROOT, blocks

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RUST_LOG": "error"}
COMMON, *CODE = [block.code for block in blocks("moving.md") if block.language == "python"]
PAIRS = dict(
    zip(
        ("ddp", "accumulation", "evaluation", "accelerate", "torchft"),
        zip(CODE[::2], CODE[1::2], strict=True),
        strict=True,
    )
)
DDP, OFFBEAT = (re.split(r"^(?:for|batches|sampler) ", code, flags=re.MULTILINE)[0] for code in PAIRS["ddp"])
LOADER = (
    "sampler = DistributedSampler(dataset)\nloader = DataLoader(dataset, batch_size=32, sampler=sampler)\n"
)
SUM = """
import sys

sys.stdout.write(f"sum {sum(p.double().sum().item() for p in model.parameters())}\\n")
"""
"""What a rank ends with; after a peer has left its loop the ranks' must be the same."""


def run(words: list[object], folder: Path, **env: str) -> str:
    done = subprocess.run(
        [str(word) for word in words],
        cwd=folder,
        env={**ENVIRONMENT, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def script(folder: Path, *parts: str) -> Path:
    (folder / "job.py").write_text("".join(parts))
    return folder / "job.py"


def offbeat(folder: Path, *options: object) -> str:
    words = [sys.executable, "-m", "offbeat", "run", *options, "job.py"]
    return run(words, folder)


def torchrun(folder: Path, file: Path, **env: str) -> str:
    words = ["--standalone", "--nproc-per-node", 2, file]
    return run([sys.executable, "-m", "torch.distributed.run", *words], folder, **env)


def sums(text: str) -> set[str]:
    found = re.findall(r"sum (\S+)", text)
    assert len(found) == 2, text
    return set(found)


def test_the_page_has_pairs() -> None:
    names = ("DDP", "DDP", "DDP", "accelerate", "torchft")
    for name, (peer, own) in zip(names, PAIRS.values(), strict=True):
        assert peer.startswith(f"# {name}")
        assert own.startswith("# Offbeat")
        assert "offbeat" not in peer.partition("\n")[2]


def test_offbeat_instead_of_ddp_runs_under_every_plan(tmp_path: Path) -> None:
    script(tmp_path, COMMON, PAIRS["ddp"][1])
    offbeat(tmp_path, "--virtual", 2, "--plan", "bsp:20% dasgd:60% asp")
    assert set(torch.load(tmp_path / "model.pt")) == {"0.weight", "0.bias", "2.weight", "2.bias"}


@pytest.mark.slow
def test_ddp_and_offbeat_end_alike(tmp_path: Path) -> None:
    script(tmp_path, COMMON, PAIRS["ddp"][1])
    offbeat(tmp_path, "-n", 2)
    own = torch.load(tmp_path / "model.pt")
    torchrun(tmp_path, script(tmp_path, COMMON, PAIRS["ddp"][0]))
    theirs = torch.load(tmp_path / "model.pt")
    assert own.keys() == theirs.keys()
    for name, value in own.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["accumulation", "evaluation"])
def test_parts_of_a_ddp_script(name: str, tmp_path: Path) -> None:
    theirs, own = PAIRS[name]
    torchrun(tmp_path, script(tmp_path, COMMON, DDP, LOADER, theirs, "dist.destroy_process_group()\n"))
    assert (tmp_path / "c.pt").exists() == (name == "evaluation")
    (tmp_path / "c.pt").unlink(missing_ok=True)
    script(tmp_path, COMMON, OFFBEAT, own, SUM)
    for plan in ("bsp", "local(period=2)"):
        assert len(sums(offbeat(tmp_path, "-n", 2, "--all-output", "--plan", plan))) == 1
    assert (tmp_path / "c.pt").exists() == (name == "evaluation")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["accelerate", "torchft"])
def test_offbeat_instead_of_others(name: str, tmp_path: Path) -> None:
    script(tmp_path, COMMON, PAIRS[name][1], SUM)
    options = ["--min", 1] if name == "torchft" else []
    assert len(sums(offbeat(tmp_path, "-n", 2, "--all-output", *options))) == 1


@pytest.mark.slow
def test_accelerate(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    file = script(tmp_path, COMMON, PAIRS["accelerate"][0], SUM)
    # As `accelerate launch` does where there are GPUs; without them it would start one process.
    assert len(sums(torchrun(tmp_path, file, ACCELERATE_USE_CPU="true", HF_HOME=str(tmp_path)))) == 1


@pytest.mark.slow
def test_torchft(tmp_path: Path) -> None:
    pytest.importorskip("torchft", reason="torchft is not installed")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    lighthouse = shutil.which("torchft_lighthouse", path=path)
    assert lighthouse is not None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["--bind", f"[::]:{port}", "--min_replicas", "2", "--join_timeout_ms", "2000"]
    file = script(tmp_path, COMMON, PAIRS["torchft"][0], SUM)
    house = subprocess.Popen([lighthouse, *words], env=ENVIRONMENT, stderr=subprocess.DEVNULL)
    replicas = []
    try:
        for replica in range(2):
            env = {"REPLICA": str(replica), "TORCHFT_LIGHTHOUSE": f"http://localhost:{port}"}
            output = (tmp_path / f"replica-{replica}").open("w")
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
            replicas.append(
                subprocess.Popen(
                    [*command, str(file)], env={**ENVIRONMENT, **env}, stdout=output, stderr=subprocess.STDOUT
                )
            )
        codes = [one.wait(400) for one in replicas]
    finally:
        for one in (*replicas, house):
            one.kill()
            one.wait()
    texts = [(tmp_path / f"replica-{replica}").read_text() for replica in range(2)]
    assert codes == [0, 0], texts
    assert len(sums("\n".join(texts))) == 1
