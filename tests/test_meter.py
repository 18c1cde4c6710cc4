"""Seconds of waiting, also while they pass."""

from __future__ import annotations

import pytest

from offbeat import meter
from offbeat.meter import Meter


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(meter, "now", lambda: now[0])
    return now


def test_a_wait_under_way_counts_and_busy_time_never_falls(clock: list[float]) -> None:
    one = Meter()
    one.begin()
    clock[0] += 4
    with one.waiting():
        clock[0] += 3
        assert one.summary() == {"units": 0, "samples": 0, "busy_s": 4.0, "wait_s": 3.0}
        with one.waiting():  # inside another it counts once
            clock[0] += 1
    clock[0] += 2
    assert one.summary() == {"units": 0, "samples": 0, "busy_s": 6.0, "wait_s": 4.0}


def test_nothing_counts_before_the_begin_and_after_the_end(clock: list[float]) -> None:
    one = Meter()
    with one.waiting():
        clock[0] += 5
    with one.waiting():
        clock[0] += 5
        one.begin()
        clock[0] += 1
    one.end()
    with one.waiting():
        clock[0] += 5
    assert one.summary() == {"units": 0, "samples": 0, "busy_s": 0.0, "wait_s": 1.0}
