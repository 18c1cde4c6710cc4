"""Protocols on shards, ASP and SSP: identities, and parity with a slow replay of the recorded order."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import scripts, scripts_shards
from tests.contract_parity import all_hold_the_same, apart, same_traces
from tests.reference import text, usual
from tests.reference_shards import Push, Turn, World, replay, segments
from tests.scripts_shards import Job

HOSTS: dict[int, list[int]] = {2: [0, 1], 3: [1, 0, 1], 4: [0, 0, 1, 1]}
both = pytest.mark.parametrize("wire", [False, True], ids=["memory", "wire"])
slow = pytest.mark.slow

WHOLE = ("sgd", "nesterov", "lars", "muon")
"""Optimizers whose kind shards don't know: they get whole tensors."""


def bsp(end: Any = None) -> Turn:
    return Turn("bsp", end=end)


def local(period: int, end: Any = None) -> Turn:
    return Turn("local", period, end=end)


def dasgd(period: int, delay: int, end: Any = None) -> Turn:
    return Turn("dasgd", period, delay, end=end)


def asp(end: Any = None, damped: bool = False) -> Turn:
    return Turn("asp", end=end, damped=damped)


def ssp(bound: float, end: Any = None, damped: bool = False) -> Turn:
    return Turn("ssp", bound=bound, end=end, damped=damped)


def hosts_of(workers: int, wire: bool) -> list[int] | None:
    return HOSTS[workers] if wire else None


def each_of(
    engine: Any, workers: int, calls: Sequence[tuple[Any, ...]], wire: bool = False, **more: Any
) -> list[list[Any]]:
    """Every rank's value of each call (a script and its arguments), all of them in the same processes."""
    found = engine.run(workers, scripts_shards.several, calls, hosts=hosts_of(workers, wire), **more)
    return [list(row) for row in zip(*found, strict=True)]


def half(cases: Iterable[Any], wire: bool) -> list[Any]:
    """Every second case over the memory of one host, the others over the wire."""
    return list(cases)[wire::2]


def shards_in(found: Sequence[Any]) -> int:
    pulls = [e for one in found for e in one.notes["log"].events if e["kind"] == "pull"]
    return len(pulls[0]["seen"])


def as_replay(
    found: Sequence[Any], job: Job, turns: Sequence[Turn], bound: float = 1e-12, **more: Any
) -> World:
    """Every rank's every step, the final buffers and the optimizers' state are the replay's."""
    assert job.total is not None
    way = job.options.get("cut") or ("tensors" if job.optimizer in WHOLE else "elements")
    logs = [one.notes["log"] for one in found]
    world = replay(turns, job.total, logs, job.compose, way, shards_in(found), **more)
    for rank, one in enumerate(found):
        assert one.units == world.units
        assert len(one.trace) == len(world.trace[rank]) == len(one.notes["log"].steps)
        for step, (got, want) in enumerate(zip(one.trace, world.trace[rank], strict=True), 1):
            assert want is None or apart(got, want) <= bound, f"{job.plan}: rank {rank}, step {step}"
        assert apart(one.final, world.flat(rank)) <= bound
        for number, (got, want) in enumerate(zip(one.slots, world.slots(rank), strict=True)):
            assert got.keys() == want.keys(), number
            for key, value in want.items():
                same = apart(torch.as_tensor(got[key]).double(), torch.as_tensor(value).double())
                assert same <= bound, f"{job.plan}: rank {rank}, parameter {number}, state {key}"
    all_hold_the_same(found)
    if turns[-1].sharded:
        assert world.units == job.total
    return world


def pushes_of(found: Sequence[Any]) -> list[list[list[Push]]]:
    """By rank, by segment."""
    count = shards_in(found)
    return [[row for _, row in segments(one.notes["log"], one.rank, count)] for one in found]


