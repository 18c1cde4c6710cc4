"""Where a worker's batches come from: units dealt by Offbeat, or a DataLoader of the user's own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch.utils.data import IterableDataset

from offbeat import checkpoint, job
from offbeat.data import Deal, Units, pieces, samples_in, tensors_of, to_device

if TYPE_CHECKING:
    from offbeat.loop import Loop


class Stream(ABC):
    """One source of batches, and its place in it."""

    batch_size: int | None = None
    deals = False  # whether all batches are units that Offbeat has dealt
    samples: int | None = None  # in the data set

    @abstractmethod
    def begin(self) -> None:
        """With epochs=, tells the job's length."""

    @abstractmethod
    def batches(self) -> Iterator[Any]:
        """Batches until the job is done."""

    def position(self) -> dict[str, Any] | None:
        """What a resumed run needs to go on from here; None when the job's units tell it."""
        return None

    def prepare(self) -> None:
        """There is time to fetch the next batch."""
        return

    def restart(self) -> None:
        """What this worker will do next is another thing now."""
        return

    def close(self) -> None:
        """Lets go of what fetches ahead."""
        return


def dealt(
    loop: Loop,
    data: Any,
    batch_size: int | None,
    micro_batches: int,
    shuffle: bool,
    num_workers: int,
    collate_fn: Callable[[list[Any]], Any] | None,
) -> Stream:
    """A stream over a map-style data set or tensors."""
    if isinstance(data, IterableDataset):
        raise TypeError("an IterableDataset has no samples to deal: give sync.batches a DataLoader over it")
    if (
        batch_size is None
        or isinstance(batch_size, bool)
        or not isinstance(batch_size, int)
        or batch_size < 1
    ):
        raise ValueError(f"batch_size is a unit's number of samples, from 1; got batch_size={batch_size!r}")
    if not isinstance(num_workers, int) or num_workers < 0:
        raise ValueError(f"num_workers is a number of processes, from 0; got {num_workers!r}")
    if isinstance(data, list | tuple) and any(isinstance(part, numpy.ndarray) for part in data):
        raise TypeError(
            "batches takes tensors, not numpy arrays: a list of arrays would be a data set of that many "
            "samples; use torch.from_numpy"
        )
    tensors = tensors_of(data)
    lengths = {len(t) for t in tensors} if tensors is not None else {len(data)}
    if len(lengths) > 1:
        raise ValueError(f"tensors must have the same number of samples; got {sorted(lengths)}")
    (length,) = lengths
    if length == 0:
        raise ValueError("the data set is empty")
    deal = Deal(length, batch_size, loop.data_seed, shuffle)
    return _Dealt(loop, data, deal, micro_batches, num_workers, collate_fn)


class _Dealt(Stream):
    deals = True

    def __init__(
        self,
        loop: Loop,
        data: Any,
        deal: Deal,
        micro_batches: int,
        num_workers: int,
        collate: Callable[[list[Any]], Any] | None,
    ):
        self._loop, self._micro, self.batch_size = loop, micro_batches, deal.batch_size
        self.samples = deal.length
        self._data, self._deal, self._num_workers, self._collate = data, deal, num_workers, collate
        self._units: Units | None = None

    def begin(self) -> None:
        self._loop.length_is(lambda epochs: max(round(epochs * self._deal.per_epoch), 1))

    def batches(self) -> Iterator[Any]:
        loop = self._loop
        deal = replace(self._deal, seed=loop.data_seed)  # a checkpoint may have brought another one
        self._units = Units(self._data, deal, loop.next_units, job.device(), self._num_workers, self._collate)
        while not loop.done:
            unit, batch = self._units.get()
            parts = pieces(batch, self._micro) if self._micro > 1 else [batch]
            if loop.worker.curvature.asked:
                yield from loop.look(parts)
                if not loop.worker.curvature.seen:  # a member has died, and this unit may be another's now
                    continue
            for number, part in enumerate(parts):
                yield from loop.lend(part, samples_in(part), number == len(parts) - 1, unit)

    def prepare(self) -> None:
        if self._units is not None:
            self._units.prepare()

    def restart(self) -> None:
        if self._units is not None:
            self._units.restart()

    def close(self) -> None:
        if self._units is not None:
            self._units.close()


