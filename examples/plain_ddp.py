"""A small network on scikit-learn's digits, trained by all workers together.

`plain_ddp.py` and `offbeat_version.py` are the same script but for the lines that README shows.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)
labels = torch.tensor(digits.target)
train = TensorDataset(images[:1440], labels[:1440])

model = nn.Sequential(nn.Conv2d(1, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(1152, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model = DistributedDataParallel(model)
sampler = DistributedSampler(train)
loader = DataLoader(train, batch_size=32, sampler=sampler)

for epoch in range(10):
    sampler.set_epoch(epoch)
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

if dist.get_rank() == 0:
    correct = model.module.eval()(images[1440:]).argmax(1) == labels[1440:]
    print(f"accuracy {correct.float().mean():.3f}")
dist.destroy_process_group()
