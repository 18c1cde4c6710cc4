"""The search for the switch point: on made-up accuracy curves, where the answer is known."""

import random
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.search.core import (
    BSP,
    Search,
    SearchError,
    Settings,
    Trial,
    Wish,
    doubts,
    look,
    midpoint,
    quantile,
)
from offbeat.search.cost import cost


def conduct(search, accuracy, seconds=lambda share: 0.15 + 0.85 * share, most=1000):
    """Tells a search what `accuracy(share, number)` gives (None: diverged) until it is over."""
    for _ in range(most):
        wish = search.ask()
        if wish is None:
            break
        value = accuracy(wish.share, wish.number)
        search.tell(Trial(wish.share, wish.number, value, seconds(wish.share)))
    assert search.over
    return search


def threshold(at, high=0.92, low=0.85):
    return lambda share, number: high if share >= at else low


class TestAnswer:
    @pytest.mark.parametrize(
        ("at", "answer"),
        [
            (0.0, 1 / 32),
            (0.01, 1 / 32),
            (1 / 32, 1 / 32),
            (0.05, 1 / 16),
            (1 / 16, 1 / 16),
            (0.3, 10 / 32),
            (0.5, 0.5),
            (0.51, 17 / 32),
            (0.99, 1.0),
            (1.0, 1.0),
        ],
    )
    def test_a_step_is_found(self, at, answer):
        search = conduct(Search(Settings(runs=2)), threshold(at))
        assert search.stand.share == answer

    @given(
        at=st.floats(0, 1),
        slope=st.floats(0.02, 3),
        noise=st.lists(st.floats(-0.0005, 0.0005), min_size=3, max_size=3),
        depth=st.integers(1, 7),
    )
    def test_a_rising_curve_with_noise_within_one_grid_point(self, at, slope, noise, depth):
        def accuracy(share, number):
            return 0.92 - 0.01 - slope * (at - share) * (share < at) + noise[number] + 0.01 * (share >= at)

        search = conduct(Search(Settings(runs=3, depth=depth)), accuracy)
        grid = 2.0**-depth
        # The curve jumps at `at`; noise of the means moves no point across a jump of a tolerance's size, but
        # where the curve rises slowly just below it, a share within reach of the noise may pass too.
        reach = 0.001 / slope
        assert search.stand.share >= at - reach - 1e-9
        assert search.stand.share <= max(at, grid) + grid

    def test_the_papers_setup_1(self):
        """Means of the authors' logs: 6.25 % is the answer."""
        means = {1.0: 0.9188, 0.5: 0.9197, 0.25: 0.9186, 0.125: 0.9136, 0.0625: 0.9174, 0.03125: 0.9037}
        search = conduct(Search(Settings(runs=3)), lambda share, number: means[share])
        assert search.stand.share == 0.0625
        assert [point.share for point in search.stand.points] == list(means)

    def test_a_known_target_needs_no_bsp(self):
        search = conduct(Search(Settings(target=0.92, runs=1)), threshold(0.2))
        assert search.stand.share == 7 / 32
        assert all(trial.share != BSP for trial in search.trials)

    def test_the_tolerance_is_one_sided_and_inclusive(self):
        search = conduct(Search(Settings(runs=1, target=0.5, tolerance=0.25, depth=1)), lambda *_: 0.25)
        assert search.stand.share == 0.5
        search = conduct(Search(Settings(runs=1, target=0.5, tolerance=0.25, depth=1)), lambda *_: 0.2499)
        assert search.stand.share == 1.0

    def test_a_grid_of_units(self):
        grain = 48 / 1000
        search = conduct(Search(Settings(runs=1, depth=20, grain=grain)), threshold(0.3))
        shares = [point.share for point in search.stand.points[1:]]
        assert all(abs(share / grain - round(share / grain)) < 1e-9 for share in shares)
        assert len(set(shares)) == len(shares)
        assert search.stand.share == pytest.approx(7 * grain)  # the first multiple from 0.3 on

    def test_midpoint(self):
        assert midpoint(0.0, 1.0) == 0.5
        assert midpoint(0.0, 1.0, 0.4) == 0.4
        assert midpoint(0.4, 0.8, 0.4) is None


