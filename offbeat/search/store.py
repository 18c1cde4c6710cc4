"""What searches have found, kept for jobs that recur: one SQLite file for a person or for a project.

Every change is one transaction, in SQLite's write-ahead log: two processes may write at once, and one that is
killed leaves what was there.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path

VERSION = 1
"""Of the tables below. A file with a higher one is left alone."""
PATIENCE = 30.0
"""Seconds to wait for another process's transaction."""
PROJECT = ".offbeat"
"""A folder of this name, here or above, makes its jobs.sqlite the store."""

_TABLES = """
CREATE TABLE job (
    id INTEGER PRIMARY KEY, name TEXT UNIQUE, fingerprint TEXT NOT NULL, script TEXT NOT NULL,
    workers INTEGER NOT NULL, virtual INTEGER NOT NULL, plan TEXT NOT NULL, share REAL NOT NULL,
    target REAL NOT NULL, bsp_seconds REAL NOT NULL, plan_seconds REAL NOT NULL, trainings REAL NOT NULL,
    trials INTEGER NOT NULL, found REAL NOT NULL
);
CREATE INDEX job_by_fingerprint ON job (fingerprint);
CREATE TABLE recurrence (
    job INTEGER NOT NULL REFERENCES job (id) ON DELETE CASCADE, seconds REAL NOT NULL, ended REAL NOT NULL
);
"""


class StoreError(ValueError):
    """A store that cannot be used, or that doesn't hold what is asked for."""


@dataclass(frozen=True)
class Job:
    """A search's result. name: the person's, if any. plan: the text that was found, with `share` of BSP;
    target: the accuracy that BSP reached. bsp_seconds, plan_seconds: a training's time with BSP and with the
    plan (virtual seconds where `virtual`). trainings: what the search cost, in trainings with BSP; trials:
    how many it made. found: unix time."""

    name: str | None
    fingerprint: str
    script: str
    workers: int
    virtual: bool
    plan: str
    share: float
    target: float
    bsp_seconds: float
    plan_seconds: float
    trainings: float
    trials: int
    found: float

    @property
    def saved(self) -> float:
        """Trainings with BSP that each run with the plan saves."""
        return 1 - self.plan_seconds / self.bsp_seconds


def place(given: str | None = None) -> Path:
    """Where the store is: as given, else OFFBEAT_STORE, else the project's, else the user's."""
    if given or (given := os.environ.get("OFFBEAT_STORE")):
        return Path(given)
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / PROJECT).is_dir():
            return folder / PROJECT / "jobs.sqlite"
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(data) / "offbeat" / "jobs.sqlite"


class Store:
    """The jobs in the file `path`, which is made with the first of them.

    Raises StoreError for a file that is no store, or a newer offbeat's."""

    def __init__(self, path: Path):
        self.path = path

    def add(self, job: Job) -> None:
        """Keeps a search's result. It takes the place of an earlier one of the same name, or of the same
        fingerprint where neither has a name; the runs counted for that one are kept."""
        values = asdict(job)
        with self._change() as file:
            if job.name is not None:
                row = file.execute("SELECT id FROM job WHERE name = ?", (job.name,)).fetchone()
            else:
                words = "SELECT id FROM job WHERE name IS NULL AND fingerprint = ?"
                row = file.execute(words, (job.fingerprint,)).fetchone()
            if row is None:
                names = ", ".join(values)
                file.execute(f"INSERT INTO job ({names}) VALUES ({_marks(values)})", tuple(values.values()))
            else:
                sets = ", ".join(f"{name} = ?" for name in values)
                file.execute(f"UPDATE job SET {sets} WHERE id = ?", (*values.values(), row[0]))

    def find(self, name: str | None = None, fingerprint: str | None = None) -> Job:
        """The job of a name, or the newest with a fingerprint. Raises StoreError when there is none."""
        key, value = ("name", name) if name is not None else ("fingerprint", fingerprint)
        jobs = self._jobs(f"WHERE {key} = ? ORDER BY found DESC", (value,))
        if not jobs:
            known = [job.name for job in self.jobs() if job.name]
            what = f"job {name!r}" if name is not None else "search for this job"
            hint = f"; it has {', '.join(known)}" if name is not None and known else ""
            raise StoreError(f"{self.path} knows no {what}{hint}: run `offbeat search` first")
        return jobs[0]

    def count(self, job: Job, seconds: float) -> None:
        """The job has run again with its plan."""
        with self._change() as file:
            file.execute(
                "INSERT INTO recurrence SELECT id, ?, ? FROM job WHERE fingerprint = ? AND name IS ?",
                (seconds, time.time(), job.fingerprint, job.name),
            )

    def jobs(self) -> list[Job]:
        """All jobs, the newest first."""
        return self._jobs("ORDER BY found DESC")

    def recurrences(self, job: Job) -> list[float]:
        """Seconds of the job's runs with its plan."""
        with self._open() as file:
            rows = file.execute(
                "SELECT seconds FROM recurrence JOIN job ON job.id = recurrence.job "
                "WHERE fingerprint = ? AND name IS ? ORDER BY ended",
                (job.fingerprint, job.name),
            )
            return [row[0] for row in rows]

    def _jobs(self, words: str, values: tuple[object, ...] = ()) -> list[Job]:
        names = [field.name for field in fields(Job)]
        if not self.path.exists():
            return []
        with self._open() as file:
            rows = file.execute(f"SELECT {', '.join(names)} FROM job {words}", values).fetchall()
        found = [dict(zip(names, row, strict=True)) for row in rows]
        return [Job(**{**row, "virtual": bool(row["virtual"])}) for row in found]

    @contextmanager
    def _change(self) -> Iterator[sqlite3.Connection]:
        with self._open() as file:
            file.execute("BEGIN IMMEDIATE")
            yield file
            file.execute("COMMIT")

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        file = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = sqlite3.connect(self.path, timeout=PATIENCE, isolation_level=None)
            self._prepare(file)
            yield file
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"the store {self.path} cannot be used: {error}") from None
        finally:
            if file is not None:
                file.close()  # takes back a transaction that is still open

    def _prepare(self, file: sqlite3.Connection) -> None:
        file.execute("PRAGMA foreign_keys = ON")
        version = file.execute("PRAGMA user_version").fetchone()[0]
        if version > VERSION:
            raise StoreError(
                f"the store {self.path} is a newer offbeat's (version {version}, this one knows {VERSION}): "
                f"update offbeat, or give another --store"
            )
        if version < VERSION:
            file.execute("PRAGMA journal_mode = WAL")
            file.execute("BEGIN IMMEDIATE")  # of two processes that come here one makes the tables
            if file.execute("PRAGMA user_version").fetchone()[0] == 0:
                for words in filter(str.strip, _TABLES.split(";")):
                    file.execute(words)
                file.execute(f"PRAGMA user_version = {VERSION}")
            file.execute("COMMIT")


def _marks(values: dict[str, object]) -> str:
    return ", ".join("?" * len(values))
