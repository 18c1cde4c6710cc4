"""From units to samples: which samples the job's k-th mini-batch holds, as a pure function."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate


@dataclass(frozen=True)
class Deal:
    """How a data set of `length` samples is dealt out in units of `batch_size`.

    Epoch e is one seeded permutation of all samples; its units follow one another, the last may be
    smaller. Unit u is the same samples whoever computes it and however many workers there are.
    """

    length: int
    batch_size: int
    seed: int
    shuffle: bool = True

    @property
    def per_epoch(self) -> int:
        """Units in an epoch."""
        return -(-self.length // self.batch_size)

    def indices(self, unit: int) -> Tensor:
        """Sample numbers of unit `unit`, an int64 tensor of at most `batch_size`."""
        epoch, place = divmod(unit, self.per_epoch)
        order = _order(self.length, self.seed, epoch) if self.shuffle else torch.arange(self.length)
        return order[place * self.batch_size : (place + 1) * self.batch_size]


@lru_cache(maxsize=4)
def _order(length: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(length, generator=torch.Generator().manual_seed(mixed(seed, "order", epoch)))


def mixed(*parts: object) -> int:
    """A 63-bit seed made from its parts, the same everywhere."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


class Fetch(Dataset):  # type: ignore[type-arg]
    """A map-style data set whose items are whole units; random augmentation in it is a function of the
    unit, not of who fetches it or when."""

    def __init__(self, source: Any, deal: Deal, collate: Callable[[list[Any]], Any] | None):
        self.source, self.deal, self.collate = source, deal, collate

    def __getitem__(self, unit: int) -> Any:
        with seeded(mixed(self.deal.seed, "unit", unit)):
            rows = self.deal.indices(unit).tolist()
            many = getattr(self.source, "__getitems__", None)
            samples = many(rows) if many is not None else [self.source[i] for i in rows]
            return (self.collate or default_collate)(samples)


class Numbered(Dataset):  # type: ignore[type-arg]
    """Units with their numbers."""

    def __init__(self, fetch: Fetch):
        self.fetch = fetch

    def __getitem__(self, unit: int) -> tuple[int, Any]:
        return unit, self.fetch[unit]


def _as_it_is(batch: Any) -> Any:
    return batch


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, torch's, numpy's and random's global generators start from `seed`; afterwards they are
    where they were."""
    kept = torch.get_rng_state(), numpy.random.get_state(), random.getstate()
    torch.default_generator.manual_seed(seed)
    numpy.random.seed(seed % 2**32)
    random.seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(kept[0])
        numpy.random.set_state(kept[1])
        random.setstate(kept[2])


def tensors_of(source: Any) -> tuple[Tensor, ...] | None:
    """The tensors of a tensor, a sequence of tensors or a TensorDataset; None for anything else."""
    if isinstance(source, Tensor):
        return (source,)
    if isinstance(source, torch.utils.data.TensorDataset):
        return tuple(source.tensors)
    if isinstance(source, list | tuple) and source and all(isinstance(t, Tensor) for t in source):
        return tuple(source)
    return None


class Units:
    """The units that one worker asks for, fetched ahead of time.

    `next_units(k)` names the next k units that this worker will do, as far as it knows now; when
    members change what was fetched for others' units is thrown away.
    """

    def __init__(
        self,
        source: Any,
        deal: Deal,
        next_units: Callable[[int], Sequence[int]],
        device: torch.device,
        num_workers: int,
        collate: Callable[[list[Any]], Any] | None,
    ):
        self._next, self._device, self._workers = next_units, device, num_workers
        self._ahead: deque[tuple[int, Any]] = deque()
        self._tensors = tensors_of(source)
        self._single = isinstance(source, Tensor)
        self.deal = deal
        self._fetch = Fetch(source, deal, collate)
        self._pool: ThreadPoolExecutor | None = None
        self._loader: Iterator[Any] | None = None
        self._expected = -1
        self._fetched: tuple[int, Any] | None = None

    def get(self) -> tuple[int, Any]:
        """The next unit's number and its batch, on this worker's device."""
        if self._tensors is not None:
            unit, batch = self._from_thread()
        elif self._workers:
            unit, batch = self._from_loader()
        else:
            (unit,) = self._next(1)
            ready, self._fetched = self._fetched, None
            batch = ready[1] if ready is not None and ready[0] == unit else self._fetch[unit]
        return unit, to_device(batch, self._device)

    def restart(self) -> None:
        """What this worker will do next is another thing now."""
        self._loader, self._fetched = None, None

    def prepare(self) -> None:
        """There is time to fetch the next unit now."""
        if self._tensors is not None:
            self._submit(self._next(1))
        elif not self._workers:
            (unit,) = self._next(1)
            self._fetched = unit, self._fetch[unit]

    def _from_thread(self) -> tuple[int, Any]:
        """Tensors are indexed by a thread, one unit ahead; that draws no random numbers."""
        self._submit(self._next(2))
        unit, future = self._ahead.popleft()
        assert isinstance(future, Future)
        return unit, future.result()

    def _submit(self, wanted: Sequence[int]) -> None:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="offbeat-data")
        while self._ahead and self._ahead[0][0] != wanted[0]:
            self._ahead.popleft()[1].cancel()
        for unit in list(wanted)[len(self._ahead) :]:
            self._ahead.append((unit, self._pool.submit(self._index, unit)))

    def _index(self, unit: int) -> Any:
        assert self._tensors is not None
        rows = self.deal.indices(unit)
        batch = tuple(t[rows.to(t.device)] for t in self._tensors)
        if self._device.type == "cuda":
            with torch.cuda.device(self._device):  # a thread begins on the first one
                batch = tuple(t if t.is_cuda else t.pin_memory() for t in batch)
        return batch[0] if self._single else batch

    def _from_loader(self) -> tuple[int, Any]:
        """Worker processes fetch ahead; they start anew when this worker's units change."""
        (wanted,) = self._next(1)
        if self._loader is None or wanted != self._expected:
            self._loader = iter(
                DataLoader(
                    Numbered(self._fetch),
                    batch_size=None,
                    collate_fn=_as_it_is,
                    generator=torch.Generator(),  # or it would draw from the one that the model uses
                    sampler=self._next(10**12),
                    num_workers=self._workers,
                    pin_memory=self._device.type == "cuda",
                )
            )
        unit, batch = next(self._loader)
        if unit != wanted:
            self._loader = None
            return self._from_loader()
        following = self._next(2)  # under shards only what is claimed is known
        self._expected = following[1] if len(following) > 1 else -1
        return wanted, batch

    def close(self) -> None:
        self._loader = None
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on `device`; containers keep their types."""
    if isinstance(batch, Tensor):
        return batch if batch.device == device else batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return type(batch)({key: to_device(value, device) for key, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    return batch


def pieces(batch: Any, count: int) -> list[Any]:
    """A batch of tensors cut along their first dimension into at most `count` micro-batches."""
    if isinstance(batch, Tensor):
        return list(batch.chunk(count))
    if isinstance(batch, dict):
        columns = {key: pieces(value, count) for key, value in batch.items()}
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    if isinstance(batch, list | tuple):
        rows = list(zip(*(pieces(value, count) for value in batch), strict=True))
        return [type(batch)(*row) if hasattr(batch, "_fields") else type(batch)(row) for row in rows]
    raise TypeError(f"micro_batches needs batches of tensors; the data set gives {type(batch).__name__}")


def samples_in(batch: Any) -> int:
    """Samples in a batch: the length of its first tensor."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.dim() else 1
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, list | tuple):
        return next((samples_in(value) for value in batch if samples_in(value)), 0)
    return 0
