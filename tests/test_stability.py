"""When delayed SGD is stable, by its polynomial and by running it; the plan auto in a plan's text."""

import numpy
import pytest

from offbeat.plan import PlanError, check_timing, parse, phases, to_text
from offbeat.policies.auto import Auto
from offbeat.policies.stability import limit, stable
from offbeat.protocols import ASP, BSP, Switch


def shrinks(step: float, momentum: float, delay: int, steps: int = 5000) -> bool:
    """By running the updates on a quadratic."""
    x = [1.0] * (delay + 2)
    for _ in range(steps):
        x.append((1 + momentum) * x[-1] - momentum * x[-2] - step * x[-1 - delay])
        if abs(x[-1]) > 1e6:
            return False
    return bool(numpy.abs(x[-100:]).max() < 1)


class TestStability:
    @pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
    @pytest.mark.parametrize("members", [1, 2, 4, 8, 16])
    def test_the_limit_is_where_running_it_turns(self, momentum, members):
        bound = limit(momentum, members) / members
        assert shrinks(0.9 * bound, momentum, members - 1)
        assert not shrinks(1.1 * bound, momentum, members - 1)

    def test_known_values(self):
        assert limit(0.9, 1) == pytest.approx(2 * 1.9, abs=1e-4)  # without delay: ηλ < 2(1 + β)
        assert limit(0.0, 1) == pytest.approx(2.0, abs=1e-4)
        assert limit(0.0, 2) == pytest.approx(2.0, abs=1e-4)  # one update late: ηλ < 1
        assert limit(0.9, 8) == pytest.approx(0.126, abs=0.001)
        assert limit(0.0, 8) == pytest.approx(1.67, abs=0.01)

    def test_more_delay_or_momentum_allows_less(self):
        for members in (2, 4, 8):
            assert limit(0.9, members) < limit(0.5, members) < limit(0.0, members)
        assert limit(0.9, 8) < limit(0.9, 4) < limit(0.9, 2)
        assert stable(0.1, 0.0, 3)
        assert not stable(1.0, 0.0, 3)


class TestText:
    def test_it_is_a_protocol_of_a_plan(self):
        plan = parse("auto")
        assert plan == Auto()
        assert (plan.first, plan.then) == (BSP(), ASP())
        assert to_text(plan) == "auto"
        assert phases(plan) == [(plan, None)]
        assert plan.parts() == (BSP(), ASP())

    def test_settings_and_a_least_share_of_bsp(self):
        plan = parse("bsp:5% auto(every=50,margin=2)")
        assert plan == Switch(BSP(), Auto(every=50, margin=2), 0.05)
        assert to_text(plan) == "bsp:5% auto(every=50,margin=2)"
        assert plan.parts() == (BSP(), BSP(), ASP())

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("auto(every=0)", "auto needs a whole every of at least 1; got every=0"),
            ("auto(by=1.5)", "auto needs by as a share of the job, above 0 and at most 1; got by=1.5"),
            ("auto(margin=0)", "auto needs a margin above 0; got margin=0"),
            ("auto(first=bsp)", "auto has no setting 'first'"),
        ],
    )
    def test_wrong_settings(self, text, message):
        with pytest.raises(PlanError, match=message):
            parse(text)


def test_where_no_gradients_are_computed_it_is_refused():
    check_timing(parse("bsp:5% asp"))
    with pytest.raises(
        PlanError, match=r"bsp:5% auto: auto decides by gradients, and none are computed here"
    ):
        check_timing(parse("bsp:5% auto"))


def test_another_optimizer_is_refused():
    import torch

    import offbeat

    model = torch.nn.Linear(2, 1)
    with pytest.raises(ValueError, match="nothing of Adam: let `offbeat search` find the switch point"):
        offbeat.Synchronizer(model, torch.optim.Adam(model.parameters()), "auto", total=9)
