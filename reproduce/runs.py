"""Runs of `offbeat run`, each a command, and the folder in which those that are over are kept.

A run's folder is named after its command, so items that need the same run share it, and a command that was
interrupted goes on where it was: a run without its last evaluation is begun again. The journal is the record.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from offbeat import journal
from offbeat.options import slug
from reproduce import ROOT

TRAIN = "reproduce/train.py"
WORST = 10.0
"""What a loss counts as at most."""


class RunError(RuntimeError):
    """A run has failed; says which command, and its last words."""


@dataclass(frozen=True)
class Run:
    """One training. launch: the words of `offbeat run` before the plan; script: those for train.py. data:
    which data set, "cifar10" or "cifar100". minutes: what it takes, of a core."""

    plan: str
    seed: int
    launch: tuple[str, ...]
    script: tuple[str, ...]
    data: str = "cifar10"
    minutes: float = 0.0

    @property
    def words(self) -> list[str]:
        """Without what differs between machines: the folders."""
        launch = ["run", "-q", *self.launch, "--plan", self.plan, "--seed", str(self.seed)]
        return [*launch, "--on-diverge", "ignore", TRAIN, *self.script]

    @property
    def name(self) -> str:
        key = hashlib.sha256(repr((self.words, self.data)).encode()).hexdigest()[:10]
        return f"{slug(self.plan)}-{self.seed}-{key}"


@dataclass(frozen=True)
class Result:
    """What a run's journal says. accuracy, loss: of the test images at the end, train_loss of training
    images then. seconds: (virtual) time. curve: (progress, seconds, accuracy, loss) of each evaluation;
    steps: (progress, loss) of the steps that were sampled; looks: (progress, values) of `train.Look`."""

    accuracy: float
    loss: float
    train_loss: float
    seconds: float
    curve: tuple[tuple[float, float, float, float], ...]
    steps: tuple[tuple[float, float], ...]
    looks: tuple[tuple[float, dict[str, float]], ...]

    @classmethod
    def read(cls, folder: Path) -> Result | None:
        """None where the run isn't over."""
        try:
            rows = journal.read(folder)
        except (FileNotFoundError, ValueError):
            return None
        told = [row for row in rows if row["type"] == "evaluation"]
        ends = [row for row in rows if row["type"] == "end"]
        if not ends or not told or "train_loss" not in told[-1]["values"]:
            return None
        curve, looks = [], []
        for row in told:
            values = {key: bounded(value) for key, value in row["values"].items()}
            if "accuracy" in values:
                curve.append((row["progress"], row["t"], values["accuracy"], values["loss"]))
            else:
                looks.append((row["progress"], values))
        steps = [(row["progress"], bounded(row["loss"])) for row in rows if row["type"] == "step"]
        last = {key: bounded(value) for key, value in told[-1]["values"].items()}
        return cls(
            last["accuracy"],
            last["loss"],
            last["train_loss"],
            float(ends[-1]["seconds"]),
            tuple(curve),
            tuple(steps),
            tuple(looks),
        )


def bounded(value: float | str) -> float:
    """A figure of a journal. One that is no number, or above it, is WORST: a run that has diverged still
    counts."""
    number = float(value)
    return min(number, WORST) if isfinite(number) else WORST


class Store:
    """The folder of runs. data: where each data set is."""

    def __init__(self, folder: Path, data: dict[str, str]):
        self.folder, self.data = folder, data
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock, self._ended = threading.Lock(), False

    def command(self, run: Run, launched: bool = False) -> list[str]:
        """`offbeat run ...`, as a person would type it in the repository's root; launched: from anywhere."""
        out, data = self.folder / run.name, Path(self.data[run.data])
        if launched:
            places = [os.path.abspath(path) for path in (out, data)]
        else:
            places = [str(p.relative_to(ROOT) if p.is_relative_to(ROOT) else p) for p in (out, data)]
        return ["offbeat", "run", "-q", "--out", places[0], *run.words[2:], "--data", places[1]]

    def result(self, run: Run) -> Result | None:
        return Result.read(self.folder / run.name)

    def finished(self, run: Run) -> Result:
        """Raises LookupError where it isn't over."""
        if (found := self.result(run)) is None:
            raise LookupError(f"the run {run.name} in {self.folder} is not over")
        return found

    def missing(self, runs: Iterable[Run]) -> list[Run]:
        return [run for run in dict.fromkeys(runs) if self.result(run) is None]

    def complete(self, runs: Sequence[Run], jobs: int) -> None:
        """Does those that are missing, `jobs` side by side. Raises RunError for one that fails; those that
        go on beside it are ended."""
        missing = self.missing(runs)
        done, begun = 0, time.monotonic()

        def one(run: Run) -> None:
            nonlocal done
            self._run(run)
            done += 1
            spent = (time.monotonic() - begun) / 60
            print(f"  {done} of {len(missing)} runs, {spent:.1f} minutes: {run.name}", flush=True)

        with ThreadPoolExecutor(jobs) as pool:
            try:
                futures = [pool.submit(one, run) for run in missing]
                for future in wait(futures, return_when=FIRST_EXCEPTION).done:
                    future.result()
            except BaseException:
                self._ended = True
                pool.shutdown(wait=False, cancel_futures=True)
                with self._lock:
                    for process in self._running:
                        process.terminate()
                raise

    def _run(self, run: Run) -> None:
        out = self.folder / run.name
        if out.exists():
            shutil.rmtree(out)
        out.parent.mkdir(parents=True, exist_ok=True)
        place = {**os.environ, "OMP_NUM_THREADS": "1"}
        place["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        words = [sys.executable, "-m", *self.command(run, launched=True)]
        with (self.folder / f"{run.name}.log").open("wb") as log:
            with self._lock:
                if self._ended:
                    return
                process = subprocess.Popen(words, cwd=ROOT, env=place, stdout=log, stderr=log)
                self._running.add(process)
            code = process.wait()
            with self._lock:
                self._running.discard(process)
        if self.result(run) is None:
            said = Path(log.name).read_text(errors="replace")[-2000:]
            raise RunError(f"a run ended with code {code}:\n{' '.join(self.command(run))}\n{said}")
