"""Networks for CIFAR-10: ResNet-32 of He et al. (2016, section 4.2) and a small ResNet-8."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut. Where the shape changes, the shortcut is a 1x1 convolution if
    `project` (He et al.'s option B, without its BatchNorm), else every second pixel and channels of
    zeros (option A, which has no parameters)."""

    def __init__(self, channels: int, out: int, stride: int, project: bool):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out)
        self.stride, self.added = stride, out - channels
        self.shortcut = None
        if project and (stride != 1 or self.added):
            self.shortcut = nn.Conv2d(channels, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        if self.shortcut is not None:
            x = self.shortcut(x)
        elif self.stride != 1 or self.added:
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.added))
        return F.relu(x + y)


class ResNet(nn.Module):
    """Three stages of `blocks` blocks with `width`, 2·width and 4·width channels on 32, 16 and 8 pixels:
    6·blocks + 2 layers. [N, 3, 32, 32] -> [N, 10]."""

    def __init__(self, blocks: int, width: int, project: bool):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        layers, channels = [], width
        for stage in range(3):
            for block in range(blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                layers.append(Block(channels, width << stage, stride, project))
                channels = width << stage
        self.stages = nn.Sequential(*layers)
        self.head = nn.Linear(channels, 10)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        return self.head(torch.mean(self.stages(x), dim=(2, 3)))


def resnet32(width: int = 16) -> ResNet:
    """0.46 million parameters at width 16."""
    return ResNet(blocks=5, width=width, project=False)


def resnet8(width: int = 32) -> ResNet:
    """0.31 million parameters at width 32; an epoch takes a CPU core minutes, not an hour."""
    return ResNet(blocks=1, width=width, project=True)


MODELS = {"resnet8": resnet8, "resnet32": resnet32}
