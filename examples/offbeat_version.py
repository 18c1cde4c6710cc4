"""A small network on scikit-learn's digits, trained by all workers together.

`plain_ddp.py` and `offbeat_version.py` are the same script but for the lines that README shows.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import offbeat

offbeat.init()
torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)
labels = torch.tensor(digits.target)
train = TensorDataset(images[:1440], labels[:1440])

model = nn.Sequential(nn.Conv2d(1, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(1152, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
sync = offbeat.Synchronizer(model, optimizer, plan="bsp:12.5% dasgd", epochs=10)

for x, y in sync.batches(train, batch_size=32):
    F.cross_entropy(model(x), y).backward()
    sync.step()

if offbeat.rank() == 0:
    correct = model.eval()(images[1440:]).argmax(1) == labels[1440:]
    print(f"accuracy {correct.float().mean():.3f}")
