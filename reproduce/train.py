"""Trains one of the papers' networks on CIFAR-10 or CIFAR-100, as `python reproduce` asks for it.

    offbeat run --virtual 8 --cluster sync-switch-1 --plan "bsp:50% asp" reproduce/train.py --data DIR

The journal gets `accuracy` and `loss` of test images on the way (of the first --test-subset), and at the end
those of all test images and `train_loss`, of the first training images, not augmented. With --look it gets,
so often, how the gradient of the loss over the first test images changes in one step of the first worker:
`gradient` (its norm), `moved` (how far the parameters went), `change` (norm of the gradient's change over its
norm), `cosine` (between the gradient before and after).
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import offbeat
from offbeat.hyper import MOMENTA
from reproduce import beside
from reproduce.models import MODELS

data = beside("examples/cifar_data")
if not hasattr(data, "kept"):
    data.kept = functools.cache(data.load)  # all virtual workers have this one module: one of them reads
KNOWN, LOOKED = 2000, 500
"""Training images whose loss is taken at the end; test images whose gradient is looked at."""


def step(progress: float) -> float:
    """He et al. 2016: a tenth after half of the job, a hundredth after three quarters."""
    return 1.0 if progress < 0.5 else 0.1 if progress < 0.75 else 0.01


def one_cycle(progress: float) -> float:
    """DaSGD's: from a hundredth up to 1 in a straight line over 30 % of the job, and down again."""
    risen = progress / 0.3 if progress < 0.3 else (1 - progress) / 0.7
    return 0.01 + 0.99 * risen


SCHEDULES = {"step": step, "one-cycle": one_cycle}


@torch.no_grad()
def evaluate(model: nn.Module, images: Tensor, labels: Tensor, device: torch.device) -> dict[str, float]:
    model.eval()
    correct, loss = 0, 0.0
    for x, y in zip(images.split(500), labels.split(500), strict=True):
        outputs, y = model(data.normalize(x.to(device))), y.to(device)
        correct += int((outputs.argmax(1) == y).sum())
        loss += F.cross_entropy(outputs, y, reduction="sum").item()
    model.train()
    return {"accuracy": correct / len(labels), "loss": loss / len(labels)}


class Look:
    """The population's gradient before and after a step, over test images as a sample of the population."""

    def __init__(self, model: nn.Module, images: Tensor, labels: Tensor, device: torch.device):
        self._model, self._before = model, None
        self._x, self._y = data.normalize(images.to(device)), labels.to(device)

    def _here(self) -> tuple[Tensor, Tensor]:
        """Parameters and gradient, flat. BatchNorm takes the batch's statistics and learns nothing."""
        buffers = [buffer.clone() for buffer in self._model.buffers()]
        parameters = list(self._model.parameters())
        loss = F.cross_entropy(self._model(self._x), self._y)
        gradient = torch.cat([part.flatten() for part in torch.autograd.grad(loss, parameters)])
        with torch.no_grad():
            for buffer, kept in zip(self._model.buffers(), buffers, strict=True):
                buffer.copy_(kept)
            return torch.cat([p.flatten() for p in parameters]), gradient

    def begin(self) -> None:
        self._before = self._here()

    def end(self) -> dict[str, float]:
        assert self._before is not None
        (x, g), (after_x, after_g), self._before = self._before, self._here(), None
        norm = g.norm().item()
        return {
            "gradient": norm,
            "moved": (after_x - x).norm().item(),
            "change": (after_g - g).norm().item() / max(norm, 1e-30),
            "cosine": F.cosine_similarity(g, after_g, 0).item(),
        }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", default=os.environ.get("CIFAR10_DIR", "data/cifar10"), metavar="DIR", help="parquet files")
    add("--classes", type=int, default=10, help="10, or 100 for CIFAR-100")
    add("--model", choices=MODELS, default="resnet8")
    add("--width", type=float, default=1.0, help="share of the published width")
    add("--depth", type=float, default=1.0, help="share of the published blocks")
    add("--subset", type=int, help="train on the first SUBSET images only")
    add("--test-subset", type=int, default=2000, help="evaluate on these on the way, on all at the end")
    add("--last-subset", type=int, help="at the end on these only")
    add("--epochs", type=float, default=10, help="where --total says nothing else")
    add("--batch-size", type=int, default=32, help="samples of a worker's step")
    add("--lr", type=float, default=0.03)
    add("--momentum", type=float, default=0.9)
    add("--weight-decay", type=float, default=1e-4)
    add("--lr-reference", choices=("global", "worker"), default="global")
    add("--at-switch", choices=MOMENTA, default="keep", help="what becomes of the momentum")
    add("--unscaled", type=float, metavar="SHARE", help="from there on n times the learning rate")
    add("--schedule", choices=SCHEDULES, default="step")
    add("--evaluate", default="20%", metavar="SHARE")
    add("--look", metavar="SHARE", help="look at the gradient's change so often, such as 4%%")
    add("--device", choices=("cpu", "cuda"), help="refuse to train on another")
    add("--bf16", action="store_true", help="compute in bfloat16 where autocast does")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    offbeat.init()
    device, first = offbeat.device(), offbeat.rank() == 0
    if args.device not in (None, device.type):
        raise SystemExit(f"train.py: --device {args.device}: this worker has {device.type}")
    try:
        train_x, train_y = (tensor[: args.subset] for tensor in data.kept(args.data, "train"))
        test_x, test_y = data.kept(args.data, "test")
    except FileNotFoundError as error:
        raise SystemExit(f"train.py: {error}") from None

    model = MODELS[args.model](args.width, args.depth, args.classes)
    model.to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=args.lr, momentum=args.momentum, weight_decay=args.weight_decay
    )
    sync = offbeat.Synchronizer(
        model, optimizer, epochs=args.epochs, lr_reference=args.lr_reference, momentum=args.at_switch
    )
    shape, unscaled = SCHEDULES[args.schedule], 1.0 if args.unscaled is None else args.unscaled
    workers = offbeat.world_size()
    sync.scheduler(lambda progress: shape(progress) * (workers if progress >= unscaled else 1))
    look, looking = Look(model, test_x[:LOOKED], test_y[:LOOKED], device), None

    for x, y in sync.batches((train_x, train_y), batch_size=args.batch_size):
        with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
            loss = F.cross_entropy(model(data.normalize(data.augment(x.to(device)))), y.to(device))
        loss.backward()
        sync.step()
        if sync.done:
            break
        if looking is not None and looking == sync.protocol:  # all enter, or under shards each alone
            with sync.consensus():
                if first:
                    sync.log(**look.end())
        looking = sync.protocol if args.look is not None and sync.every(args.look) else None
        if looking is not None:
            with sync.consensus():
                if first:
                    look.begin()
        if sync.every(args.evaluate):
            with sync.consensus():
                if first:
                    size = args.test_subset
                    with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
                        sync.log(**evaluate(model, test_x[:size], test_y[:size], device))
    if first:
        known = evaluate(model, train_x[:KNOWN], train_y[:KNOWN], device)
        found = evaluate(model, test_x[: args.last_subset], test_y[: args.last_subset], device)
        sync.log(**found, train_loss=known["loss"])
        print(f"accuracy {found['accuracy']:.4f}  loss {found['loss']:.4f}  of training {known['loss']:.4f}")


if __name__ == "__main__":
    main()
