"""`benchmarks/choice.py`: which plan on which cluster."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from offbeat import journal

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture(scope="module")
def choice() -> Iterator[Any]:
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module("choice")
    sys.path.remove(str(BENCHMARKS))


def test_another_clock_says_when_an_evaluation_was(choice: Any) -> None:
    steps = [(0.25, 1.0), (0.5, 3.0), (0.75, 9.0), (1.0, 10.0)]
    assert [choice.when(steps, share) for share in (0.1, 0.25, 0.3, 0.75, 1.0)] == [1.0, 1.0, 3.0, 9.0, 10.0]


def test_the_time_to_the_target_is_that_of_the_first_evaluation_above_it(choice: Any) -> None:
    curve = [(1.0, 0.2), (2.0, 0.5), (3.0, 0.4), (4.0, 0.6)]
    assert choice.reached(curve, 0.5) == 2.0
    assert choice.reached(curve, 0.6) == 4.0
    assert choice.reached(curve, 0.7) is None


def test_a_plan_of_which_one_seed_stays_below_has_no_time(choice: Any) -> None:
    fast, slow, low = [(1.0, 0.6)], [(4.0, 0.6)], [(1.0, 0.3)]
    curves = {"bsp": [slow, slow], "dasgd(4,2)": [fast, slow], "asp": [fast, low]}
    rows = {row.name: row for row in choice.rows_of("fast", curves, 0.5)}
    assert (rows["dasgd(4,2)"].ratio, rows["dasgd(4,2)"].spread) == (2.5, (1.0, 4.0))
    assert rows["asp"].ratio is None
    assert rows["asp"].values["accuracy, %"][0] == pytest.approx(45.0)


def test_clusters_are_descriptions(choice: Any) -> None:
    from offbeat.virtual.description import read

    for name in choice.CLUSTERS:
        cluster = read(BENCHMARKS / "clusters" / f"{name}.toml")
        assert cluster.sized(choice.WORKERS).size == choice.WORKERS
        assert cluster.name == choice.name_of(name)


SCRIPT = """
import torch, offbeat
offbeat.init(seed=1)
model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.ReLU(), torch.nn.Linear(30, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
x = torch.randn(256, 20, generator=torch.Generator().manual_seed(0))
y = (x[:, :3] + 0.3 * x[:, 3:6]).argmax(1)
sync = offbeat.Synchronizer(model, optimizer, plan="bsp", total=160, lr_reference="worker")
for a, b in sync.batches((x, y), batch_size=8):
    torch.nn.functional.cross_entropy(model(a), b).backward()
    sync.step()
if offbeat.rank() == 0:
    sync.log(whole=sum(p.double().abs().sum().item() for p in model.parameters()))
"""


def trained(plan: str, cluster: str, folder: Path) -> float:
    """A number that any other parameters would change."""
    (folder / "train.py").write_text(SCRIPT)
    out = folder / cluster
    words = [
        sys.executable,
        "-m",
        "offbeat",
        "run",
        "-q",
        "--virtual",
        "8",
        "--out",
        str(out),
        "--plan",
        plan,
    ]
    words += ["--cluster", str(BENCHMARKS / "clusters" / f"{cluster}.toml"), "--seed", "1", "train.py"]
    subprocess.run(words, cwd=folder, check=True, capture_output=True, timeout=300)
    return next(row["values"]["whole"] for row in journal.read(out) if row["type"] == "evaluation")


@pytest.mark.slow
def test_plans_that_wait_compute_the_same_on_every_cluster(choice: Any, tmp_path: Path) -> None:
    for number, plan in enumerate(choice.WAITING):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert trained(plan, "fast", folder) == trained(plan, "straggler", folder), plan


def test_asynchronous_plans_do_not(choice: Any, tmp_path: Path) -> None:
    assert trained("asp", "fast", tmp_path) != trained("asp", "straggler", tmp_path)
