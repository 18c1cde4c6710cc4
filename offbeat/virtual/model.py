"""A model as far as time is concerned."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

from offbeat.cluster import sizes
from offbeat.virtual.cluster import Shape
from offbeat.virtual.cost import ready

if TYPE_CHECKING:
    from offbeat.cluster.state import State


@dataclass(frozen=True)
class Model:
    """What a model costs to send.

    sizes: elements of its trainable parameters, in the model's order. width: bytes of an element. buffers:
    bytes of its floating-point buffers. state: the optimizer's floating-point state, in parameters' sizes
    (SGD with momentum 1, Adam 2). passed: share of backward that is over when each parameter's gradient is
    there; empty where nobody knows, and each is taken to need the same time.
    """

    sizes: tuple[int, ...]
    width: int = 4
    buffers: int = 0
    state: float = 1.0
    passed: tuple[float, ...] = ()

    @classmethod
    def of(cls, shape: Shape) -> Model:
        """The model of a cluster's description."""
        return cls(shape.sizes, shape.width, shape.buffers, shape.state, shape.passed)

    @property
    def parameters(self) -> int:
        return sum(self.sizes)

    @cached_property
    def size(self) -> int:
        """Bytes of the parameters."""
        return self.parameters * self.width

    def buckets(self) -> list[list[int]]:
        """Numbers of the parameters in each bucket of BSP's reduction."""
        return sizes.buckets([size * self.width for size in self.sizes])

    def bucket_bytes(self) -> list[int]:
        """Bytes of each bucket."""
        return [sum(self.sizes[number] for number in bucket) * self.width for bucket in self.buckets()]

    def ready(self) -> list[float]:
        """Share of backward that has passed when each bucket is full."""
        buckets = self.buckets()
        if not self.passed:
            return ready(self.sizes, [len(bucket) for bucket in buckets])
        full = [max(self.passed[number] for number in bucket) for bucket in buckets]
        return list(accumulate(full, max))


def model_of(state: State) -> Model:
    """What a job trains, as far as time is concerned. Parameters of several kinds count as of the first's."""
    from offbeat.virtual.footprint import size_of, state_size  # with torch

    return Model(
        sizes=tuple(p.numel() for p in state.parameters),
        width=state.parameters[0].element_size(),
        buffers=sum(b.numel() * b.element_size() for b in state.buffers(floating=True)),
        state=state_size(state) / size_of(state),
    )
