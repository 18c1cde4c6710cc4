"""A disk that is full under the journal and the checkpoints: the job goes on, and what was whole stays so."""

from __future__ import annotations

import resource
import signal
from pathlib import Path

import offbeat
from offbeat import journal
from offbeat.journal import Journal
from tests.contract_parity import all_hold_the_same, apart
from tests.engines import RealEngine
from tests.models import flat
from tests.reference import usual
from tests.scripts import Result, Setup, result
from tests.scripts_stragglers import restored


def full(size: int | None) -> None:
    """From here on this process's files can't grow beyond `size` bytes, as on a disk without room (None: they
    can again)."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (most if size is None else size, most))


def saves_in_vain(setup: Setup, path: Path) -> Result:
    """Saves once; then its disk is full for a while."""
    model, optimizer, sync = setup.start()
    held, said, steps = flat(model), "", 0
    with sync:
        while not sync.done:
            usual(model, offbeat.rank(), sync._loop.worker.clock).backward()
            sync.step()
            steps += 1
            if steps == 3:
                sync.save(path)
                held = flat(model)
                full(500)
            elif steps == 6:
                try:
                    sync.save(path)
                except OSError as error:
                    said = str(error)
            elif steps == 9:
                full(None)
    return result(model, optimizer, sync, notes={"held": held, "said": said})


def test_a_job_goes_on_when_its_disk_is_full(tmp_path: Path) -> None:
    engine, path = RealEngine(tmp_path / "runs"), tmp_path / "saved" / "here.pt"
    for plan in ("bsp", "dasgd(4,2)"):
        setup = Setup(plan, 60, momentum=0.9)
        found = engine.run(3, saves_in_vain, setup, path)
        all_hold_the_same(found)
        assert found[0].units >= 60
        for one in found:
            assert one.notes["said"].startswith(f"the checkpoint {path} could not be written: ")
        assert [one.name for one in path.parent.iterdir()] == ["here.pt"]
        kinds = [row["type"] for row in journal.read(engine.out)]
        assert kinds[0] == "run"
        assert kinds[-1] == "end"
        assert kinds.count("end") == kinds.count("checkpoint") == 1
        (again, *_) = engine.run(3, restored, setup, path)
        assert again.notes["units"] == 9
        assert apart(again.notes["held"], found[0].notes["held"]) == 0


def test_a_journal_is_whole_once_there_is_room_again(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    one = Journal(path, started=0.0, interval=60.0)
    one.record("first", text="x" * 50)
    one.flush()
    size = path.stat().st_size
    try:
        full(size + 20)
        for number in range(5):
            one.record("more", number=number)
            one.flush()
        assert path.stat().st_size == size
    finally:
        full(None)
    one.close()
    assert [row.get("number") for row in journal.read(path)] == [None, 0, 1, 2, 3, 4]
