"""Gradients of 4 micro-batches make a step, averages come every 4 steps: what is counted?"""

from __future__ import annotations

from typing import Any

from two import Side, apart, begin, contest, tell

STEPS, MICRO, PERIOD = 8, 4, 4


def net() -> tuple[Any, Any]:
    import torch
    from torch import nn

    model = nn.Linear(8, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def accelerate() -> None:
    import torch
    from accelerate import Accelerator
    from accelerate.local_sgd import LocalSGD

    rank = begin()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICRO)
    model, optimizer = accelerator.prepare(*net())
    torch.manual_seed(rank)
    alike = []
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=PERIOD, enabled=True) as local:
        for number in range(STEPS * MICRO):
            with accelerator.accumulate(model):
                accelerator.backward((model(torch.randn(4, 8)) - 1).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                local.step()
            if (number + 1) % MICRO == 0:
                alike.append(apart(model.parameters()) < 1e-6)
            tell(alike=alike)


def ours() -> None:
    import torch

    import offbeat

    rank = begin()
    offbeat.init(out=False)
    model, optimizer = net()
    sync = offbeat.Synchronizer(model, optimizer, plan=f"local({PERIOD})", total=2 * STEPS + 2)
    torch.manual_seed(rank)
    alike = []
    for _ in range(STEPS):
        for _ in range(MICRO - 1):
            with sync.accumulate():
                ((model(torch.randn(4, 8)) - 1).square().mean() / MICRO).backward()
        ((model(torch.randn(4, 8)) - 1).square().mean() / MICRO).backward()
        sync.step()
        alike.append(apart(model.parameters()) < 1e-6)
        tell(alike=alike)


def judge(facts: list[dict[str, Any]]) -> tuple[str, bool]:
    found = [number for number, same in enumerate(facts[0]["alike"], 1) if same]
    right = found == list(range(PERIOD, STEPS + 1, PERIOD))
    return f"averaged after optimizer steps {', '.join(map(str, found))} of {STEPS}", right


if __name__ == "__main__":
    contest(
        __file__,
        f"{MICRO} micro-batches make an optimizer step, and averages are due every {PERIOD} steps",
        [Side("accelerate LocalSGD(4)", accelerate, "accelerate"), Side("offbeat local(4)", ours)],
        judge,
    )
