"""The configuration policy: what learning rate and momentum are multiplied by under each protocol."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest

from offbeat.hyper import LR_REFERENCES, Configuration
from offbeat.protocols import ASP, BSP, SSP, DaSGD, LocalSGD, Program, Protocol
from offbeat.worker import Worker

LOCAL = [LocalSGD(), DaSGD()]
SHARDS = [ASP(), SSP(), SSP(0, "staleness")]


@pytest.mark.parametrize("members", [1, 2, 8])
@pytest.mark.parametrize("protocol", SHARDS, ids=str)
def test_bsps_rate_is_n_times_that_of_single_pushes(protocol: Protocol, members: int) -> None:
    for reference, bsp in (("global", 1), ("worker", members)):
        config = Configuration(lr_reference=reference)
        assert config.lr_factor(BSP(), members, 0.5) == bsp
        assert config.lr_factor(protocol, members, 0.5) == bsp / members


@pytest.mark.parametrize("reference", LR_REFERENCES)
def test_local_protocols_use_the_rate_as_given(reference: str) -> None:
    assert {Configuration(reference, 0.2).lr_factor(p, 8, 0.1) for p in LOCAL} == {1.0}


def test_warmup_is_bsps_alone() -> None:
    config = Configuration("worker", warmup=0.2)
    assert [config.lr_factor(BSP(), 5, progress) for progress in (0.0, 0.1, 0.2, 1.0)] == [1, 3, 5, 5]
    assert {config.lr_factor(ASP(), 5, progress) for progress in (0.0, 0.1, 1.0)} == {1.0}


def test_a_users_own_protocol_counts_by_its_home() -> None:
    @dataclass(frozen=True)
    class Pushes(Protocol):  # no word: no plan's text may find it
        home: ClassVar[str] = "shards"

        def run(self, w: Worker) -> Program:
            yield w.gradient()

    assert Configuration().lr_factor(Pushes(), 4, 0.5) == 0.25
    assert Configuration("worker").lr_factor(Pushes(), 4, 0.5) == 1


@pytest.mark.parametrize("protocol", [*LOCAL, *SHARDS], ids=str)
def test_momentum_after_bsp(protocol: Protocol) -> None:
    for momentum, factor in (("keep", 1), ("zero", 0), ("scale", 0.25), ("ramp", 0.5)):
        config = Configuration(momentum=momentum)
        assert config.momentum_factor(protocol, 4, since_bsp=0.025) == factor
        assert config.momentum_factor(protocol, 4, since_bsp=None) == 1
        assert config.momentum_factor(BSP(), 4, since_bsp=0.025) == 1
