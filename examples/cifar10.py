"""CIFAR-10 with ResNet-32 (He et al., 2016) or a small ResNet-8.

    offbeat run -n 2 examples/cifar10.py --data DIR --subset 5000 --epochs 3
    offbeat run -n 4 examples/cifar10.py --data DIR --model resnet32 --epochs 160 --plan "bsp:6.25% asp"

DIR holds the dataset's parquet files from the Hugging Face hub.
"""

import argparse
import math
import os
from collections.abc import Callable

import torch
import torch.nn.functional as F
from cifar_data import augment, load, normalize
from models import MODELS
from torch import Tensor, nn

import offbeat


def one_cycle(progress: float) -> float:
    """Up in a straight line to a quarter of the job, then down to zero along a cosine."""
    if progress < 0.25:
        return 0.1 + 0.9 * progress / 0.25
    return (1 + math.cos(math.pi * (progress - 0.25) / 0.75)) / 2


def step(progress: float) -> float:
    """He et al.: a tenth after half of the job, a hundredth after three quarters."""
    return 1.0 if progress < 0.5 else 0.1 if progress < 0.75 else 0.01


def constant(progress: float) -> float:
    return 1.0


SCHEDULES: dict[str, Callable[[float], float]] = {"one-cycle": one_cycle, "step": step, "constant": constant}


@torch.no_grad()
def evaluate(model: nn.Module, images: Tensor, labels: Tensor, device: torch.device) -> dict[str, float]:
    model.eval()
    correct, loss = 0, 0.0
    for x, y in zip(images.split(500), labels.split(500), strict=True):
        y = y.to(device)
        outputs = model(normalize(x.to(device)))
        correct += int((outputs.argmax(1) == y).sum())
        loss += F.cross_entropy(outputs, y, reduction="sum").item()
    model.train()
    return {"accuracy": correct / len(labels), "loss": loss / len(labels)}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--data", default=os.environ.get("CIFAR10_DIR", "data/cifar10"), metavar="DIR", help="or CIFAR10_DIR")
    add("--model", choices=MODELS, default="resnet8")
    add("--width", type=int, help="channels of the first stage (16 for resnet32, 32 for resnet8)")
    add("--subset", type=int, help="train on the first SUBSET images only")
    add("--test-subset", type=int, help="evaluate on the first TEST_SUBSET images only")
    add("--epochs", type=int, default=30)
    add("--batch-size", type=int, default=32, help="samples per worker and step")
    add("--lr", type=float, default=0.1)
    add("--momentum", type=float, default=0.9)
    add("--weight-decay", type=float, default=1e-4)
    add("--lr-reference", choices=("global", "worker"), default="global", help="what --lr is tuned for")
    add(
        "--warmup",
        type=float,
        default=0.0,
        help="of the factor n of --lr-reference worker",
    )
    add("--schedule", choices=SCHEDULES, default="one-cycle")
    add("--evaluate", default="10%", metavar="SHARE", help="of the progress between two evaluations")
    add(
        "--bf16",
        action="store_true",
        help="compute in bfloat16 where autocast does (the parameters stay float32)",
    )
    add("--no-augment", action="store_true", help="train on the images as they are, without crops and flips")
    add("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    offbeat.init(seed=args.seed)
    device = offbeat.device()
    try:
        # Copies: a slice would keep the whole set in memory, in every worker.
        train_x, train_y = (tensor[: args.subset].clone() for tensor in load(args.data, "train"))
        test_x, test_y = (tensor[: args.test_subset].clone() for tensor in load(args.data, "test"))
    except FileNotFoundError as error:
        raise SystemExit(f"cifar10.py: {error}") from None

    model = MODELS[args.model](**({} if args.width is None else {"width": args.width}))
    model.to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=args.lr, momentum=args.momentum, weight_decay=args.weight_decay
    )
    sync = offbeat.Synchronizer(
        model,
        optimizer,
        plan="bsp:12.5% dasgd",
        epochs=args.epochs,
        lr_reference=args.lr_reference,
        warmup=args.warmup,
    )
    sync.scheduler(SCHEDULES[args.schedule])

    def report() -> None:
        if offbeat.rank() == 0:
            values = evaluate(model, test_x, test_y, device)
            sync.log(**values)
            print(f"{sync.progress:4.0%}  accuracy {values['accuracy']:.4f}  loss {values['loss']:.4f}")

    for x, y in sync.batches((train_x, train_y), batch_size=args.batch_size):
        x, y = x.to(device), y.to(device)
        x = normalize(x if args.no_augment else augment(x))
        with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        sync.step()
        if sync.every(args.evaluate) and not sync.done:
            with sync.consensus():  # all workers enter: the model is their average inside
                report()
    report()  # the last step has left the same model on every worker


if __name__ == "__main__":
    main()
