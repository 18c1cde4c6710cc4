"""The peers of Offbeat's replica protocols, each set up as its documentation says.

Every builder gets a model and an optimizer of its own and returns what to call for the model's output, what
to do with the loss, and the step.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch import nn


@dataclass(frozen=True)
class Trained:
    """`forward(x)` gives outputs, `backward(loss)` the gradients, and `step()` does all that follows.
    `optimizer` is what a GradScaler steps instead, where there is such a thing."""

    forward: Callable[[torch.Tensor], torch.Tensor]
    step: Callable[[], None]
    backward: Callable[[torch.Tensor], None] = torch.Tensor.backward
    optimizer: Any = None


Builder = Callable[[nn.Module, torch.optim.Optimizer], Trained]


def plain_step(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return step


def none(model: nn.Module, optimizer: torch.optim.Optimizer) -> Trained:
    """No communication at all: what the others are measured by."""
    return Trained(model, plain_step(optimizer))


def ddp(model: nn.Module, optimizer: torch.optim.Optimizer) -> Trained:
    """Without the broadcast of buffers before each forward pass, which would only make it slower."""
    wrapped = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
    return Trained(wrapped, plain_step(optimizer))


def post_local(period: int, warmup: int = 1) -> Builder:
    """PyTorch's post-local SGD, local from the second step on. `warmup` is the averager's count of steps
    before that, which should be the hook's, 1."""

    def build(model: nn.Module, optimizer: torch.optim.Optimizer) -> Trained:
        from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as hook
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
        from torch.distributed.optim import PostLocalSGDOptimizer

        wrapped = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
        alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
        state = hook.PostLocalSGDState(None, alone, start_localSGD_iter=1)
        wrapped.register_comm_hook(state, hook.post_localSGD_hook)
        averager = PeriodicModelAverager(period=period, warmup_steps=warmup)
        averaged = PostLocalSGDOptimizer(optimizer, averager)
        return Trained(wrapped, plain_step(averaged), optimizer=averaged)

    return build


def flat_local(period: int) -> Builder:
    """What one writes by hand: one flat all-reduce every `period` steps."""

    def build(model: nn.Module, optimizer: torch.optim.Optimizer) -> Trained:
        parameters, stepped = list(model.parameters()), plain_step(optimizer)
        sizes, taken = [p.numel() for p in parameters], 0

        def step() -> None:
            nonlocal taken
            stepped()
            taken += 1
            if taken % period == 0:
                with torch.no_grad():
                    flat = torch.cat([p.reshape(-1) for p in parameters])
                    dist.all_reduce(flat)
                    flat /= dist.get_world_size()
                    for p, piece in zip(parameters, flat.split(sizes), strict=True):
                        p.copy_(piece.view_as(p))

        return Trained(model, step)

    return build


def accelerate_local(period: int) -> Builder:
    def build(model: nn.Module, optimizer: torch.optim.Optimizer) -> Trained:
        from accelerate import Accelerator
        from accelerate.local_sgd import LocalSGD

        accelerator = Accelerator(cpu=True)
        prepared, its = accelerator.prepare(model, optimizer)
        local = LocalSGD(accelerator=accelerator, model=prepared, local_sgd_steps=period, enabled=True)
        local.__enter__()

        def step() -> None:
            its.step()
            its.zero_grad()
            local.step()

        return Trained(prepared, step, accelerator.backward)

    return build


# torchft


def address() -> str:
    """By which the other workers reach this one."""
    if os.environ["MASTER_ADDR"] in ("127.0.0.1", "localhost"):
        return "127.0.0.1"
    return socket.gethostbyname(socket.gethostname())


def lighthouse(replicas: int) -> tuple[Any, str]:
    """torchft's own coordinator, on this host, and its address."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind="0.0.0.0:0", min_replicas=replicas, join_timeout_ms=2000)
    return server, f"http://{address()}:{server.address().rpartition(':')[2]}"


def manager(model: nn.Module, optimizer: torch.optim.Optimizer, name: str, lit: str, least: int) -> Any:
    """torchft's manager of one replica, with a store of its own."""
    from torchft import Manager, ProcessGroupGloo

    store = dist.TCPStore(address(), 0, is_master=True, wait_for_workers=False)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    made = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=least,
        use_async_quorum=False,
        init_sync=False,  # as its documentation says for models that begin alike
        rank=0,
        world_size=1,
        store_addr=address(),
        store_port=store.port,
        lighthouse_addr=lit,
        replica_id=name,
        hostname=address(),
    )
    made.kept = store  # it lives as long as the manager
    return made


def shared_manager(model: nn.Module, optimizer: torch.optim.Optimizer, name: str) -> Any:
    """Of a job whose workers all come at once and have a process group to agree by."""
    rank, world, told, server = dist.get_rank(), dist.get_world_size(), [""], None
    if rank == 0:
        server, told[0] = lighthouse(world)
    dist.broadcast_object_list(told)
    made = manager(model, optimizer, f"{name}_{rank}", told[0], world)
    made.lit = server
    return made


def torchft_local(period: int) -> Builder:
    def build(model: nn.Module, optimizer: torch.optim.Optimizer) -> Trained:
        from torchft.local_sgd import LocalSGD

        LocalSGD(shared_manager(model, optimizer, "local"), model, optimizer, sync_every=period).__enter__()
        return Trained(model, plain_step(optimizer))

    return build


def torchft_diloco(
    period: int, delay: int = 0, alpha: float = 0.0, outer: float | None = None, buckets: int | None = None
) -> Builder:
    """DiLoCo with the outer optimizer of torchft's example, or SGD with `outer` as its learning rate. With
    delay and 1.0 it computes what DaSGD does, keeping `alpha`. `buckets` is a bucket's size in MB."""

    def build(model: nn.Module, optimizer: torch.optim.Optimizer) -> Trained:
        from torchft.local_sgd import DiLoCo

        slow = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        if outer is not None:
            slow = torch.optim.SGD(model.parameters(), lr=outer)
        settings: dict[str, Any] = {"fragment_sync_delay": delay, "fragment_update_alpha": alpha}
        if buckets is not None:
            settings |= {"use_bucketization": True, "bucket_cap_mb": buckets}
        made = shared_manager(model, optimizer, f"diloco{delay}")
        DiLoCo(made, [model], optimizer, slow, sync_every=period, **settings).__enter__()
        return Trained(model, plain_step(optimizer))

    return build
