"""A small CNN on scikit-learn's digits (8x8 pixels), about 99 % accurate in some ten seconds.

python examples/digits.py                                        # one worker
offbeat run -n 2 examples/digits.py --plan "bsp:12.5% asp"       # two, and a plan of your own
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import offbeat


def load() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images and labels, then those of the test: 1437 and 360, the same split on every worker."""
    digits = load_digits()
    images = torch.tensor(digits.images / 8 - 1, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1437], order[1437:]
    return images[train], labels[train], images[test], labels[test]


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 10),
    )


@torch.no_grad()
def evaluate(model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, float]:
    model.eval()
    outputs = model(images)
    model.train()
    return {
        "accuracy": (outputs.argmax(1) == labels).float().mean().item(),
        "loss": F.cross_entropy(outputs, labels).item(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=32, help="samples per worker and step")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    offbeat.init(seed=args.seed)
    device = offbeat.device()
    train_x, train_y, test_x, test_y = (tensor.to(device) for tensor in load())
    model = cnn().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    sync = offbeat.Synchronizer(model, optimizer, plan="bsp:12.5% dasgd", epochs=args.epochs)
    sync.scheduler(lambda progress: 1 - progress)

    def report() -> None:
        if offbeat.rank() == 0:
            values = evaluate(model, test_x, test_y)
            sync.log(**values)
            print(f"{sync.progress:4.0%}  accuracy {values['accuracy']:.4f}  loss {values['loss']:.4f}")

    for x, y in sync.batches((train_x, train_y), batch_size=args.batch_size):
        F.cross_entropy(model(x), y).backward()
        sync.step()
        if sync.every("10%") and not sync.done:
            with sync.consensus():  # all workers enter: the model is their average inside
                report()
    report()  # the last step has left the same model on every worker


if __name__ == "__main__":
    main()
