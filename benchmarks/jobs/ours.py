"""A job under Offbeat: words are the number of parameters."""

import sys

from log import Steps, loss_of, net

import offbeat

offbeat.init(seed=3)
model, optimizer = net(*sys.argv[1:])
sync = offbeat.Synchronizer(model, optimizer, total=10**7)
steps = Steps(offbeat.rank())
while not sync.done:
    loss_of(model).backward()
    sync.step()
    steps.write(sync._loop.worker.clock)
