"""When a job counts as diverged, and what the error says."""

from __future__ import annotations

import pickle
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.guard import Diverged, Guard
from offbeat.protocols import ASP, BSP, SSP, LocalSGD, Protocol

finite = st.floats(-1e6, 1e6)


def looks(guard: Guard, *losses: float, scaled: bool = False, exploding: bool = True) -> list[str | None]:
    return [guard.look(loss, scaled, exploding) for loss in losses]


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), float("-inf")])
@given(before=st.lists(finite, max_size=20))
def test_a_loss_that_is_no_number_is_told_at_once(loss: float, before: list[float]) -> None:
    guard = Guard()
    looks(guard, *before, exploding=False)
    assert guard.look(loss) == f"the loss is {loss}"


def test_a_grad_scaler_may_skip_nine_in_a_row() -> None:
    guard, nan = Guard(), float("nan")
    assert looks(guard, *[nan] * 9, 2.0, *[nan] * 9, scaled=True) == [None] * 19
    assert guard.look(nan, scaled=True) == "the loss was no finite number 10 times in a row"


@given(st.lists(finite))
def test_finite_losses_never_count_unless_asked(losses: list[float]) -> None:
    assert set(looks(Guard(), *losses, exploding=False)) <= {None}


@given(st.floats(0.01, 100), st.lists(st.floats(0, 9.9), max_size=200))
def test_under_ten_times_the_first_mean_is_no_explosion(first: float, then: list[float]) -> None:
    assert set(looks(Guard(), *[first] * 10, *(first * times for times in then))) <= {None}


@given(st.floats(0.01, 100), st.floats(11, 100))
def test_more_than_ten_times_is_one_within_a_few_spans(first: float, times: float) -> None:
    told = looks(Guard(), *[first] * 10, *[first * times] * 60)
    assert told[:11] == [None] * 11
    assert told[-1] is not None
    assert "times the mean of the first 10" in told[-1]


def test_one_outlier_is_no_explosion() -> None:
    assert set(looks(Guard(), *[2.0] * 50, 200.0, *[2.0] * 50)) == {None}


@given(st.lists(st.floats(-100, 0), min_size=10, max_size=10), st.lists(finite))
def test_without_a_positive_beginning_there_is_no_measure(first: list[float], then: list[float]) -> None:
    assert set(looks(Guard(), *first, *then)) <= {None}


def test_the_measure_is_taken_before_it_is_asked_for() -> None:
    """A BSP phase comes first: its losses are the job's first."""
    guard = Guard()
    looks(guard, *[1.0] * 100, exploding=False)
    assert any(looks(guard, *[50.0] * 20))


def test_a_look_takes_microseconds_at_most() -> None:
    guard = Guard()
    begun = time.perf_counter()
    for _ in range(10_000):
        guard.look(1.0, False, True)
    assert time.perf_counter() - begun < 0.05


@pytest.mark.parametrize(
    ("protocol", "parts", "without"),
    [
        (
            ASP(),
            ["under asp", "(bsp:12.5% asp)", "(ssp(bound=3))", "asp(lr=staleness)", "--on-diverge rollback"],
            ["smaller"],
        ),
        (ASP("staleness"), ["(ssp(bound=3,lr=staleness))", "bsp:12.5% asp(lr=staleness)"], ["smaller"]),
        (SSP(2), ["a smaller bound", "ssp(bound=2,lr=staleness)", "bsp:12.5% ssp(bound=2)"], ["bound=3"]),
        (SSP(0), ["bsp:12.5% ssp(bound=0)"], ["smaller"]),
        (LocalSGD(), ["under local", "momentum=", "--on-diverge rollback"], ["12.5%"]),
        (BSP(), ["under bsp", "a lower learning rate, or clipped gradients"], ["rollback", "momentum"]),
    ],
    ids=str,
)
def test_the_error_says_where_and_what_to_try(
    protocol: Protocol, parts: list[str], without: list[str]
) -> None:
    error = Diverged("the loss is nan", protocol, worker=2, step=310, loss=float("nan"), staleness=7)
    assert (error.worker, error.step, error.staleness, error.protocol) == (2, 310, 7, protocol)
    text = str(error)
    said = ["the loss is nan", "rank 2", "step 310", "last loss nan", "staleness 7", "a lower learning rate"]
    for part in [*said, *parts]:
        assert part in text
    for part in without:
        assert part not in text
    assert "staleness 7" not in str(Diverged("the loss is nan", protocol, 2, 310, 1.5))
    assert str(pickle.loads(pickle.dumps(error))) == text


def test_the_rule_knows_no_engine() -> None:
    code = "import sys, offbeat.guard; print(*(m for m in sys.modules if m.startswith('torch')))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []
