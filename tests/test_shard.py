"""Pure shards against plain PyTorch, in one process."""

from __future__ import annotations

import ast
import copy
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import offbeat
from offbeat.cut import CUTS, ELEMENTWISE, cut, part, shaped, way_of
from offbeat.outline import Gradient, Outline
from offbeat.shard import Push, Shard
from offbeat.twin import Settings, slots
from tests.models import build

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "dampening": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.4, "maximize": True}),
    "adam": (torch.optim.Adam, {"amsgrad": True}),
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.1}),
    "adamax": (torch.optim.Adamax, {}),
    "nadam": (torch.optim.NAdam, {}),
    "radam": (torch.optim.RAdam, {}),
    "adagrad": (torch.optim.Adagrad, {"lr_decay": 0.1}),
    "adadelta": (torch.optim.Adadelta, {}),
    "rmsprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "rprop": (torch.optim.Rprop, {}),
    "asgd": (torch.optim.ASGD, {"t0": 3, "lambd": 0.1}),
}


class Normed(torch.optim.Optimizer):
    """Not element-wise: each tensor's update has norm lr; it puts a new tensor in its state every time, and
    counts in a plain number."""

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.5):
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                old = state.get("mean", torch.zeros_like(p))
                state["mean"] = group["beta"] * old + p.grad
                state["rows"] = state["mean"].sum(-1)
                p.add_(state["mean"] / (state["mean"].norm() + 1e-12), alpha=-group["lr"] / state["count"])


class Job:
    """A model cut into shards, and its copy in plain PyTorch."""

    def __init__(
        self,
        make: Any,
        model: nn.Module,
        shards: int = 3,
        way: str | None = None,
        members: int = 2,
    ):
        self.parameters, self.optimizers = list(model.parameters()), make(model)
        plain = copy.deepcopy(model)
        self.plain, self.plain_optimizers = list(plain.parameters()), make(plain)
        self.way = way_of(self.optimizers, way)
        self.settings = Settings(self.optimizers)
        pieces = cut(self.parameters, self.optimizers, shards, self.way)
        self.outlines = [
            Outline(
                one,
                lambda p: slots(
                    self.optimizers[p.optimizer],
                    p.group,
                    (2,) if self.way == "elements" else p.shape,
                    p.dtype,
                    self.way,
                ),
                self.way,
                members,
            )
            for one in pieces
        ]
        # Two halves, as in shared memory: each push goes from one into the other.
        self.halves = [
            [
                Shard(o, torch.zeros(o.size, dtype=torch.uint8), self.optimizers, self.settings)
                for _ in range(2)
            ]
            for o in self.outlines
        ]
        for now, _ in self.halves:
            now.begin(0, range(members))
        self.load()
        self.clock = 0

    @property
    def shards(self) -> list[Shard]:
        return [now for now, _ in self.halves]

    def load(self) -> None:
        for shard in self.shards:
            shard.load(self.parameters, self.optimizers)

    def step(self, gradients: Sequence[Tensor | None], damped: bool = False, seen: int | None = None) -> None:
        """One step of both."""
        self.clock += 1
        missing = sum(1 << i for i, g in enumerate(gradients) if g is None)
        mask = missing.to_bytes((len(gradients) + 7) // 8, "little") if missing else b""
        for pair in self.halves:
            now, then = pair
            gradient = Gradient(now.outline, torch.zeros(now.outline.gradient_size, dtype=torch.uint8))
            for piece, place in zip(now.outline.pieces, gradient.pieces, strict=True):
                g, p = gradients[piece.parameter], self.parameters[piece.parameter]
                if g is not None:
                    shaped(piece, place, p).copy_(part(piece, g, p))
            push = Push(
                0,
                self.clock,
                now.version if seen is None else seen,
                damped=damped,
                settings=self.settings.read(),
                missing=mask,
            )
            then.push_from(now, push, gradient)
            pair.reverse()
        for p, g in zip(self.plain, gradients, strict=True):
            p.grad = None if g is None else g.clone()
        for optimizer in self.plain_optimizers:
            optimizer.step()

    def parts(self) -> list[list[Tensor]]:
        """Parameters and state of the shards beside those of plain PyTorch."""
        pairs = []
        for shard in self.shards:

            def take(piece: Any, slot: Any, values: Tensor) -> None:
                p = self.plain[piece.parameter]
                if slot is None:
                    pairs.append([shaped(piece, values, p).clone(), part(piece, p.detach(), p)])
                    return
                value = self.plain_optimizers[piece.optimizer].state[p][slot.key]
                if slot.kind == "element":
                    pairs.append([shaped(piece, values, p).clone(), part(piece, value, p)])
                else:
                    pairs.append([values.clone(), torch.as_tensor(value)])

            shard.store(take)
        return pairs

    def check(self, bound: float = 1e-12) -> None:
        for mine, plain in self.parts():
            if mine.numel():
                assert (mine - plain).abs().max().item() <= bound
        for number, p in enumerate(self.plain):  # state is where it is, and nowhere else
            held = any(o.state.get(p) for o in self.plain_optimizers)
            flags = [
                bool(shard.present[i])
                for shard in self.shards
                for i, piece in enumerate(shard.outline.pieces)
                if piece.parameter == number
            ]
            assert all(flag == held for flag in flags)


def gradients(job: Job, step: int, absent: Sequence[int] = ()) -> list[Tensor | None]:
    source = torch.Generator().manual_seed(step)
    found = []
    for i, p in enumerate(job.parameters):
        values = torch.randn(p.shape, generator=source, dtype=torch.float64).to(p.dtype)
        found.append(None if i in absent else torch.empty_like(p).copy_(values))
    return found


def grouped(kind: type[torch.optim.Optimizer], settings: dict[str, Any]) -> Any:
    def make(model: nn.Module) -> list[torch.optim.Optimizer]:
        parameters = list(model.parameters())
        groups = [{"params": parameters[:1], "lr": 0.03}, {"params": parameters[1:]}]
        return [kind(groups, **settings)]

    return make


@pytest.mark.parametrize("shards", [1, 3, 7])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_slices_step_as_the_whole(name: str, shards: int) -> None:
    job = Job(grouped(*OPTIMIZERS[name]), build("mlp"), shards)
    assert job.way == "elements"
    for step in range(8):
        job.step(gradients(job, step))
    job.check()
    assert [shard.version for shard in job.shards] == [8] * shards


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("pattern", ["first late", "one never", "by turns"])
def test_missing_gradients_are_left_out(name: str, pattern: str) -> None:
    job = Job(grouped(*OPTIMIZERS[name]), build("mlp"), 2)
    for step in range(9):
        absent = {"first late": [0] if step < 4 else [], "one never": [2], "by turns": [step % 3]}[pattern]
        job.step(gradients(job, step, absent))
    job.check()


def test_a_push_without_any_gradient_counts_and_changes_nothing() -> None:
    job = Job(grouped(*OPTIMIZERS["adam"]), build("mlp"), 2)
    job.step(gradients(job, 0))
    before = [shard.values.clone() for shard in job.shards]
    job.step([None] * len(job.parameters))
    assert all(torch.equal(a, shard.values) for a, shard in zip(before, job.shards, strict=True))
    assert [int(shard.pushes[0]) for shard in job.shards] == [2, 2]
    job.check()


@pytest.mark.parametrize("name", ["momentum", "nesterov", "dampening", "sgd"])
def test_the_written_out_update_has_the_same_bits(name: str) -> None:
    one, two = (Job(grouped(*OPTIMIZERS[name]), build("mlp", dtype=torch.float32), 2) for _ in range(2))
    for shard in (s for pair in two.halves for s in pair):
        shard.__dict__["sgd"] = False  # takes the optimizer itself
    for step in range(6):
        for job in (one, two):
            job.step(gradients(job, step))
    assert one.shards[0].sgd or name == "sgd"
    for a, b in zip(one.shards, two.shards, strict=True):
        assert torch.equal(a.values, b.values)
        assert torch.equal(a.block[a.outline.values :], b.block[b.outline.values :])


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_an_optimizer_that_is_not_element_wise_gets_whole_tensors(shards: int) -> None:
    job = Job(lambda model: [Normed(model.parameters())], build("mlp"), shards)
    assert job.way == "tensors"
    for step in range(5):
        job.step(gradients(job, step, [1] if step == 0 else []))
    job.check()


def test_several_optimizers() -> None:
    def make(model: nn.Module) -> list[torch.optim.Optimizer]:
        parameters = list(model.parameters())
        return [
            torch.optim.SGD(parameters[:2], lr=0.1, momentum=0.9),
            torch.optim.AdamW(parameters[2:-1], lr=0.01),
        ]  # the last parameter is in none

    job = Job(make, build("mlp"), 3)
    for step in range(5):
        job.step(gradients(job, step))
    job.check()
    assert torch.equal(job.parameters[-1], job.plain[-1])


@pytest.mark.parametrize("dtypes", [[torch.float32], [torch.float64, torch.bfloat16], [torch.complex128]])
def test_dtypes_and_memory_formats(dtypes: list[torch.dtype]) -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for i, dtype in enumerate(dtypes):
                for j, shape in enumerate([(3, 4, 2, 2), (5,), (), (0, 3), (2, 3)]):
                    values = torch.randn(shape, dtype=dtype)
                    if len(shape) == 4:
                        values = values.to(memory_format=torch.channels_last)
                    self.register_parameter(f"p{i}{j}", nn.Parameter(values))

    torch.manual_seed(1)
    job = Job(grouped(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}), Bare(), 3)
    for step in range(4):
        job.step(gradients(job, step))
    job.check(1e-6 if torch.float32 in dtypes else 1e-12)


def test_each_push_is_applied_with_its_own_hyper_parameters() -> None:
    job = Job(grouped(torch.optim.SGD, {"lr": 0, "momentum": 0.9}), build("mlp"))
    for step in range(6):
        for optimizer in (*job.optimizers, *job.plain_optimizers):
            for group in optimizer.param_groups:
                group["lr"], group["momentum"] = 0.1 / (step + 1), 0.9 if step % 2 else 0.0
        job.step(gradients(job, step))
    job.check()


def test_staleness_divides_the_learning_rate() -> None:
    job = Job(grouped(torch.optim.SGD, {"lr": 0.1}), build("mlp"), 2)
    for step in range(5):
        for group in job.plain_optimizers[0].param_groups:
            group["lr"] = group.setdefault("first", group["lr"]) / (1 + step)
        job.step(gradients(job, step), damped=True, seen=0)
    job.check()


def test_a_replica_goes_in_and_comes_out_whole() -> None:
    job = Job(grouped(*OPTIMIZERS["adam"]), build("mlp"), 3)
    for p, g in zip(job.parameters, gradients(job, 0), strict=True):
        p.grad = g
    job.optimizers[0].step()
    job.load()
    job.plain, job.plain_optimizers = job.parameters, job.optimizers
    for mine, theirs in job.parts():
        assert torch.equal(mine, theirs)
    assert all(shard.present.all() for shard in job.shards)


def test_who_may_go() -> None:
    shard = Job(grouped(torch.optim.SGD, {}), build("linear"), 1, members=3).shards[0]
    shard.begin(5, [0, 2])
    assert shard.may_push(-inf)
    assert shard.may_pull(5)
    assert not shard.may_pull(6)
    shard.clock[0] = 7
    assert not shard.may_pull(6)  # the third is at 5; the second is no member
    shard.resting[2] = 1
    assert shard.may_pull(7)
    assert not shard.may_push(6)  # nobody has pulled since
    assert shard.pull(0) == shard.version
    assert shard.may_push(7)
    shard.pull(2)
    assert not shard.may_push(7)


sizes = st.lists(st.lists(st.integers(0, 40), min_size=0, max_size=3).map(tuple), min_size=1, max_size=8)


@given(sizes, st.integers(1, 9), st.sampled_from(CUTS))
def test_every_element_lies_in_one_shard(shapes: list[tuple[int, ...]], shards: int, way: str) -> None:
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    found = cut(parameters, [optimizer], shards, way)
    assert len(found) == shards
    for number, p in enumerate(parameters):
        pieces = sorted(
            (piece for pieces in found for piece in pieces if piece.parameter == number),
            key=lambda piece: piece.start,
        )
        assert sum(piece.size for piece in pieces) == p.numel()
        at = 0
        for piece in pieces:
            assert piece.start == at
            at = piece.stop
        assert way == "elements" or len(pieces) == 1
    if way == "elements":
        filled = [sum(piece.size for piece in pieces) for pieces in found]
        assert max(filled) <= -(-sum(filled) // shards) + 16


def test_the_rule_by_which_parameters_are_cut() -> None:
    model = build("mlp")
    for kind in ELEMENTWISE:
        assert way_of([kind(model.parameters(), lr=0.1)]) == "elements"
    assert way_of([Normed(model.parameters())]) == "tensors"
    assert way_of([Normed(model.parameters())], "elements") == "elements"
    with pytest.raises(ValueError, match="cut is one of elements and tensors; got cut='slices'"):
        way_of([Normed(model.parameters())], "slices")


def test_what_shards_cannot_hold_is_said() -> None:
    model = build("mlp")

    class Lookahead(torch.optim.SGD):
        def __init__(self, params: Any):
            params = list(params)
            super().__init__(params, lr=0.1)
            self.inner = torch.optim.SGD(params, lr=0.1)

    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1
            return super().step(closure)

    for optimizer, said in [
        (torch.optim.LBFGS(model.parameters()), "LBFGS cannot step for a shard"),
        (Lookahead(model.parameters()), "Lookahead holds another optimizer in its attribute 'inner'"),
        (Counting(model.parameters(), lr=0.1), "counts in its group's 'k' and not in its state"),
    ]:
        with pytest.raises(TypeError, match=said):
            slots(optimizer, 0, (2, 3), torch.float32, "tensors")
    with pytest.raises(TypeError, match="not element-wise; cut='tensors' is right for it"):
        slots(Normed(model.parameters()), 0, (2, 3), torch.float32, "elements")
    p = nn.Parameter(torch.zeros(3))
    two = [torch.optim.SGD([p], lr=0.1), torch.optim.Adam([p])]
    with pytest.raises(ValueError, match="is in two optimizers"):
        cut([p], two, 1, "elements")


@pytest.mark.parametrize("module", "protocols worker plan shard outline cut twin guard".split())
def test_what_is_pure_imports_no_distributed(module: str) -> None:
    assert offbeat.__file__ is not None
    tree = ast.parse((Path(offbeat.__file__).parent / f"{module}.py").read_text())
    names = [n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    names += [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
    assert not [name for name in names if "distributed" in name or "cluster" in name]
