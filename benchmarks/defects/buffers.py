"""BatchNorm's running statistics after training: are they the workers' mean, or whose?"""

from __future__ import annotations

from typing import Any

from two import Side, apart, begin, contest, statistics, tell

STEPS = 8


def trained(builder: Any) -> tuple[Any, Any]:
    """Each worker has data of its own, with another mean. The local model, and its statistics if it had
    trained on everybody's batches: the mean of the workers'."""
    import torch
    from torch import nn

    rank = begin()
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    for p in model.parameters():
        p.requires_grad_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # so that statistics are all that changes
    made = builder(model, optimizer)
    x = torch.randn(16, 4) + 10.0 * rank
    for _ in range(STEPS):
        made.backward(made.forward(x).square().mean())
        made.step()
        tell()
    return model, made


def result(model: Any, expected: Any) -> None:
    import torch

    own = torch.cat([b.reshape(-1) for b in statistics(model)])
    tell(apart=apart(statistics(model)), off=float((own - expected).abs().max()))


def expected() -> Any:
    """The mean over the workers of what each one's statistics are when it trains alone."""
    import torch
    from torch import nn

    means = []
    for rank in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        x = torch.randn(16, 4) + 10.0 * rank
        for _ in range(STEPS):
            model(x)
        means.append(torch.cat([b.reshape(-1) for b in statistics(model)]))
    return torch.stack(means).mean(0)


def peer(builder: Any) -> Any:
    def run() -> None:
        model, _ = trained(builder())
        result(model, expected())

    return run


def post_local() -> Any:
    from peers import local

    return local.post_local(4)


def plain_ddp() -> Any:
    """As DDP is by default: rank 0's buffers are broadcast before each forward pass."""
    from peers import local
    from torch import nn

    def build(model: Any, optimizer: Any) -> Any:
        return local.Trained(nn.parallel.DistributedDataParallel(model), local.plain_step(optimizer))

    return build


def accelerate() -> Any:
    from peers import local

    return local.accelerate_local(4)


def torchft() -> Any:
    from peers import local

    return local.torchft_local(4)


def ours() -> None:
    from peers import local

    import offbeat

    offbeat.init(out=False)
    kept: list[Any] = []

    def build(model: Any, optimizer: Any) -> Any:
        kept.append(offbeat.Synchronizer(model, optimizer, plan="local(4)", total=2 * STEPS))
        return local.Trained(model, kept[0].step)

    model, _ = trained(build)
    result(model, expected())


def judge(facts: list[dict[str, Any]]) -> tuple[str, bool]:
    between, off = facts[0]["apart"], max(one["off"] for one in facts)
    if off < 1e-4:
        return "the workers' mean, on both", True
    whose = "the workers differ" if between > 1e-4 else "the same on both"
    return f"{whose} (by {between:.2g}), and not the mean (off by up to {off:.2g})", False


if __name__ == "__main__":
    contest(
        __file__,
        "BatchNorm's running statistics at the end, workers with different data",
        [
            Side("DDP", peer(plain_ddp)),
            Side("DDP + PostLocalSGD(4)", peer(post_local)),
            Side("accelerate LocalSGD(4)", peer(accelerate), "accelerate"),
            Side("torchft LocalSGD(4)", peer(torchft), "torchft"),
            Side("offbeat local(4)", ours),
        ],
        judge,
    )