PLANS: dict[str, list[Turn]] = {
    "first": [asp(13), bsp()],
    "after": [bsp(9), asp()],
    "there and back": [asp(0.1), bsp(0.2), asp(0.3), bsp(0.4), ssp(1, 0.5), bsp(0.6), asp()],
    "shards only": [ssp(1, 10), asp(20), ssp(0, 29, damped=True), asp(37), asp(40), ssp(2)],
    "local": [local(3, 10), asp(26), local(2, 36), ssp(2, 48), local(4)],
    "dasgd": [dasgd(4, 3, 14), asp(25, damped=True), dasgd(2, 1, 40), asp()],
    "all": [bsp(9), ssp(0, 20), local(3, 32), asp(41, damped=True), dasgd(4, 2, 50), bsp(56), asp()],
    "one unit": [asp(1), bsp(2), ssp(3, 7), asp(8), bsp(12), asp()],
    "none": [asp(0), bsp(8), asp(20), asp(21), asp()],
}

OPTIMIZERS = [
    *["torch sgd", "torch nesterov", "torch dampened", "torch maximize", "torch fused", "sgd", "nesterov"],
    *[
        "adam",
        "adamw",
        "amsgrad",
        "adam foreach",
        "adam fused",
        "adamw tensor lr",
        "adamax",
        "nadam",
        "radam",
    ],
    *["adagrad", "adadelta", "rmsprop", "rmsprop centered", "rprop", "asgd", "lars", "muon"],
]

MODELS = [
    *[("tied", "one", usual), ("branches", "one", scripts.branching), ("branches", "one", scripts.lonely)],
    *[("odd", "one", usual), ("frozen", "one", usual), ("channels_last", "one", usual)],
    *[("mlp", "part", usual), ("mlp", "groups", usual), ("mlp", "pair", scripts_shards.pair_loss)],
    ("mixed", "one", usual),
]


