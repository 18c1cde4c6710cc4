"""The papers' networks in their CIFAR form: [N, 3, 32, 32] -> [N, classes].

`width` multiplies the channels (of grouped convolutions: the groups), `depth` the blocks of each stage, at
least one; at 1.0 a network has its published number of parameters. The stems keep all 32 pixels, as in the
CIFAR versions that DaSGD's authors train.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reproduce import beside

small = beside("examples/models")


def convolution(
    channels: int, out: int, kernel: int = 3, stride: int = 1, groups: int = 1, bias: bool = False
) -> list[nn.Module]:
    """With BatchNorm; odd kernels keep the size."""
    conv = nn.Conv2d(channels, out, kernel, stride, kernel // 2, groups=groups, bias=bias)
    return [conv, nn.BatchNorm2d(out)]


def activated(*args: int, act: Callable[[], nn.Module] = nn.ReLU, **settings: int) -> list[nn.Module]:
    return [*convolution(*args, **settings), act()]


def scaled(number: int, share: float) -> int:
    return max(round(number * share), 1)


def network(body: list[nn.Module], channels: int, classes: int) -> nn.Sequential:
    """The body, a mean over the pixels, and a linear head."""
    made = nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))
    for module in made.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    return made


class Residual(nn.Module):
    """body(x) + shortcut(x); `then` comes after the sum."""

    def __init__(self, body: list[nn.Module], shortcut: list[nn.Module], then: nn.Module):
        super().__init__()
        self.body, self.shortcut, self.then = nn.Sequential(*body), nn.Sequential(*shortcut), then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.body(x) + self.shortcut(x))


class Dense(nn.Module):
    """x and body(x), beside each other."""

    def __init__(self, body: list[nn.Module]):
        super().__init__()
        self.body = nn.Sequential(*body)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.body(x), x], 1)


class Inception(nn.Module):
    """Branches beside each other."""

    def __init__(self, branches: list[list[nn.Module]]):
        super().__init__()
        self.branches = nn.ModuleList(nn.Sequential(*branch) for branch in branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


class DualPath(nn.Module):
    """The first `out` channels are a residual path, the others a dense one."""

    def __init__(
        self, channels: int, inner: int, out: int, dense: int, groups: int, stride: int, first: bool
    ):
        super().__init__()
        self.out = out
        self.body = nn.Sequential(
            *activated(channels, inner, 1),
            *activated(inner, inner, 3, stride, groups),
            *convolution(inner, out + dense, 1),
        )
        self.shortcut = nn.Sequential(*(convolution(channels, out + dense, 1, stride) if first else []))

    def forward(self, x: Tensor) -> Tensor:
        x, y, d = self.shortcut(x), self.body(x), self.out
        return F.relu(torch.cat([x[:, :d] + y[:, :d], x[:, d:], y[:, d:]], 1))


def bottlenecks(
    channels: int, stages: list[tuple[int, int, int, int]], groups: int = 1
) -> tuple[list[nn.Module], int]:
    """Stages of (blocks, inner channels, channels, stride): He et al. 2016; in groups, Xie et al. 2017."""
    layers: list[nn.Module] = []
    for blocks, inner, out, stride in stages:
        for block in range(blocks):
            step = 1 if block else stride
            body = [
                *activated(channels, inner, 1),
                *activated(inner, inner, 3, step, groups),
                *convolution(inner, out, 1),
            ]
            same = step == 1 and channels == out
            layers.append(Residual(body, [] if same else convolution(channels, out, 1, step), nn.ReLU()))
            channels = out
    return layers, channels


def resnet(counts: tuple[int, ...], width: float, depth: float, classes: int) -> nn.Module:
    stem = scaled(64, width)
    stages = [
        (scaled(count, depth), stem << stage, 4 * stem << stage, 2 if stage else 1)
        for stage, count in enumerate(counts)
    ]
    layers, channels = bottlenecks(stem, stages)
    return network([*activated(3, stem), *layers], channels, classes)


def resnet50(width: float = 1.0, depth: float = 1.0, classes: int = 10) -> nn.Module:
    """He et al. 2016: 23.5 million parameters."""
    return resnet((3, 4, 6, 3), width, depth, classes)


def resnet101(width: float = 1.0, depth: float = 1.0, classes: int = 10) -> nn.Module:
    """42.5 million parameters."""
    return resnet((3, 4, 23, 3), width, depth, classes)


def resnext29(width: float = 1.0, depth: float = 1.0, classes: int = 10) -> nn.Module:
    """Xie et al. 2017, 32 groups of 4 channels: 4.8 million parameters."""
    groups, stem = scaled(32, width), scaled(64, width)
    stages = [
        (scaled(3, depth), 4 * groups << stage, 8 * groups << stage, 2 if stage else 1) for stage in range(3)
    ]
    layers, channels = bottlenecks(stem, stages, groups)
    return network([*activated(3, stem, 1), *layers], channels, classes)


def vgg16(width: float = 1.0, depth: float = 1.0, classes: int = 10) -> nn.Module:
    """Simonyan and Zisserman 2015, with BatchNorm and one linear layer: 14.7 million parameters."""
    layers: list[nn.Module] = []
    channels = 3
    for count, full in ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)):
        for _ in range(scaled(count, depth)):
            out = scaled(full, width)
            layers += activated(channels, out, bias=True)
            channels = out
        layers.append(nn.MaxPool2d(2))
    return network(layers, channels, classes)


INCEPTIONS = (
    ((64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64)),
    (
        (192, 96, 208, 16, 48, 64),
        (160, 112, 224, 24, 64, 64),
        (128, 128, 256, 24, 64, 64),
        (112, 144, 288, 32, 64, 64),
        (256, 160, 320, 32, 128, 128),
    ),
    ((256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128)),
)
"""Szegedy et al. 2015, table 1: by stage, #1x1, #3x3 reduce, #3x3, #5x5 reduce, #5x5, pool proj."""