class TestTrials:
    def test_as_many_as_needed_and_none_twice(self):
        search = conduct(Search(Settings(runs=3, target_runs=2, depth=4)), threshold(0.3))
        made = [(trial.share, trial.number) for trial in search.trials]
        assert len(set(made)) == len(made) == 2 + 3 * 4

    def test_a_diverged_trial_fails_its_point_at_once(self):
        search = Search(Settings(runs=3, target=0.9, depth=2))
        first = search.ask()
        search.tell(Trial(first.share, first.number, None, 1.0))
        assert search.stand.point(0.5).passed is False
        assert search.ask() == Wish(0.75, 0)

    def test_diverged_while_bsp_is_under_way(self):
        search = Search(Settings(runs=1, target_runs=2, depth=1))
        wishes = [search.ask(), search.ask(), search.ask()]
        assert search.ask() is None
        search.tell(Trial(0.5, 0, None, 1.0))
        assert not search.over
        for wish in wishes[:2]:
            search.tell(Trial(wish.share, wish.number, 0.9, 1.0))
        assert search.stand.share == BSP

    def test_bsp_itself_diverges(self):
        search = Search(Settings())
        with pytest.raises(SearchError, match="BSP alone has diverged"):
            search.tell(Trial(BSP, 0, None, 1.0))

    def test_what_is_under_way_in_vain(self):
        search = Search(Settings(runs=3, target=0.9, depth=2))
        wishes = {search.ask() for _ in range(3)}
        search.tell(Trial(0.5, 1, None, 1.0))
        assert search.vain == wishes - {Wish(0.5, 1)}

    @settings(deadline=None)
    @given(seed=st.integers(0, 10**6), confidence=st.sampled_from([None, 0.9]))
    def test_interrupted_anywhere_it_goes_on_and_repeats_nothing(self, seed, confidence):
        draw = random.Random(seed)

        def accuracy(share, number):
            return 0.9 + 0.02 * share + random.Random(f"{seed} {share} {number}").gauss(0, 0.01)

        how = Settings(runs=2, target_runs=2, depth=4, confidence=confidence)
        whole = conduct(Search(how), accuracy)
        left = [trial for trial in whole.trials if draw.random() < 0.5]
        again = conduct(Search(how, left), accuracy)
        assert again.stand.share == whole.stand.share
        made = [(trial.share, trial.number) for trial in again.trials]
        assert len(set(made)) == len(made)
        assert set(made) == {(trial.share, trial.number) for trial in whole.trials}

    def test_the_order_of_the_trials_is_all_the_same(self):
        trials = [Trial(BSP, 0, 0.9, 1.0), Trial(0.5, 0, 0.9, 1.0), Trial(0.25, 0, 0.7, 1.0)]
        how = Settings(runs=1, target_runs=1, depth=2)
        assert len({look(how, some) for some in permutations(trials)}) == 1


class TestEarly:
    @settings(deadline=None)
    @given(seed=st.integers(0, 10**9), runs=st.integers(1, 4), target=st.floats(0.1, 1))
    def test_it_never_changes_a_verdict(self, seed, runs, target):
        def accuracy(share, number):
            draw = random.Random(f"{seed} {share} {number}")
            return None if draw.random() < 0.1 else draw.random() ** draw.choice([0.1, 1, 10])

        full = conduct(Search(Settings(runs=runs, target=target)), accuracy)
        early = conduct(Search(Settings(runs=runs, target=target, early=True)), accuracy)
        assert [(p.share, p.passed) for p in early.stand.points] == [
            (p.share, p.passed) for p in full.stand.points
        ]
        assert len(early.trials) <= len(full.trials)

    def test_it_saves_trials(self):
        search = conduct(Search(Settings(runs=3, target=0.9, early=True, depth=1)), lambda *_: 0.1)
        assert len(search.trials) == 1
        assert search.stand.points[0].why == "whatever the rest"


