"""A GradScaler skips one worker's step: do averages still meet?"""

from __future__ import annotations

from typing import Any

from two import Side, apart, begin, contest, tell

STEPS, BAD = 10, 3


def net() -> tuple[Any, Any, Any]:
    import torch
    from torch import nn

    model = nn.Linear(8, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.01), torch.amp.GradScaler("cpu", init_scale=8.0)


def loss_of(model: Any, rank: int, step: int) -> Any:
    import torch

    loss = model(torch.randn(4, 8)).square().mean()
    return loss * float("inf") if rank == 1 and step == BAD else loss


def post_local() -> None:
    from peers import local

    rank = begin()
    model, inner, scaler = net()
    trained = local.post_local(4)(model, inner)
    for step in range(STEPS):
        scaler.scale(loss_of(trained.forward, rank, step)).backward()
        scaler.step(trained.optimizer)
        scaler.update()
        trained.optimizer.zero_grad()
        tell(step=step + 1)
    tell(step=STEPS, apart=apart(model.parameters()))


def ours() -> None:
    import offbeat

    rank = begin()
    offbeat.init(out=False)
    model, optimizer, scaler = net()
    sync = offbeat.Synchronizer(model, optimizer, plan="local(4)", total=2 * STEPS)
    for step in range(STEPS):
        scaler.scale(loss_of(model, rank, step)).backward()
        sync.step(scaler)
        tell(step=step + 1)
    tell(step=STEPS, apart=apart(model.parameters()))


def judge(facts: list[dict[str, Any]]) -> tuple[str, bool]:
    between = facts[0]["apart"]
    return f"ends after {STEPS} steps; the workers' parameters are {between:.1g} apart", between < 1e-6


if __name__ == "__main__":
    contest(
        __file__,
        "a GradScaler skips a step of one worker (its gradient was infinite)",
        [Side("DDP + PostLocalSGD(4)", post_local), Side("offbeat local(4)", ours)],
        judge,
    )
