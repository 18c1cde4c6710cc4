"""Buckets that the tensors don't fill to the last byte: is every tensor averaged?"""

from __future__ import annotations

from typing import Any

from two import Side, apart, begin, contest, tell

STEPS = 4


def net() -> tuple[Any, Any]:
    """Six tensors of 0.6 MB."""
    import torch
    from torch import nn

    model = nn.Sequential(*(nn.Linear(387, 387, bias=False) for _ in range(6)))
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def train(made: Any, model: Any) -> None:
    import torch

    for _ in range(STEPS):
        made.backward((made.forward(torch.randn(4, 387)) - 1).square().mean())
        made.step()
        tell()
    tell(apart=[apart([p]) for p in model.parameters()])


def torchft(**settings: Any) -> Any:
    def run() -> None:
        import torch
        from peers import local

        rank = begin()
        model, optimizer = net()
        made = local.torchft_diloco(STEPS, outer=1.0, **settings)(model, optimizer)
        torch.manual_seed(rank)
        train(made, model)

    return run


def ours() -> None:
    import torch
    from peers import local

    import offbeat

    rank = begin()
    offbeat.init(out=False)
    model, optimizer = net()
    sync = offbeat.Synchronizer(model, optimizer, plan=f"local({STEPS})", total=2 * STEPS + 2)
    torch.manual_seed(rank)
    train(local.Trained(model, sync.step), model)


def judge(facts: list[dict[str, Any]]) -> tuple[str, bool]:
    found = facts[0]["apart"]
    wrong = sum(one > 1e-5 for one in found)
    if not wrong:
        return f"all {len(found)} tensors are alike after the average", True
    return f"{wrong} of {len(found)} tensors are not averaged; nothing was said", False


if __name__ == "__main__":
    contest(
        __file__,
        "an average in buckets of 1 MB, of tensors of 0.6 MB",
        [
            Side("torchft, buckets of 1 MB", torchft(buckets=1), "torchft"),
            Side("torchft, as it is by default", torchft(), "torchft"),
            Side("offbeat local(4)", ours),
        ],
        judge,
    )