class Shards:
    # Identities

    @pytest.mark.parametrize(
        ("workers", "wire"),
        [(2, False), (3, False), (3, True), (4, True)],
    )
    def test_ssp_of_zero_is_bsp(self, engine: Any, workers: int, wire: bool) -> None:
        plain = [Job("bsp", 12 * workers, "mlp", optimizer) for optimizer in ("torch sgd", "sgd")]
        stale = [replace(job, plan="ssp(0)", shard=300, slow={1: 0.002}) for job in plain]
        stale[1] = replace(stale[1], looks=(0,))  # an evaluation changes nothing
        found = each_of(engine, workers, [(scripts_shards.train, job) for job in (*plain, *stale)], wire)
        for bsps, ssps in zip(found[:2], found[2:], strict=True):
            all_hold_the_same(ssps)
            size = bsps[0].parameters.numel()
            for a, b in zip(bsps, ssps, strict=True):
                assert (a.units, a.clock) == (b.units, b.clock) == (12 * workers, 12)
                assert apart(a.final, b.final) <= 1e-12
                for step, (x, y) in enumerate(zip(a.trace, b.trace, strict=True), 1):
                    assert apart(x[:size], y[:size]) <= 1e-12, (b.rank, step)

    def test_one_asynchronous_worker_is_plain_pytorch_to_the_bit(self, engine: Any) -> None:
        setups = [
            Job(plan, 14, model, optimizer, momentum=0.9, decay=0.01, dtype=torch.float32)
            for plan in (
                "asp",
                "ssp(0)",
                "ssp(3,staleness)",
                "asp(staleness)",
                "bsp:25% asp",
                "asp:5u local(3)",
            )
            for model, optimizer in (("mlp", "torch sgd"), ("dropout", "sgd"), ("dropout", "adam"))
        ]
        (found,) = engine.run(1, scripts.one_worker_pairs, setups)
        for own, plain_own, dealt, plain_dealt in found:
            same_traces([own], [plain_own])
            same_traces([dealt], [plain_dealt])
            assert own.units == own.clock == 14

    @both
    def test_ssp_without_a_bound_is_asp(self, engine: Any, wire: bool) -> None:
        slow = {0: 0.003, 1: 0.1, 2: 0.003}  # far apart, for machines that are busy
        job = Job("ssp(inf)", 60, "mlp", "torch sgd", momentum=0.9, shard=300, slow=slow)
        found = engine.run(3, scripts_shards.train, job, hosts=hosts_of(3, wire))
        as_replay(found, job, [asp()])
        steps = [len(one.trace) for one in found]
        assert steps[1] < min(steps[0], steps[2])

    # The bound

    @both
    def test_the_bound_is_never_exceeded(self, engine: Any, wire: bool) -> None:
        base = Job("", 80, "plain", "torch sgd", shard=300, slow={1: 0.012}, looks=(3,))
        jobs = [replace(base, plan=f"bsp:8u ssp({bound})") for bound in (0, 1, 3)]
        rows = each_of(engine, 4, [(scripts_shards.train, job) for job in jobs], wire)
        for bound, found in zip((0, 1, 3), rows, strict=True):
            ranks = [pushes for (pushes,) in pushes_of(found)]
            leads = []
            for rank, other, g in itertools.product(range(4), range(4), range(shards_in(found))):
                if rank == other:
                    continue
                for push in ranks[rank]:
                    clock = push.clock - 3  # it was computed at, from the phase's begin at clock 2
                    theirs = ranks[other]
                    held = sum(one.applied[g] <= push.seen[g] for one in theirs)
                    assert min(clock - bound, len(theirs)) <= held <= clock + bound, (rank, clock, other)
                    assert push.staleness(g) <= (2 * bound + 1) * 3
                    if held < len(theirs):  # else it may be through
                        leads.append(clock - held)
            assert max(leads) == bound, "the slow one was waited for, and not sooner than needed"
            assert max(map(len, ranks)) - min(map(len, ranks)) <= bound + 1

    # Counters

    @both
    def test_updates_applied_are_gradients_pushed(self, engine: Any, wire: bool) -> None:
        """Rank r's gradient is 1000 ** r everywhere: the sum tells who has pushed how often."""
        job = Job("asp", 800, "linear", "torch sgd", lr=4.0, shard=60, slow={2: 0.0005})
        found = engine.run(4, scripts_shards.counting, job, hosts=hosts_of(4, wire))
        all_hold_the_same(found)
        (value,) = set((-found[0].parameters).tolist())
        counts = [int(value) // 1000**rank % 1000 for rank in range(4)]
        assert counts == [len(one.notes["log"].steps) for one in found]
        assert sum(counts) == 800
        tickets = [ticket for one in found for _, ticket, _ in one.notes["log"].steps]
        assert sorted(tickets) == list(range(800))

    # The replay

    @pytest.mark.parametrize(
        ("workers", "wire", "plans"),
        [
            (3, False, half(PLANS, False)),
            (3, True, half(PLANS, True)),
            *(pytest.param(*row, PLANS, marks=slow) for row in itertools.product((2, 3, 4), (False, True))),
        ],
    )
    def test_switches_in_every_direction_are_their_replay(
        self, engine: Any, workers: int, wire: bool, plans: Iterable[str]
    ) -> None:
        base = Job("", 64, "mlp", "torch nesterov", lr=0.03, momentum=0.9, decay=0.01, shard=300)
        jobs = [replace(base, plan=text(PLANS[name]), slow={1: 0.001}) for name in plans]
        rows = each_of(engine, workers, [(scripts_shards.train, job) for job in jobs], wire)
        for job, name, found in zip(jobs, plans, rows, strict=True):
            as_replay(found, job, PLANS[name])

    @both
    def test_optimizers_are_their_replay(self, engine: Any, wire: bool) -> None:
        turns = [asp(7), bsp(12), asp(19), ssp(1)]
        base = Job(text(turns), 26, "plain", lr=0.01, momentum=0.9, decay=0.01, shard=300)
        jobs = [replace(base, optimizer=optimizer) for optimizer in half(OPTIMIZERS, wire)]
        rows = each_of(engine, 3, [(scripts_shards.train, job) for job in jobs], wire)
        for job, found in zip(jobs, rows, strict=True):
            as_replay(found, job, turns)

    @pytest.mark.parametrize(
        ("optimizer", "wire"),
        [
            ("torch sgd", False),
            ("adam", True),
            *(pytest.param(*more, marks=slow) for more in (("torch sgd", True), ("adam", False))),
            *(pytest.param("muon", wire, marks=slow) for wire in (False, True)),
        ],
    )
    def test_models_are_their_replay(self, engine: Any, optimizer: str, wire: bool) -> None:
        turns = [asp(9), bsp(15), local(2, 22), ssp(2)]
        base = Job(text(turns), 32, lr=0.01, momentum=0.9, decay=0.01, optimizer=optimizer, shard=250)
        cases = [(replace(base, model=model, kind=kind), loss) for model, kind, loss in MODELS]
        rows = each_of(engine, 3, [(scripts_shards.train, *case) for case in cases], wire)
        for (job, loss), found in zip(cases, rows, strict=True):
            # One rounding of bfloat16 is 4e-3.
            as_replay(found, job, turns, 2e-2 if job.model == "mixed" else 1e-12, loss=loss)

    @pytest.mark.parametrize("wire", [pytest.param(False, marks=slow), True], ids=["memory", "wire"])
    def test_a_large_model_is_its_replay(self, engine: Any, wire: bool) -> None:
        """More elements than are stepped, or bytes than are sent, at a time."""
        turns = [asp(7), bsp(10), ssp(1)]
        job = Job(text(turns), 14, "wide", "torch sgd", lr=1e-5, momentum=0.9, decay=0.01)
        found = engine.run(2, scripts_shards.train, job, hosts=hosts_of(2, wire))
        assert shards_in(found) > 1
        as_replay(found, job, turns)

    def test_elements_or_tensors_may_be_asked_for(self, engine: Any) -> None:
        """A subclass of SGD gets tensors by itself, any optimizer tensors or elements when asked."""
        turns = [bsp(8), asp(20), bsp()]
        base = Job(text(turns), 26, "plain", momentum=0.9, shard=250)
        ways = [("sgd", "elements"), ("torch sgd", "tensors"), ("adam", "tensors"), ("adafactor", "tensors")]
        jobs = [replace(base, optimizer=optimizer, options={"cut": cut}) for optimizer, cut in ways]
        rows = each_of(engine, 2, [(scripts_shards.train, job) for job in jobs])
        for job, found in zip(jobs, rows, strict=True):
            as_replay(found, job, turns)

    @both
    def test_shards_without_a_piece(self, engine: Any, wire: bool) -> None:
        """Two tensors, or 21 elements, for more shards than that."""
        turns = [bsp(6), asp(14), bsp(20), ssp(1)]
        base = Job(text(turns), 28, "linear", momentum=0.9, shard=8)
        jobs = [replace(base, optimizer=optimizer) for optimizer in ("torch sgd", "lars")]
        rows = each_of(engine, 3, [(scripts_shards.train, job) for job in jobs], wire)
        for job, found in zip(jobs, rows, strict=True):
            as_replay(found, job, turns)

    def test_bf16_on_the_wire_is_for_gradients_between_hosts(self, engine: Any) -> None:
        turns, hosts = [asp(30, damped=True), ssp(2)], HOSTS[3]
        base = Job(text(turns), 50, "plain", lr=0.02, momentum=0.9, dtype=torch.float32)
        jobs = [replace(base, optimizer=optimizer) for optimizer in ("torch sgd", "adam", "lars")]
        narrow = [(scripts_shards.train, replace(job, options={"wire": "bf16"})) for job in jobs]
        for job, found in zip(jobs, each_of(engine, 3, narrow, wire=True), strict=True):
            assert shards_in(found) == 2
            as_replay(found, job, turns, 1e-6, narrow=lambda rank, shard: hosts[rank] != shard)

    # Hyper-parameters

    @pytest.mark.parametrize("kind", ["asp", "ssp(1)"])
    @pytest.mark.parametrize(("reference", "factor"), [("global", 1 / 3), ("worker", 1.0)])
    def test_lr_reference(self, engine: Any, reference: str, factor: float, kind: str) -> None:
        job = Job(
            f"bsp:12u {kind}:36u bsp",
            48,
            lr=0.02,
            momentum=0.5,
            optimizer="torch sgd",
            options={"lr_reference": reference},
            shard=300,
        )
        found = engine.run(3, scripts_shards.shaped, job, scripts.half_cosine)
        for rows in pushes_of(found):
            for push in rows[0]:
                settings = by_name(push)
                assert settings["lr"] == pytest.approx(0.02 * factor * scripts.half_cosine(push.ticket / 48))
                assert (settings["momentum"], settings["weight_decay"]) == (0.5, 0.0)

        def rates(turn: Turn, begun: int, units: int) -> tuple[float, float]:
            whole = factor if turn.sharded else 3 * factor
            return whole * scripts.half_cosine(units / 48), 1.0

        as_replay(found, job, [bsp(12), asp(36), bsp()], rates=rates)

    @pytest.mark.parametrize(
        "name", ["onecycle", pytest.param("step", marks=slow), pytest.param("sequential", marks=slow)]
    )
    def test_torch_schedulers_follow_the_tickets(self, engine: Any, tmp_path: Path, name: str) -> None:
        steps = 20
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.05, momentum=0.9)
        schedule, expected = scripts.schedule_of(name, optimizer, steps), []
        for _ in range(steps + 1):
            group = optimizer.param_groups[0]
            expected.append((group["lr"], group["momentum"]))
            optimizer.step()
            if len(expected) <= steps:
                schedule.step()
        base = Job("", 3 * steps, "plain", "torch sgd", momentum=0.9, slow={2: 0.002})
        jobs = [replace(base, plan=plan) for plan in ("asp", "ssp(2)", "bsp:25% asp(staleness):60% asp")]
        calls = [(scripts_shards.scheduled, job, name, steps, str(tmp_path / "job.pt")) for job in jobs]
        for found in each_of(engine, 3, calls):
            for push in (push for rows in pushes_of(found) for row in rows for push in row):
                lr, momentum = expected[push.ticket // 3]
                assert by_name(push)["lr"] == pytest.approx(lr / 3, rel=1e-12), push.ticket
                assert by_name(push)["momentum"] == pytest.approx(momentum, rel=1e-12)
            assert [one.notes["lr"] for one in found] == pytest.approx([expected[steps][0]] * 3)

    @both
    def test_momentum_policies(self, engine: Any, wire: bool) -> None:
        total, turns = 70, [bsp(21), asp(42), bsp(53), ssp(1)]
        base = Job(text(turns), total, "plain", lr=0.02, momentum=0.9)
        policies = [("torch sgd", p) for p in ("keep", "zero", "scale", "ramp")]
        policies += [("adam", p) for p in ("zero", "keep", "ramp", "scale")]
        jobs = [
            replace(base, optimizer=optimizer, options={"momentum": policy})
            for optimizer, policy in half(policies, wire)
        ]
        rows = each_of(engine, 3, [(scripts_shards.train, job) for job in jobs], wire)
        for job, found in zip(jobs, rows, strict=True):

            def factor(begun: int, units: int, policy: str = job.options["momentum"]) -> float:
                rising = min((units - begun) / total / 0.05, 1.0)
                return {"keep": 1.0, "zero": 0.0, "scale": 1 / 3, "ramp": rising}[policy]

            def rates(turn: Turn, begun: int, units: int, of: Any = factor) -> tuple[float, float]:
                return (1 / 3, of(begun, units)) if turn.sharded else (1.0, 1.0)

            world = as_replay(found, job, turns, rates=rates)
            key = "momentum" if job.optimizer == "torch sgd" else "beta1"
            for pushes, begun in zip(world.pushes, (21, 54), strict=True):
                for push in pushes:
                    beta = by_name(push, job.optimizer)[key]
                    assert beta == pytest.approx(0.9 * factor(begun, push.ticket), abs=1e-12), push.ticket

    @both
    def test_a_damped_learning_rate_is_divided_by_one_more_than_the_staleness(
        self, engine: Any, wire: bool
    ) -> None:
        """By each shard's own staleness; what went with the push is the plain rate."""
        for turn in (asp(damped=True), ssp(2, damped=True)):
            job = Job(text([turn]), 60, "plain", "torch sgd", lr=0.1, shard=300, slow={0: 0.002})
            found = engine.run(3, scripts_shards.train, job, hosts=hosts_of(3, wire))
            world = as_replay(found, job, [turn])
            assert max(push.staleness(0) for push in world.pushes[0]) > 1
            assert {by_name(push)["lr"] for push in world.pushes[0]} == {0.1 / 3}


def by_name(push: Push, optimizer: str = "torch sgd") -> dict[str, float]:
    """The hyper-parameters that went with a push, by the names of the optimizer's settings in order."""
    names = {
        "torch sgd": ["dampening", "lr", "maximize", "momentum", "nesterov", "weight_decay"],
        "adam": [
            "amsgrad",
            "beta1",
            "beta2",
            "decoupled_weight_decay",
            "eps",
            "lr",
            "maximize",
            "weight_decay",
        ],
    }[optimizer]
    return dict(zip(names, push.settings, strict=True))
