"""A job of DDP under torchrun, which saves itself every 50 steps and goes on from there when it is started
again. Words are the number of parameters, and after how many more steps it ends (0: never)."""

import os
import sys
from pathlib import Path

import torch
from log import Steps, loss_of, net
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

EVERY = 50

dist.init_process_group("gloo")
rank, path = dist.get_rank(), Path("checkpoint.pt")
model, optimizer = net(sys.argv[1])
step, more = 0, int(sys.argv[2])
if path.exists():
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    step = state["step"]
wrapped = DistributedDataParallel(model)
steps, last = Steps(rank), step + more if more else -1
while step != last:
    loss_of(wrapped).backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    steps.write(step)
    if rank == 0 and (step % EVERY == 0 or step == last):
        torch.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step},
            path.with_suffix(".new"),
        )
        os.replace(path.with_suffix(".new"), path)
dist.barrier()
dist.destroy_process_group()