def googlenet(width: float = 1.0, depth: float = 1.0, classes: int = 10) -> nn.Module:
    """With BatchNorm, and two 3x3 convolutions for a 5x5: 6.2 million parameters."""
    channels = scaled(192, width)
    layers: list[nn.Module] = activated(3, channels, bias=True)
    for stage, rows in enumerate(INCEPTIONS):
        if stage:
            layers.append(nn.MaxPool2d(3, 2, 1))
        for row in rows[: scaled(len(rows), depth)]:
            one, before3, three, before5, five, pool = (scaled(number, width) for number in row)
            c = channels
            wide = [*activated(before5, five, bias=True), *activated(five, five, bias=True)]
            branches = [
                activated(c, one, 1, bias=True),
                [*activated(c, before3, 1, bias=True), *activated(before3, three, bias=True)],
                [*activated(c, before5, 1, bias=True), *wide],
                [nn.MaxPool2d(3, 1, 1), *activated(c, pool, 1, bias=True)],
            ]
            layers.append(Inception(branches))
            channels = one + three + five + pool
    return network(layers, channels, classes)


def densenet121(width: float = 1.0, depth: float = 1.0, classes: int = 10) -> nn.Module:
    """Huang et al. 2017, growth 32: 7.0 million parameters."""

    def preactivated(channels: int, out: int, kernel: int) -> list[nn.Module]:
        conv = nn.Conv2d(channels, out, kernel, padding=kernel // 2, bias=False)
        return [nn.BatchNorm2d(channels), nn.ReLU(), conv]

    growth = scaled(32, width)
    channels = 2 * growth
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1, bias=False)]
    for stage, count in enumerate((6, 12, 24, 16)):
        if stage:
            layers += [*preactivated(channels, channels // 2, 1), nn.AvgPool2d(2)]
            channels //= 2
        for _ in range(scaled(count, depth)):
            layers.append(
                Dense([*preactivated(channels, 4 * growth, 1), *preactivated(4 * growth, growth, 3)])
            )
            channels += growth
    return network([*layers, nn.BatchNorm2d(channels), nn.ReLU()], channels, classes)


def mobilenetv2(width: float = 1.0, depth: float = 1.0, classes: int = 10) -> nn.Module:
    """Sandler et al. 2018, strides for 32 pixels: 2.2 million parameters."""
    channels = scaled(32, width)
    layers: list[nn.Module] = activated(3, channels, act=nn.ReLU6)
    rows = ((1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2))
    for expansion, full, count, stride in (*rows, (6, 320, 1, 1)):
        out = scaled(full, width)
        for block in range(scaled(count, depth)):
            inner, step = expansion * channels, 1 if block else stride
            body = activated(channels, inner, 1, act=nn.ReLU6) if expansion > 1 else []
            body += [*activated(inner, inner, 3, step, inner, act=nn.ReLU6), *convolution(inner, out, 1)]
            same = step == 1 and channels == out
            layers.append(Residual(body, [], nn.Identity()) if same else nn.Sequential(*body))
            channels = out
    last = scaled(1280, width)
    return network([*layers, *activated(channels, last, 1, act=nn.ReLU6)], last, classes)


def dpn92(width: float = 1.0, depth: float = 1.0, classes: int = 10) -> nn.Module:
    """Chen et al. 2017: 34.2 million parameters."""
    groups, channels = scaled(32, width), scaled(64, width)
    layers: list[nn.Module] = activated(3, channels)
    rows = ((3, 3, 8, 16), (6, 4, 16, 32), (12, 20, 32, 24), (24, 3, 64, 128))
    for stage, (per, count, wide, growth) in enumerate(rows):
        inner, out, dense = per * groups, wide * groups, scaled(growth, width)
        for block in range(scaled(count, depth)):
            step = 2 if stage and not block else 1
            layers.append(DualPath(channels, inner, out, dense, groups, step, not block))
            channels = out + (block + 2) * dense
    return network(layers, channels, classes)


def _he(make: Callable[[int], nn.Module], full: int) -> Callable[..., nn.Module]:
    def made(width: float = 1.0, depth: float = 1.0, classes: int = 10) -> nn.Module:
        if depth != 1 or classes != 10:
            raise ValueError(
                f"depth {depth:g}, classes {classes}: the examples' networks have depth 1, 10 classes"
            )
        return make(scaled(full, width))

    return made


MODELS: dict[str, Callable[..., nn.Module]] = {
    "resnet8": _he(small.resnet8, 32),
    "resnet32": _he(small.resnet32, 16),
    "resnet50": resnet50,
    "resnet101": resnet101,
    "resnext29": resnext29,
    "vgg16": vgg16,
    "googlenet": googlenet,
    "densenet121": densenet121,
    "mobilenetv2": mobilenetv2,
    "dpn92": dpn92,
}
"""By name, as functions of width, depth and classes."""
