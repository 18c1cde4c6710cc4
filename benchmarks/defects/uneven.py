"""One worker's data ends earlier: does training end?"""

from __future__ import annotations

from typing import Any

from two import Side, begin, contest, tell

BATCHES = (12, 8)


def data(rank: int) -> list[Any]:
    import torch

    return [torch.randn(4, 8) for _ in range(BATCHES[rank])]


def net() -> tuple[Any, Any]:
    import torch
    from torch import nn

    model = nn.Linear(8, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def accelerate() -> None:
    """As its documentation writes the loop."""
    from accelerate import Accelerator
    from accelerate.local_sgd import LocalSGD

    rank = begin()
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*net())
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=4, enabled=True) as local:
        for step, x in enumerate(data(rank), 1):
            with accelerator.accumulate(model):
                accelerator.backward(model(x).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                local.step()
            tell(step=step)
    tell(step=step, ended=True)


def post_local() -> None:
    from peers import local

    rank = begin()
    made = local.post_local(4)(*net())
    for step, x in enumerate(data(rank), 1):
        made.backward(made.forward(x).square().mean())
        made.step()
        tell(step=step)
    tell(step=step, ended=True)


def ours() -> None:
    import offbeat

    rank = begin()
    offbeat.init(out=False)
    model, optimizer = net()
    step, total = 0, sum(BATCHES)
    with offbeat.Synchronizer(model, optimizer, plan="local(4)", total=total) as sync:
        for x in data(rank):
            if sync.done:
                break
            model(x).square().mean().backward()
            sync.step()
            step += 1
            tell(step=step)
    tell(step=step, ended=True)


def judge(facts: list[dict[str, Any]]) -> tuple[str, bool]:
    done = " and ".join(str(one.get("step", 0)) for one in facts)
    return f"ends after {done} steps", [one.get("step") for one in facts] == list(BATCHES)


if __name__ == "__main__":
    contest(
        __file__,
        f"one worker has {BATCHES[0]} batches and the other {BATCHES[1]}",
        [
            Side("accelerate LocalSGD(4)", accelerate, "accelerate"),
            Side("DDP + PostLocalSGD(4)", post_local),
            Side("offbeat local(4)", ours),
        ],
        judge,
    )
