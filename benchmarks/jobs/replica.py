"""A job of torchft's fault tolerant DDP: one replica, as its example train_ddp.py does it."""

import os
from datetime import timedelta

from log import Steps, loss_of, net
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

rank = int(os.environ["REPLICA_GROUP_ID"])
model, inner = net()


def load(state: dict) -> None:
    model.load_state_dict(state["model"])
    inner.load_state_dict(state["optim"])


manager = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
    min_replica_size=1,
    load_state_dict=load,
    state_dict=lambda: {"model": model.state_dict(), "optim": inner.state_dict()},
    replica_id=f"train_ddp_{rank}",
    timeout=timedelta(seconds=30),
    hostname="127.0.0.1",
)
wrapped, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
steps = Steps(rank)
while True:
    before = manager.current_step()
    optimizer.zero_grad()
    loss_of(wrapped).backward()
    optimizer.step()
    if manager.current_step() != before and manager.is_participating():
        steps.write(manager.current_step())
