"""A warm-up of 20 steps, after which averages come every 4: is it one setting, or two that can differ?"""

from __future__ import annotations

from typing import Any

from two import Side, apart, begin, contest, tell

STEPS = 16


def net() -> tuple[Any, Any]:
    import torch
    from torch import nn

    model = nn.Linear(8, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def train(made: Any, model: Any) -> None:
    """Tells in how many steps the workers' parameters were alike."""
    import torch

    alike = 0
    for _ in range(STEPS):
        made.backward((made.forward(torch.randn(4, 8)) - 1).square().mean())
        made.step()
        alike += apart(model.parameters()) < 1e-6
        tell(alike=alike)


def post_local() -> None:
    """The hook's warm-up is over after 1 step, the averager's was given as 20."""
    import torch
    from peers import local

    rank = begin()
    model, optimizer = net()
    made = local.post_local(4, warmup=20)(model, optimizer)
    torch.manual_seed(rank)
    train(made, model)


def ours() -> None:
    """A plan has one place for it: "bsp:2u local(4)"."""
    import torch
    from peers import local

    import offbeat

    rank = begin()
    offbeat.init(out=False)
    model, optimizer = net()
    sync = offbeat.Synchronizer(model, optimizer, plan="bsp:2u local(4)", total=2 * STEPS)
    torch.manual_seed(rank)
    train(local.Trained(model, sync.step), model)


def judge(facts: list[dict[str, Any]]) -> tuple[str, bool]:
    alike = facts[0]["alike"]
    said = f"the workers' parameters were alike after {alike} of {STEPS} steps"
    return (said if alike > 1 else said + "; nothing was said"), alike > 1


if __name__ == "__main__":
    contest(
        __file__,
        "the warm-up before local SGD, given differently in the two places where there are two",
        [Side("DDP + PostLocalSGD(4)", post_local), Side("offbeat bsp:2u local(4)", ours)],
        judge,
    )