def loaded(loop: Loop, loader: Any, micro_batches: int, epochs: float | None) -> Stream:
    """A stream over a DataLoader (or another iterable of batches)."""
    if not hasattr(loader, "__iter__"):
        raise TypeError(
            f"batches takes a map-style data set, tensors or a DataLoader; got {type(loader).__name__}"
        )
    if epochs is not None and (epochs != int(epochs) or _length(loader) is None):
        raise ValueError(
            f"over a DataLoader, epochs={epochs!r} needs whole epochs and a loader that knows its length; "
            f"give total= otherwise"
        )
    return _Loaded(loop, loader, micro_batches, None if epochs is None else int(epochs))


def _length(loader: Any) -> int | None:
    """Batches of one pass, if it knows: over an IterableDataset a DataLoader has a length in name only."""
    try:
        return len(loader)
    except TypeError:
        return None


class _Loaded(Stream):
    def __init__(self, loop: Loop, loader: Any, micro_batches: int, epochs: int | None):
        self._loop, self._loader, self._micro, self._epochs = loop, loader, micro_batches, epochs
        self.batch_size = getattr(loader, "batch_size", None)
        self._length = _length(loader)
        self._pass, self._taken = 0, 0
        self._begun: dict[str, Any] | None = None
        self._after: dict[str, Any] | None = None

    def begin(self) -> None:
        own = 0 if self._length is None else -(-self._length // self._micro)
        self._loop.length_is(lambda epochs: self._loop.sum_units(int(epochs) * own))

    def batches(self) -> Iterator[Any]:
        loop = self._loop
        skip = self._resume()
        while not self._over() and (self._epochs is None or self._pass < self._epochs):
            sampler: Any = getattr(self._loader, "sampler", None)
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(self._pass)
            if not skip:
                self._begun = {"random": checkpoint.random_state(), "own": self._own_generator()}
            batches = iter(self._loader)
            found = False
            for number, batch in enumerate(batches):
                found = True
                if number < skip:
                    if number == skip - 1 and self._after is not None:
                        checkpoint.set_random_state(self._after)
                    continue
                self._taken = number + 1
                last = (number + 1) % self._micro == 0 or number + 1 == self._length
                given = to_device(batch, job.device())
                yield from loop.look([given])
                yield from loop.lend(given, samples_in(batch), last)
                if self._over():
                    return
                if loop.resumed_data is not None:  # the job has gone back to a checkpoint
                    break
            if loop.resumed_data is not None:
                skip = self._resume()
                continue
            if not found:
                raise ValueError("the DataLoader gave no batch")
            skip = 0
            self._pass, self._taken = self._pass + 1, 0
        if not self._over():
            loop.leave()

    def _over(self) -> bool:
        return self._loop.done

    def _resume(self) -> int:
        """Batches of the current pass that the run which saved had used already."""
        place, self._loop.resumed_data = self._loop.resumed_data, None
        if place is None:
            return 0
        self._pass, self._taken, self._begun = place["pass"], place["taken"], place["begun"]
        if self._taken and self._begun is not None:
            # The pass is begun again as it was begun then, and what was used is passed over.
            self._after = checkpoint.random_state()
            checkpoint.set_random_state(self._begun["random"])
            if self._begun["own"] is not None:
                self._loader.generator.set_state(torch.tensor(self._begun["own"], dtype=torch.uint8))
        return int(self._taken)

    def _own_generator(self) -> list[int] | None:
        """State of the generator that the user gave to the DataLoader, if any."""
        generator = getattr(self._loader, "generator", None)
        return None if generator is None else generator.get_state().tolist()

    def position(self) -> dict[str, Any]:
        return {"pass": self._pass, "taken": self._taken, "begun": self._begun}
