"""What searches have found, in one file that several processes write to."""

import multiprocessing
import os
import signal
import sqlite3
import time
from dataclasses import replace

import pytest

from offbeat.search.store import Job, Store, StoreError, place

JOB = Job("mine", "f" * 16, "train.py", 8, True, "bsp:6.25% asp", 0.0625, 0.9188, 100.0, 20.0, 7.5, 18, 1.0)


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "under" / "jobs.sqlite")


def test_a_job_comes_back_as_it_was(store):
    store.add(JOB)
    assert store.find(name="mine") == store.find(fingerprint="f" * 16) == JOB
    assert store.jobs() == [JOB]


def test_a_newer_search_takes_the_place_and_the_count_stays(store):
    store.add(JOB)
    store.count(JOB, 21.0)
    newer = replace(JOB, plan="bsp:12.5% asp", found=2.0)
    store.add(newer)
    assert store.jobs() == [newer]
    assert store.recurrences(newer) == [21.0]


def test_names_and_fingerprints_are_apart(store):
    nameless = replace(JOB, name=None, plan="bsp:25% asp", found=2.0)
    for job in (JOB, nameless, replace(JOB, name="other", fingerprint="0" * 16)):
        store.add(job)
    assert len(store.jobs()) == 3
    assert store.find(name="mine") == JOB
    assert store.find(fingerprint="f" * 16) == nameless  # the newest
    store.count(nameless, 5.0)
    assert (store.recurrences(nameless), store.recurrences(JOB)) == ([5.0], [])


def test_what_it_does_not_know_is_named(store):
    with pytest.raises(StoreError, match="knows no job 'mine': run `offbeat search` first"):
        store.find(name="mine")
    store.add(JOB)
    with pytest.raises(StoreError, match="knows no job 'mien'; it has mine"):
        store.find(name="mien")
    assert not store.recurrences(replace(JOB, name="mien"))


def test_a_newer_schema_is_left_alone(store):
    store.add(JOB)
    with sqlite3.connect(store.path) as file:
        file.execute("PRAGMA user_version = 7")
    with pytest.raises(StoreError, match=r"a newer offbeat's \(version 7, this one knows 1\)"):
        store.add(JOB)
    with pytest.raises(StoreError, match="newer"):
        store.jobs()


def test_a_file_that_is_no_store(tmp_path):
    (tmp_path / "text").write_text("hello, this is no database at all, and long enough to be seen as none")
    with pytest.raises(StoreError, match="cannot be used"):
        Store(tmp_path / "text").jobs()
    with pytest.raises(StoreError, match="cannot be used"):
        Store(tmp_path / "text" / "jobs.sqlite").add(JOB)


def test_where_it_is(tmp_path, monkeypatch):
    monkeypatch.delenv("OFFBEAT_STORE", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    inside = tmp_path / "project" / "deep"
    inside.mkdir(parents=True)
    monkeypatch.chdir(inside)
    assert place() == tmp_path / "data" / "offbeat" / "jobs.sqlite"
    (tmp_path / "project" / ".offbeat").mkdir()
    assert place() == tmp_path / "project" / ".offbeat" / "jobs.sqlite"
    monkeypatch.setenv("OFFBEAT_STORE", "elsewhere")
    assert str(place()) == "elsewhere"
    assert str(place("here")) == "here"


def _add(path, first, count):
    for number in range(first, first + count):
        Store(path).add(replace(JOB, name=f"job{number}", found=float(number)))
        Store(path).count(replace(JOB, name=f"job{number}"), 1.0)


def test_two_processes_write_at_once(store):
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_add, args=(store.path, 100 * k, 25)) for k in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    jobs = store.jobs()
    assert len(jobs) == 50
    assert all(store.recurrences(job) == [1.0] for job in jobs)


def test_a_writer_that_is_killed_leaves_what_was_there(store):
    store.add(JOB)
    context = multiprocessing.get_context("spawn")
    for attempt in range(3):
        writer = context.Process(target=_add, args=(store.path, 1000 * attempt, 10**6))
        writer.start()
        end = time.monotonic() + 60
        while len(store.jobs()) < 20 * (attempt + 1) and time.monotonic() < end:
            time.sleep(0.01)
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        jobs = store.jobs()
        assert JOB in jobs
        assert all(len(store.recurrences(job)) <= 1 for job in jobs)
    store.add(replace(JOB, name="after"))  # nobody holds it any more
    with sqlite3.connect(store.path) as file:
        assert file.execute("PRAGMA integrity_check").fetchone() == ("ok",)