class TestConfidence:
    def test_a_clear_case_takes_two_trials_of_a_share(self):
        def accuracy(share, number):
            return (0.9 if share >= 0.3 else 0.6) + 0.001 * number

        search = conduct(Search(Settings(runs=1, target_runs=3, confidence=0.95)), accuracy)
        assert search.stand.share == 10 / 32
        assert all(len(point.trials) == 2 for point in search.stand.points[1:])

    def test_an_unclear_one_takes_more_but_not_for_ever(self):
        noise = [0.02, -0.02, 0.015, -0.015, 0.01, -0.01]
        how = Settings(runs=2, target=0.91, tolerance=0.01, depth=1, confidence=0.99, max_runs=6)
        search = conduct(Search(how), lambda share, number: 0.9 + noise[number])
        point = search.stand.points[0]
        assert len(point.trials) == 6
        assert point.passed is True
        assert "within noise" in point.why

    def test_it_is_wrong_as_rarely_as_it_says(self):
        """Shares just too poor, by a standard deviation: passed less often than the chance allows."""
        draw = random.Random(0)
        wrong = 0
        for _ in range(100):
            how = Settings(runs=2, target=0.91, depth=1, confidence=0.95, max_runs=30)
            search = conduct(Search(how), lambda share, number: draw.gauss(0.89, 0.01))
            wrong += search.stand.share == 0.5
        assert wrong / 100 <= 0.05

    def test_students_quantiles(self):
        """From printed tables."""
        for chance, freedom, value in [
            (0.975, 1, 12.7062),
            (0.975, 2, 4.30265),
            (0.95, 4, 2.13185),
            (0.995, 7, 3.49948),
            (0.975, 30, 2.04227),
        ]:
            assert quantile(chance, freedom) == pytest.approx(value, rel=1e-5)


class TestAssumptions:
    def points(self, **values):
        trials = [
            Trial(float(share), n, accuracy, seconds)
            for share, rows in values["rows"].items()
            for n, (accuracy, seconds) in enumerate(rows)
        ]
        return look(Settings(runs=2, target_runs=2, depth=2), trials).points

    def test_trials_that_agree_with_both_raise_no_doubt(self):
        rows = {1.0: [(0.92, 10), (0.921, 10)], 0.5: [(0.92, 6), (0.919, 6)], 0.25: [(0.8, 4), (0.81, 4)]}
        assert doubts(self.points(rows=rows), 0.01) == []

    def test_a_fast_bsp(self):
        rows = {1.0: [(0.92, 5), (0.921, 5)], 0.5: [(0.92, 6), (0.919, 6)]}
        assert "BSP is not the slower protocol here" in doubts(self.points(rows=rows), 0.01)[0]

    def test_accuracy_that_falls(self):
        rows = {1.0: [(0.82, 10), (0.821, 10)], 0.5: [(0.92, 6), (0.919, 6)]}
        assert "accuracy falls as BSP's share rises" in doubts(self.points(rows=rows), 0.01)[0]

    def test_noise_is_no_contradiction(self):
        rows = {1.0: [(0.90, 10), (0.80, 10)], 0.5: [(0.91, 6), (0.83, 6)]}
        assert doubts(self.points(rows=rows), 0.01) == []


class TestCost:
    def test_by_hand(self):
        """Two of BSP (10 s each), 50 % (6 s) and 25 % (4 s), both enough, and 12.5 % (3 s), too little."""

        def seconds(share):
            return {1.0: 10.0, 0.5: 6.0, 0.25: 4.0, 0.125: 3.0}[share]

        search = conduct(Search(Settings(runs=2, target_runs=2, depth=3)), threshold(0.2), seconds)
        found = cost(search.stand)
        assert found.trainings == pytest.approx((20 + 12 + 8 + 6) / 10)
        assert found.saved == pytest.approx(0.6)
        assert found.amortized == pytest.approx(4.6 / 0.6)
        assert found.effective == pytest.approx(6 / 4.6)

    def test_nothing_found_never_pays(self):
        search = conduct(Search(Settings(runs=1, target_runs=1)), threshold(1.0))
        assert cost(search.stand).amortized == float("inf")

    def test_without_a_training_of_bsp(self):
        search = conduct(Search(Settings(runs=1, target=0.9)), threshold(0.3))
        assert cost(search.stand) is None
        assert cost(search.stand, bsp_seconds=1.0).trainings == pytest.approx(
            sum(trial.seconds for trial in search.trials)
        )


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"runs": 0}, "--runs 0: a whole number from 1"),
        ({"target_runs": 0}, "--target-runs 0"),
        ({"tolerance": 1.0}, "--tolerance 1: a share of 1"),
        ({"target": 92.0}, "--target 92: an accuracy above 0 and up to 1"),
        ({"confidence": 0.5}, "--confidence 0.5: above 0.5 and below 1"),
        ({"confidence": 0.9, "max_runs": 2}, "--max-runs 2: at least the 3"),
        ({"confidence": 0.9, "early": True}, "give one of them"),
        ({"grain": 0.6}, "the job is too short"),
    ],
)
def test_wrong_settings_are_named(wrong, message):
    with pytest.raises(SearchError, match=message):
        Settings(**wrong)
