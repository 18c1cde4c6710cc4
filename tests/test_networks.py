"""The papers' networks: published sizes, and small ones train."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from reproduce.models import MODELS

PUBLISHED = {
    "resnet8": 308_266,
    "resnet32": 464_154,
    "resnet50": 23_520_842,
    "resnet101": 42_512_970,
    "resnext29": 4_774_218,
    "vgg16": 14_728_266,
    "googlenet": 6_166_250,
    "densenet121": 6_956_298,
    "mobilenetv2": 2_236_682,
    "dpn92": 34_236_634,
}
"""Parameters with CIFAR-10's heads."""


@pytest.mark.parametrize("name", MODELS)
def test_networks_have_their_published_sizes(name: str) -> None:
    with torch.device("meta"):
        net = MODELS[name]()
        assert sum(p.numel() for p in net.parameters()) == PUBLISHED[name]
        assert net(torch.empty(2, 3, 32, 32)).shape == (2, 10)


def test_other_heads_have_their_published_sizes() -> None:
    with torch.device("meta"):
        nets = {
            name: MODELS[name](classes=classes)
            for name, classes in (("mobilenetv2", 1000), ("resnet50", 100))
        }
    assert sum(p.numel() for p in nets["mobilenetv2"].parameters()) == 3_504_872
    assert sum(p.numel() for p in nets["resnet50"].parameters()) == 23_705_252  # Sync-Switch's setup 2
    with pytest.raises(ValueError, match="classes 100: the examples' networks"):
        MODELS["resnet32"](classes=100)


@pytest.mark.parametrize("name", MODELS)
def test_small_networks_train(name: str) -> None:
    torch.manual_seed(0)
    net = MODELS[name](width=0.125, **({} if name in ("resnet8", "resnet32") else {"depth": 0.1}))
    assert sum(p.numel() for p in net.parameters()) < PUBLISHED[name] / 5
    outputs = net(torch.randn(2, 3, 32, 32))
    assert outputs.shape == (2, 10)
    F.cross_entropy(outputs, torch.tensor([1, 2])).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())
