"""A job that can be stopped and gone on with: what the recipes beside this file start.

python examples/launch/train.py --epochs 2
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import offbeat

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint.pt"), help="where all hosts see it")
parser.add_argument("--epochs", type=int, default=30)
args = parser.parse_args()

offbeat.init(seed=0)
digits = load_digits()
images = torch.tensor(digits.images / 8 - 1, dtype=torch.float32).flatten(1)
labels = torch.tensor(digits.target)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(offbeat.device())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
sync = offbeat.Synchronizer(model, optimizer, plan="bsp:12.5% dasgd", epochs=args.epochs)
batches = sync.batches((images[:1437], labels[:1437]), batch_size=32)
if args.checkpoint.exists():  # an earlier attempt's
    sync.restore(args.checkpoint)
    if offbeat.rank() == 0:
        print(f"goes on at {sync.progress:.0%}")

for x, y in batches:
    F.cross_entropy(model(x), y).backward()
    sync.step()
    if sync.every("10%") and not sync.done:
        sync.save(args.checkpoint)

if offbeat.rank() == 0:
    test = images[1437:].to(offbeat.device())
    right = model(test).argmax(1).cpu() == labels[1437:]
    print(f"{sync.units} units by {offbeat.world_size()} workers, accuracy {right.float().mean():.3f}")
