"""Reports, from journals alone, without a browser."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from journals import HOSTILE, PLANS, begin, calm, end, eventful, five, spoiled, steady, steps, write
from typer.testing import CliRunner

from offbeat.cli import app
from offbeat.compare import Row
from offbeat.journal import Record
from offbeat.report.field import entries
from offbeat.report.history import History, ReportError, expand, histories
from offbeat.report.page import page, write_report
from offbeat.report.series import extremes, intervals, smooth
from offbeat.report.verdict import difference, verdict

REPORT = Path(__file__).parent.parent / "offbeat" / "report"


def load(place: Path) -> list[History]:
    return [job for one in expand([place])[0] for job in histories(one)]


def figures(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    parsed: dict[str, Any] = json.loads(found[1])
    return parsed


def shown(text: str) -> str:
    """What a reader sees, without the scripts and the tags."""
    text = re.sub(r"<(script|style)\b.*?</\1>", " ", text, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", text)).split())


# The verdict


def test_the_verdict_of_five_plans(tmp_path: Path) -> None:
    answer = verdict(entries(load(five(tmp_path))))
    assert answer.sentence == (
        "bsp:12.5% asp reached 93.4% accuracy first, in 3.4\xa0s, 1.79 times as fast as bsp (6.0\xa0s); its "
        "final accuracy is 0.2 points lower."
    )
    rows = {row[0]: dict(zip(answer.table.head, row, strict=True)) for row in answer.table.rows}
    assert list(rows) == list(PLANS)
    assert rows["asp"]["time"] == "5.0\xa0s"
    assert rows["asp"]["speed-up"] == "2.00×"
    assert rows["bsp"]["difference, points"] == "reference"
    assert rows["asp"]["difference, points"] == "−4.47"
    assert [answer.table.rows[i][0] for i, column in answer.table.best if column == 1] == ["asp"]
    assert any("One run of each" in note for note in answer.notes)
    assert answer.warnings == []


def test_repetitions_have_a_spread_and_a_difference_has_an_error(tmp_path: Path) -> None:
    for plan in ("bsp", "local"):
        for seed in range(3):
            rows = calm(plan, 10.0 if plan == "bsp" else 5.0, 0.9 + 0.01 * seed, seed=seed)
            write(tmp_path / f"{plan}-{seed}", rows)
    lineup = entries(load(tmp_path))
    assert [entry.group for entry in lineup] == [0, 0, 0, 1, 1, 1]
    answer = verdict(lineup)
    assert "do not differ beyond chance (0.00\xa0±\xa0" in answer.sentence
    assert [row[-1] for row in answer.table.rows] == ["3", "3"]
    assert " ± " in answer.table.rows[0][5]
    accuracy = figures(page(lineup))["evaluated-0"]["data"]
    names = [trace["name"] for trace in accuracy if trace["showlegend"]]
    assert names == ["bsp (mean of 3)", "local (mean of 3)"]
    assert accuracy[3]["y"] == pytest.approx(
        np.mean([trace["y"] for trace in accuracy[:3]], axis=0), rel=1e-5
    )


def test_a_difference_without_repetitions_has_no_error() -> None:
    one, other = Row("a", accuracy=0.9), Row("b", accuracy=0.8)
    assert difference(one, other) == (pytest.approx(10), None)
    many = Row("a", accuracy=0.9, runs=4, accuracies=(0.88, 0.92, 0.9, 0.9))
    found = difference(many, Row("b", accuracy=0.8, runs=2, accuracies=(0.79, 0.81)))
    assert found is not None
    # s²/n of each, added: 0.0163²/4 + 0.0141²/2
    assert found == (pytest.approx(10), pytest.approx(1.29, abs=0.01))
    assert difference(one, Row("b")) is None


def test_runs_that_differ_in_more_than_their_plans_are_told_apart(tmp_path: Path) -> None:
    write(tmp_path / "1", calm("bsp", 10.0, workers=4))
    write(tmp_path / "2", calm("bsp", 6.0, workers=8))
    write(tmp_path / "3", calm("bsp", 6.5, workers=8, argv=["--lr", "0.2"]))
    lineup = entries(load(tmp_path))
    assert [entry.label for entry in lineup] == [
        "bsp [4 workers]",
        "bsp [8 workers]",
        "bsp [--lr 0.2, 8 workers]",
    ]
    (warning,) = verdict(lineup).warnings
    assert warning == "The runs differ in more than their plans: argv (none | --lr 0.2), workers (4 | 8)."


def test_runs_that_did_not_end_are_told_and_have_no_say(tmp_path: Path) -> None:
    write(tmp_path / "1-bsp", calm("bsp", 10.0))
    broken = [*calm("asp", 2.0)[:-1], {"type": "error", "t": 5.0, "rank": 1, "message": "no luck"}]
    write(tmp_path / "2-asp", [row for row in broken if row.get("progress", 0) < 0.5])
    (tmp_path / "3-ssp" / "logs").mkdir(parents=True)
    lineup = entries(load(tmp_path))
    answer = verdict(lineup)
    assert answer.sentence.startswith("Only bsp has ended")
    assert any(
        "asp has no figures: it did not end; stopped at 4" in one and "no luck" in one
        for one in answer.warnings
    )
    write_report([tmp_path], tmp_path / "r.html")
    assert "3-ssp left no journal." in shown((tmp_path / "r.html").read_text())


def test_one_run(tmp_path: Path) -> None:
    (run,) = load(write(tmp_path / "run", eventful()))
    answer = verdict(entries([run]))
    assert answer.sentence == (
        "bsp:50% asp did 1,000 units on 4 workers in 15.1\xa0s; they waited 20% of their time; its final "
        "accuracy is 96.35%."
    )
    facts = dict(answer.table.rows)
    assert facts["Switches"] == "1, 25.5 ms in all"
    assert facts["Recoveries from deaths"] == "1, 45 ms in all; 2 units again"
    assert facts["Mean staleness of a push"] == "3.0 updates"
    assert answer.warnings == [
        "Warning: something is odd",
        "Diverged on rank 1: the loss is nan",
    ]
    assert run.absences[2] == [(pytest.approx(2.0), pytest.approx(10.0), "without rank 2, which is slow")]
    assert run.absences[3] == [(pytest.approx(4.9), pytest.approx(10.0), "rank 3 died")]


def test_virtual_runs_beside_real_ones_are_predictions(tmp_path: Path) -> None:
    write(tmp_path / "1", calm("bsp", 10.0))
    write(tmp_path / "2", calm("bsp", 9.0, backend="virtual"))
    write(tmp_path / "3", calm("asp", 5.0))
    text = page(entries(load(tmp_path)))
    assert figures(text)["predicted"]["data"][1]["x"] == [9.0]
    assert "−10.0%" in shown(text)


def test_a_profile_s_forecast_stands_beside_what_was_measured(tmp_path: Path) -> None:
    parts = {"forward": 30.0, "backward": 60.0, "update": 5.0, "exposed": 4.0, "waiting": 1.0}
    told = {
        "type": "forecast",
        "t": 3.0,
        "protocol": "bsp",
        "members": 4,
        "predicted_ms": 100.0,
        "parts": parts,
    }
    rows = calm("bsp", 10.0)
    told["parts"] = parts
    early, late = ({**told, "actual_ms": ms, "own_ms": own} for ms, own in ((150.0, None), (90.0, 80.0)))
    odd = [
        {"type": "forecast", "t": 4.0, "protocol": "<i>", "predicted_ms": "nan", "parts": 3},
        {**told, "actual_ms": "NaN", "protocol": "asp"},
        {**told, "actual_ms": 1.0, "protocol": "ssp", "parts": None},
    ]
    write(tmp_path, [*rows[:-1], early, *odd, late, rows[-1]])
    text = page(entries(load(tmp_path)))
    bars = figures(text)["forecast-0"]["data"]
    assert [bar["x"] for bar in bars] == [[30.0], [60.0], [5.0], [4.0], [1.0], [90.0]]
    assert all(told in shown(text) for told in ("100 ms", "90 ms", "−10.0%", "95 ms", "80 ms"))


# What a journal may be


def test_every_part_of_an_eventful_run_is_there(tmp_path: Path) -> None:
    write_report([write(tmp_path, eventful())], tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    assert list(figures(text)) == [
        *("evaluated-0", "evaluated-1", "training-loss", "learning-rate"),
        *("timeline-0", "speeds-0", "staleness-0", "switches-0"),
    ]
    for told in (
        "members now 0, 1, 3: without rank 2, which is slow",
        "rank 2 flagged as a straggler: 4 units/s of its own time, limit 8",
        "went on without the dead after 45 ms; 2 units are dealt again",
        "switch bsp → asp at 50.0% (500 units): 25.5 ms (drain 3.0, settle 20.0, transfer 2.5)",
        "checkpoint saved in 12 ms: a.pt",
        "asked to checkpoint, done: saved",
        "rollback from 411 to 400 units",
        "torch version 2.13",
    ):
        assert told in shown(text)


def test_a_journal_cut_off_anywhere_gives_a_report_or_says_why(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole", eventful()) / "journal.jsonl"
    data = whole.read_bytes()
    place = tmp_path / "cut"
    place.mkdir()
    for size in [*range(0, 1000, 97), *range(1000, len(data), len(data) // 12)]:
        for text in (data[:size], data[data.index(b"\n", size) + 1 :]):  # its end, or its beginning
            (place / "journal.jsonl").write_bytes(text)
            try:
                (run,) = histories(place)
            except ReportError as error:
                assert "holds no record yet" in str(error)  # noqa: PT017
                assert text.count(b"\n") == 0
            else:
                assert page(entries([run]))


def test_what_is_no_journal_is_told(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="there is no"):
        expand([tmp_path / "none"])
    with pytest.raises(ReportError, match=r"holds no journal.jsonl, nor do the directories in it"):
        expand([tmp_path])
    (tmp_path / "journal.jsonl").write_text("")
    with pytest.raises(ReportError, match="holds no record yet: nothing to report"):
        histories(tmp_path)
    (tmp_path / "journal.jsonl").write_text('{"type": "run"}\nno record\n')
    with pytest.raises(ReportError, match="is not a journal of offbeat: line 2 is 'no record'"):
        histories(tmp_path)


@pytest.mark.parametrize("row", eventful()[:1] + eventful()[3:8] + [end(3.0)], ids=lambda row: row["type"])
def test_one_record_is_enough(tmp_path: Path, row: Record) -> None:
    assert page(entries(histories(write(tmp_path, [row]))))


def test_losses_that_are_no_numbers_leave_gaps_and_are_counted(tmp_path: Path) -> None:
    rows = calm("bsp", 10.0)
    for number, row in enumerate(row for row in rows if row["type"] == "step"):
        row["loss"] = ["nan", "inf", "-inf", None, row["loss"]][number % 5]
    text = page(entries(histories(write(tmp_path, rows))))
    assert "NaN" not in json.dumps(figures(text))
    assert "32 sampled steps had no finite loss and leave gaps." in shown(text)


def test_journals_of_other_versions_are_read_as_far_as_they_go(tmp_path: Path) -> None:
    old = [
        {key: row[key] for key in ("type", "t", "protocol", "units", "loss", "plan") if key in row}
        for row in eventful()
    ]
    new = [{**row, "novel": {"a": [1]}} for row in eventful()] + [
        {"type": "novel", "t": 1},
        {"type": ["odd"], "t": "x"},
    ]
    write(tmp_path / "1", old)
    write(tmp_path / "2", new)
    write(tmp_path / "3", calm("bsp", 10.0))
    assert page(entries(load(tmp_path)))


def test_several_jobs_of_one_script_are_several_runs(tmp_path: Path) -> None:
    found = histories(write(tmp_path / "run", [*calm("bsp", 4.0), *calm("asp", 2.0)]))
    assert [job.name for job in found] == ["run #1", "run #2"]
    assert page(entries(found))


@settings(max_examples=20, deadline=None)
@given(rows=spoiled())
def test_spoiled_fields_never_spoil_a_report(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Record]
) -> None:
    place = write(tmp_path_factory.mktemp("run"), rows)
    jobs = histories(place)
    assert page(entries([*jobs, *histories(place)]))
    assert page(entries(jobs[:1]))


def test_hostile_texts_come_out_as_text(tmp_path: Path) -> None:
    for number, bad in enumerate(HOSTILE):
        rows = eventful(text=bad)
        rows[0] |= {"plan": bad, "script": bad, "argv": [bad], "host": bad, "versions": {bad: bad}}
        for row in rows:
            if row["type"] == "evaluation":
                row["values"] = {bad: 0.5}
            if row["type"] == "phase":
                row["protocol"] = bad
        write(tmp_path / str(number), rows)
    places = [tmp_path / str(number) for number in range(len(HOSTILE))]
    for chosen in ([places[0]], [places[3]], places):
        write_report(chosen, tmp_path / "r.html")
        text = (tmp_path / "r.html").read_text()
        assert (
            len(
                re.findall(
                    r"<script\b",
                    re.sub(r"<script>(.*?)</script>", "<script></script>", text, flags=re.DOTALL),
                )
            )
            == 3
        )
        for bad in HOSTILE:
            assert bad not in text
        assert "<img" not in text
        assert "{{ 7*7 }}" in shown(text) or chosen != places


# What is drawn


def test_no_peak_is_lost_in_a_long_series() -> None:
    values = np.sin(np.arange(200_000) / 50.0)
    values[[0, 77_777, 150_001, 199_999]] = [3, 99, -99, 4]
    values[1000:1010] = np.nan
    kept = extremes(values, 1500)
    assert kept.size <= 1502
    assert np.all(np.diff(kept) > 0)
    assert {0, 77_777, 150_001, 199_999} <= set(kept.tolist())
    assert np.isfinite(values[kept]).all()
    few = np.array([1.0, np.nan, 2.0])
    assert extremes(few).tolist() == [0, 2]


def test_smoothing_keeps_the_mean() -> None:
    values = np.random.default_rng(0).normal(size=12_345)
    even = smooth(values, {"t": np.arange(12_345.0)})
    assert even is not None
    assert even.mean.size <= 101
    assert np.average(even.mean[:-1]) == pytest.approx(values[: (even.mean.size - 1) * even.size].mean())
    assert smooth(values[:20], {}) is None


def test_shares_of_time_are_whole_and_absent_workers_have_none(tmp_path: Path) -> None:
    (run,) = histories(write(tmp_path, eventful()))
    what = intervals(run, 40, steps=0)
    assert what is not None
    sums = what.computing + what.exchanging + what.waiting
    assert np.nanmin(sums) == pytest.approx(1)
    assert np.nanmax(sums) == pytest.approx(1)
    away = (what.begin > 2.5) & (what.end < 9.5)
    assert np.isnan(what.computing[away, 2]).all()
    assert np.isfinite(what.computing[what.end < 1.5, 2]).all()


def test_exchange_is_what_even_the_member_that_waited_least_waited(tmp_path: Path) -> None:
    (run,) = histories(write(tmp_path, calm("bsp", 10.0, workers=4)))
    what = intervals(run)
    assert what is not None
    assert np.allclose(
        what.exchanging, 0.125
    )  # of the last rank's time, who waits half as long as the others
    assert np.allclose(what.waiting[:, :3], 0.125)
    assert np.allclose(what.waiting[:, 3], 0)


def test_all_colours_are_in_both_themes(tmp_path: Path) -> None:
    css = (REPORT / "page.css").read_text()
    themes = [
        set(re.findall(r"--([a-z0-9-]+):", part)) for part in re.findall(r":root[^{]*\{([^}]*)\}", css)[:2]
    ]
    themes[1] |= {"page"}

    def tones(value: Any) -> Iterator[str]:
        if isinstance(value, str) and value.startswith("@"):
            yield value[1:].split("/")[0]
        elif isinstance(value, dict):
            for one in value.values():
                yield from tones(one)
        elif isinstance(value, list):
            for one in value:
                yield from tones(one)

    write(tmp_path / "many" / "a", eventful(40))
    write(tmp_path / "many" / "b", [*begin("novel"), *steady("novel", 4, 5.0), end(5.0)])
    write(tmp_path / "many" / "c", eventful())
    five(tmp_path / "many")
    used = set(tones(figures(page(entries(load(tmp_path / "many"))))))
    used |= set(tones(figures(page(entries(load(tmp_path / "many" / "a"))))))
    assert {"run4", "compute", "bsp", "other-ink", "flag", "switch"} <= used
    for theme in themes:
        assert used <= theme


def test_plotly_knows_every_setting_of_every_figure(tmp_path: Path) -> None:
    plotly = pytest.importorskip("plotly.graph_objects")
    write(tmp_path / "a", eventful())
    write(tmp_path / "b", eventful(40))
    write(tmp_path / "c", calm("bsp", 10.0))

    def plain(value: Any) -> Any:
        if isinstance(value, str):
            return "#123456" if value.startswith("@") else value
        if isinstance(value, dict):
            return {key: plain(one) for key, one in value.items() if key not in ("short", "part")}
        return [plain(one) for one in value] if isinstance(value, list) else value

    for chosen in (["a"], ["b"], ["a", "b", "c"]):
        text = page(entries([job for name in chosen for job in histories(tmp_path / name)]))
        for spec in figures(text).values():
            plotly.Figure(plain(spec["data"]), plain(spec["layout"]))
            for choice in spec["axes"].values():
                assert len(choice["x"]) == len(spec["data"])
                plotly.Figure([], plain({key: choice[key] for key in ("shapes", "annotations")}))


# The command


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    five(Path("all"))
    runner = CliRunner()
    done = runner.invoke(app, ["report", "all"])
    assert (done.exit_code, done.output) == (
        0,
        "all/report.html: the verdict, accuracy and loss against time, samples and progress, what each "
        "worker did with its time, events and settings\n",
    )
    assert runner.invoke(app, ["report", "all/1-plan", "all/2-plan"]).exit_code == 0
    assert Path("report.html").stat().st_size < 3_000_000
    done = runner.invoke(app, ["report", "all/1-plan/journal.jsonl", "-o", "no/r.html"])
    assert (done.exit_code, done.output) == (
        2,
        "offbeat: error: no/r.html cannot be written: No such file or directory\n",
    )
    done = runner.invoke(app, ["report", "all/9-plan"])
    assert (done.exit_code, done.output) == (2, "offbeat: error: there is no all/9-plan\n")
    assert not list(Path().glob(".*.part"))


def test_equal_journals_make_equal_pages(tmp_path: Path) -> None:
    """A report is a function of journals: no clock and no chance in it."""
    run = write(tmp_path / "run", eventful())
    first, second = (page(entries(histories(run))) for _ in range(2))
    assert first == second


@pytest.mark.slow
def test_a_million_steps(tmp_path: Path) -> None:
    with (tmp_path / "journal.jsonl").open("w") as file:
        file.writelines(steps(1_000_000))
    write_report([tmp_path], tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    assert len(text) < 3_000_000
    (loss,) = [one for name, one in figures(text).items() if name == "training-loss"]
    assert all(len(trace["y"]) <= 1502 for trace in loss["data"])
    assert "1,000,000" in shown(text)
