"""The plan auto: looks that leave no trace, and a switch when asynchrony has become safe."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from offbeat import journal
from offbeat.policies.stability import limit
from tests import scripts_auto
from tests.contract_parity import all_hold_the_same
from tests.scripts import Setup


def largest() -> float:
    """The largest curvature of what `scripts_auto.quadratic` minimizes."""
    x, _ = scripts_auto.data()
    return float(torch.linalg.eigvalsh(2 * x.T @ x / len(x))[-1])


NEVER = "auto(every=3,margin=1e9)"


def tenth(progress: float) -> float:
    return 1.0 if progress < 0.5 else 0.1


class AutoContract:
    @pytest.mark.parametrize("micro", [1, 2])
    def test_looks_leave_no_trace(self, engine: Any, micro: int) -> None:
        """To the bit what bsp gives: parameters, statistics and their counters, momentum, random numbers."""
        options: dict[str, Any] = {"total": 36, "lr": 0.05, "momentum": 0.9, "dtype": torch.float32}
        looked = engine.run(2, scripts_auto.noisy, Setup(NEVER, **options), micro)
        plain = engine.run(2, scripts_auto.noisy, Setup("bsp", **options), micro)
        for one, other in zip(looked, plain, strict=True):
            assert torch.equal(one.final, other.final)
            assert (one.counters, one.clock, one.units) == (other.counters, other.clock, other.units)
            assert one.notes["calls"] == other.notes["calls"] + 5 * micro  # at clocks 3, 6, … of 18
            assert len(one.notes["looks"]) == 4  # the first only finds a direction
        assert looked[0].notes["looks"] == looked[1].notes["looks"]

    def test_the_curvature_is_the_largest(self, engine: Any) -> None:
        engine.run(2, scripts_auto.quadratic, Setup("auto(every=2,margin=1e9)", 60, lr=0.01))
        found = [row["curvature"] for row in journal.read(engine.out) if row["type"] == "curvature"]
        assert len(found) == 13
        assert all(a <= b * (1 + 1e-6) for a, b in pairwise(found))
        assert found[-1] == pytest.approx(largest(), rel=1e-3)

    @pytest.mark.parametrize("reference", ["global", "worker"])
    def test_it_switches_when_the_step_is_small_enough(self, engine: Any, reference: str) -> None:
        """A rate twice too large for asynchrony, a tenth of it from half of the job on."""
        rate = 2 * limit(0.5, 3) / largest() / (3 if reference == "worker" else 1)
        setup = Setup(
            "auto(every=4,count=2)", 120, lr=rate, momentum=0.5, options={"lr_reference": reference}
        )
        found = engine.run(3, scripts_auto.quadratic, setup, tenth)
        all_hold_the_same(found)
        switch = next(row for row in journal.read(engine.out) if row["type"] == "switch")
        assert (switch["from"], switch["to"]) == ("bsp", "asp")
        assert 60 <= switch["units"] <= 63
        assert found[0].units == 120

    @pytest.mark.parametrize("policy", ["keep", "scale", "ramp"])
    def test_the_momentum_that_asynchrony_will_have_counts(self, engine: Any, policy: str) -> None:
        """A rate between what the momentum and a third of it allow."""
        low, high = limit(0.9, 3), limit(0.3, 3)
        assert 2 * low < high
        rate, options = (low + high) / 2 / largest(), {"momentum": policy}
        setup = Setup("auto(every=2,count=2)", 60, lr=rate, momentum=0.9, options=options)
        engine.run(3, scripts_auto.quadratic, setup)
        switches = [row["units"] for row in journal.read(engine.out) if row["type"] == "switch"]
        assert len(switches) == (policy == "scale")
        assert all(units < 30 for units in switches)

    @pytest.mark.parametrize("reference", ["global", "worker"])
    def test_by_a_share_at_the_latest_with_a_rate_within_the_limit(self, engine: Any, reference: str) -> None:
        """Twice what asynchrony allows, and from three quarters of the job on a fifth of that."""
        most = limit(0.5, 3) / largest() / 3  # of a push
        rate = 2 * most * (1 if reference == "worker" else 3)
        options = {"lr_reference": reference}
        setup = Setup("auto(every=2,count=2,by=0.5)", 120, lr=rate, momentum=0.5, options=options)
        found = engine.run(3, scripts_auto.quadratic, setup, late_tenth)
        all_hold_the_same(found)
        (switch,) = (row for row in journal.read(engine.out) if row["type"] == "switch")
        assert 60 <= switch["units"] <= 63
        rates = [row for one in found for row in one.notes["rates"]]
        assert all(rate == pytest.approx(2 * most * 3) for units, rate in rates if units < 57)
        assert all(rate <= most * 1.01 for units, rate in rates if units > 66)
        assert any(rate == pytest.approx(most, rel=0.01) for units, rate in rates if 66 < units < 84)
        assert all(rate == pytest.approx(most / 5) for units, rate in rates if units > 96)

    def test_what_holds_the_rate_is_in_a_checkpoint(self, engine: Any, tmp_path: Path) -> None:
        most = limit(0.5, 2) / largest() / 2
        setup = Setup("auto(every=1,count=2,by=0.45)", 80, lr=2 * 2 * most, momentum=0.5)
        saved = str(tmp_path / "saved.pt")
        engine.run(2, scripts_auto.quadratic, setup, None, ("50%", saved))
        found = engine.run(2, scripts_auto.quadratic, setup, None, None, saved)
        rates = [rate for one in found for _, rate in one.notes["rates"]]
        assert rates
        assert all(rate == pytest.approx(most, rel=0.01) for rate in rates)

    def test_a_rate_that_is_still_to_come_counts(self, engine: Any) -> None:
        """At first the rate is small enough, and it will not be: bsp until it has fallen."""
        setup = Setup("auto(every=2,count=2)", 80, lr=limit(0.9, 2) / largest(), momentum=0.9)
        found = engine.run(2, scripts_auto.quadratic, setup, humped)
        switch = next(row for row in journal.read(engine.out) if row["type"] == "switch")
        assert 60 <= switch["units"] <= 61
        all_hold_the_same(found)


def late_tenth(progress: float) -> float:
    return 1.0 if progress < 0.75 else 0.1


def humped(progress: float) -> float:
    return 0.1 if progress < 0.5 else 1.5 if progress < 0.75 else 0.5
