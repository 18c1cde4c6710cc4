"""Searches over logged runs, and the published figures from the Sync-Switch authors' logs."""

import csv
from pathlib import Path
from statistics import mean

import numpy as np
import pytest

from offbeat.search.core import Search, SearchError, Settings, Trial
from offbeat.search.replay import best, play, pool_of, read_runs, stand_in, table_ii

HERE = Path(__file__).parent
RUNS, CURVES = HERE / "sync_switch_runs.csv", HERE / "sync_switch_curves.csv"
AUTHORS = {"setup": "1", "in_authors_search": "True"}


@pytest.fixture(scope="module")
def rows():
    with RUNS.open(newline="") as file:
        return list(csv.DictReader(file))


def of(rows, setup, protocol, share, group=None, column="acc_final"):
    return [
        float(row[column])
        for row in rows
        if row["setup"] == setup
        and row["protocol"] == protocol
        and abs(float(row["bsp_frac"]) - share) < 0.0005
        and group in (None, row["group"])
    ]


class TestPublished:
    """The logs against the paper: accuracies, times and Table II."""

    @pytest.mark.parametrize(
        ("setup", "share", "accuracies"),
        [("1", 0.05, (0.9188, 0.8918, 0.9174)), ("2", 0.125, (0.7462, 0.7085, 0.7460))],
    )
    def test_accuracies(self, rows, setup, share, accuracies):
        found = (
            mean(of(rows, setup, "bsp", 1.0)),
            mean(of(rows, setup, "asp", 0.0)),
            mean(of(rows, setup, "bsp>asp", share, "switch")),
        )
        assert found == pytest.approx(accuracies, abs=0.00006)

    @pytest.mark.parametrize(
        ("setup", "share", "ratio"), [("1", 0.05, 0.1925), ("2", 0.125, 0.6015), ("3", 0.4998, 0.5280)]
    )
    def test_times(self, rows, setup, share, ratio):
        bsp = mean(of(rows, setup, "bsp", 1.0, column="time_net_s"))
        found = mean(of(rows, setup, "bsp>asp", share, "switch", column="time_net_s"))
        assert found / bsp == pytest.approx(ratio, abs=0.0002)

    def test_time_to_accuracy(self, rows):
        """Setup 1: BSP's mean accuracy is reached 4.07 times as soon, by the best runs."""
        target = mean(of(rows, "1", "bsp", 1.0))
        kinds = {row["run_id"]: row for row in rows}
        reached = {}
        with CURVES.open(newline="") as file:
            for point in csv.DictReader(file):
                run = kinds.get(point["run_id"])
                if run is None or run["setup"] != "1" or float(point["accuracy"]) < target:
                    continue
                kind = run["protocol"], float(run["bsp_frac"])
                if kind in (("bsp", 1.0), ("bsp>asp", 0.05)) and run["group"] in ("baseline", "switch"):
                    reached[kind] = min(reached.get(kind, 1e9), float(point["t_net_s"]))
        assert reached["bsp", 1.0] / reached["bsp>asp", 0.05] == pytest.approx(4.07, abs=0.01)

    def test_table_ii(self):
        found = {
            (row.new, row.target_runs, row.runs): row
            for row in table_ii(read_runs(RUNS, AUTHORS), Settings(), times=1000)
        }
        three = found[True, 3, 3]
        assert three.trainings == pytest.approx(7.47, abs=0.15)
        assert three.amortized == pytest.approx(9.3, abs=0.3)
        assert three.effective == pytest.approx(1.99, abs=0.1)
        assert found[True, 5, 5].trainings - found[False, 0, 5].trainings == pytest.approx(4.97, abs=0.2)
        assert len(found) == 15

    def test_the_means_of_all_logs_give_the_papers_switch_point(self):
        assert best(read_runs(RUNS, AUTHORS), Settings()) == 0.0625


class TestPlay:
    def pool(self):
        draw = np.random.default_rng(1)
        rows = [
            (share, float(np.clip(0.9 + 0.02 * share + draw.normal(0, 0.01), 0, 1)), 1 + 9 * share)
            for share in [1.0, *[k / 32 for k in range(1, 32)]]
            for _ in range(4)
        ]
        return pool_of(rows)

    def test_it_is_the_searchs_own_rule(self):
        """Every search that is played, told the same trials, ends at the same share by the ask/tell core."""
        pool, how = self.pool(), Settings(runs=2, target_runs=2)
        for seed in range(40):
            # A single search draws in the order of its points, so its draws can be drawn again.
            got = play(pool, how, times=1, seed=seed)
            draw = np.random.default_rng(seed)
            search, drawn = Search(how), {}
            while (wish := search.ask()) is not None:
                if wish.share not in drawn:
                    runs = pool[wish.share]
                    drawn[wish.share] = runs[draw.integers(len(runs), size=(1, 2))][0]
                accuracy, seconds = drawn[wish.share][wish.number]
                search.tell(Trial(wish.share, wish.number, float(accuracy), float(seconds)))
            assert got["share"][0] == search.stand.share
            assert got["cost"][0] == pytest.approx(sum(trial.seconds for trial in search.trials))

    def test_the_same_seed_gives_the_same(self):
        pool = self.pool()
        assert table_ii(pool, Settings(), 50) == table_ii(pool, Settings(), 50)

    def test_runs_that_stand_in(self):
        logged = [0.02, 0.05, 0.1, 0.15, 0.25, 0.5, 1.0]
        assert [stand_in(logged, s, False) for s in (0.5, 0.25, 0.125, 0.0625, 0.03125)] == [
            0.5,
            0.25,
            0.1,
            0.05,
            0.02,
        ]
        assert stand_in(logged, 0.1875, True) is None
        assert stand_in(logged, 0.2505, True) == 0.25


class TestFiles:
    def write(self, path, text):
        path.write_text(text)
        return path

    def test_wrong_files_are_named(self, tmp_path):
        cases = [
            ("share,accuracy\n1,0.9\n", "no column seconds or time_net_s"),
            ("share,accuracy,seconds\n1,0.9,x\n", "line 2: share, accuracy and seconds are numbers"),
            ("share,accuracy,seconds\n1,92,10\n", "line 2: share 1 and accuracy 92 lie between 0 and 1"),
            ("share,accuracy,seconds\n0.5,0.9,10\n", "no run is BSP alone"),
            ("share,accuracy,seconds\n", "has no run"),
        ]
        for number, (text, message) in enumerate(cases):
            with pytest.raises(SearchError, match=message):
                read_runs(self.write(tmp_path / f"{number}.csv", text))
        with pytest.raises(SearchError, match=r"--where colour=red: .* has the columns"):
            read_runs(RUNS, {"colour": "red"})
        with pytest.raises(SearchError, match="has no run with setup=9"):
            read_runs(RUNS, {"setup": "9"})
