"""Units to samples, and tensors to flat buffers: properties for any size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from offbeat.cluster.flat import Layout, copy
from offbeat.data import Deal, pieces, samples_in, seeded
from offbeat.stream import loaded

SHAPES = st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=6)
KINDS = [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64]


@given(st.integers(1, 200), st.integers(1, 60), st.integers(0, 2**31), st.integers(0, 3), st.booleans())
@settings(deadline=None)
def test_every_sample_is_dealt_once_per_epoch(
    length: int, batch_size: int, seed: int, epoch: int, shuffle: bool
) -> None:
    deal = Deal(length, batch_size, seed, shuffle)
    units = range(epoch * deal.per_epoch, (epoch + 1) * deal.per_epoch)
    parts = [deal.indices(unit).tolist() for unit in units]
    assert Counter(chain.from_iterable(parts)) == Counter(range(length))
    assert all(len(part) == batch_size for part in parts[:-1])
    assert 1 <= len(parts[-1]) <= batch_size


@given(st.integers(1, 200), st.integers(1, 60), st.integers(0, 2**31), st.integers(0, 500))
@settings(deadline=None)
def test_a_unit_is_a_pure_function(length: int, batch_size: int, seed: int, unit: int) -> None:
    one = Deal(length, batch_size, seed).indices(unit)
    assert torch.equal(one, Deal(length, batch_size, seed).indices(unit))


@given(SHAPES, st.data())
@settings(deadline=None)
def test_views_of_a_layout_alias_its_buffers_without_overlap(
    shapes: list[list[int]], data: st.DataObject
) -> None:
    kinds = [data.draw(st.sampled_from(KINDS)) for _ in shapes]
    tensors = [
        torch.ones(shape, dtype=kind) * number
        for number, (shape, kind) in enumerate(zip(shapes, kinds, strict=True))
    ]
    layout = Layout(tensors)
    buffers = layout.empty()
    copy(layout.views(buffers), tensors)
    for view, tensor in zip(layout.views(buffers), tensors, strict=True):
        assert view.shape == tensor.shape
        assert torch.equal(view, tensor)
    for buffer in buffers:
        buffer.zero_()
    assert all(not view.any() for view in layout.views(buffers))


@given(st.integers(1, 40), st.integers(1, 8))
@settings(deadline=None)
def test_pieces_are_the_batch(length: int, count: int) -> None:
    batch = (torch.arange(length), {"a": torch.arange(2 * length).view(length, 2)})
    parts = pieces(batch, count)
    assert 1 <= len(parts) <= count
    assert torch.equal(torch.cat([a for a, _ in parts]), batch[0])
    assert torch.equal(torch.cat([b["a"] for _, b in parts]), batch[1]["a"])
    assert sum(samples_in(part) for part in parts) == length


def test_seeded_leaves_the_generators_where_they_were() -> None:
    torch.manual_seed(1)
    want = torch.rand(4)
    torch.manual_seed(1)
    first = torch.rand(2)
    with seeded(9):
        inside = torch.rand(2)
    assert torch.equal(torch.cat([first, torch.rand(2)]), want)
    with seeded(9):
        assert torch.equal(torch.rand(2), inside)


class Numbers(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(6.0))


def test_a_loader_over_a_stream_goes_by_a_total() -> None:
    """It has a `__len__`, which raises."""
    loader: Any = DataLoader(Numbers(), batch_size=2)
    assert loaded(cast("Any", None), loader, 1, None).batch_size == 2
    with pytest.raises(ValueError, match=r"epochs=2 needs whole epochs and a loader that knows its length"):
        loaded(cast("Any", None), loader, 1, 2)
