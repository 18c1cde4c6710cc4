"""What TensorBoard is given: a function of the journal."""

from __future__ import annotations

from pathlib import Path

import pytest
from journals import eventful, write
from typer.testing import CliRunner

from offbeat.cli import app
from offbeat.journal import Record, read
from offbeat.scalars import Note, Scalar, Scalars


def told(rows: list[Record]) -> list[Scalar | Note]:
    scalars = Scalars()
    return [one for row in rows for one in scalars.read(row)]


def test_every_figure_has_its_curve() -> None:
    rows = eventful()
    found = [one for one in told(rows) if isinstance(one, Scalar)]
    losses = [one for one in found if one.tag == "training/loss"]
    assert [(one.step, one.value, one.t) for one in losses] == [
        (row["units"], row["loss"], row["t"]) for row in rows if row["type"] == "step"
    ]
    accuracies = [one.value for one in found if one.tag == "evaluation/accuracy"]
    assert accuracies == [row["values"]["accuracy"] for row in rows if row["type"] == "evaluation"]
    (settle,) = [one for one in found if one.tag == "switch/settle ms"]
    assert (settle.value, settle.step) == (20.0, 500)
    assert {f"waiting/worker {rank}" for rank in range(4)} <= {one.tag for one in found}
    assert [one.value for one in found if one.tag == "workers/members"] == [3, 2, 4]


def test_events_are_told_in_words() -> None:
    notes = [one for one in told(eventful()) if isinstance(one, Note)]
    assert {"events/members", "events/straggler", "events/switch", "events/pushes"} <= {
        one.tag for one in notes
    }


def test_steps_never_go_back_but_by_a_rollback() -> None:
    found = [
        one.step for one in told(eventful()) if isinstance(one, Scalar) and one.tag == "training/progress"
    ]
    assert found == sorted(found)


@pytest.mark.slow
def test_tensorboard_reads_what_is_written(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = write(tmp_path / "run", eventful())
    done = CliRunner().invoke(
        app, ["report", str(run), "-o", str(tmp_path / "r.html"), "--tensorboard", str(tmp_path / "board")]
    )
    assert done.exit_code == 0, done.output
    found = reader.EventAccumulator(str(tmp_path / "board" / "run"))
    found.Reload()
    steps = [row for row in read(run) if row["type"] == "step"]
    written = found.Scalars("training/loss")
    assert [(one.step, one.value) for one in written] == [
        (row["units"], pytest.approx(row["loss"], rel=1e-6)) for row in steps
    ]
    assert written[0].wall_time == pytest.approx(1_750_000_000 + steps[0]["t"], abs=0.01)
