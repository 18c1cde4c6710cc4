"""The members' mean gradient, reduced bucket by bucket while backward still runs.

Why not DistributedDataParallel: it belongs to one process group for its whole life, its buckets follow
the order of the first backward, and over a group that changes it is silently wrong where workers differ
in which parameters they use (docs/design.md). Here the buckets are fixed, in the reverse order of the
parameters; a bucket leaves when it is full and all before it have left; backward ends when all landed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from offbeat.cluster.control import Exchange
from offbeat.cluster.epoch import Epoch, Work
from offbeat.cluster.flat import copy
from offbeat.cluster.sizes import buckets


class Bucket:
    """Some parameters and the flat buffer that their gradients travel in."""

    def __init__(self, numbers: list[int], parameters: Sequence[Parameter], wire: torch.dtype | None):
        self.numbers = numbers
        self.parameters = [parameters[i] for i in numbers]
        first = self.parameters[0]
        self.flat = torch.empty(
            sum(p.numel() for p in self.parameters), dtype=first.dtype, device=first.device
        )
        self.views: list[Tensor] = []
        offset = 0
        for p in self.parameters:
            piece = self.flat[offset : offset + p.numel()]
            # A gradient lies in memory as its parameter does, or optimizers take their slow path.
            self.views.append(
                piece.as_strided(p.shape, p.stride(), offset) if _dense(p) else piece.view(p.shape)
            )
            offset += p.numel()
        self.wire = torch.view_as_real(self.flat) if self.flat.is_complex() else self.flat
        if wire is not None and first.dtype == torch.float32:
            self.wire = torch.empty_like(self.flat, dtype=wire)
        self.narrow = self.wire.dtype != self.flat.dtype and not self.flat.is_complex()
        self.missing = len(numbers)
        self.work: Work | None = None

    def launch(self, epoch: Epoch, passed: float) -> None:
        """Sends what the parameters' `.grad` hold; a parameter without one counts as zero. passed: the share
        of backward that is over."""
        targets, sources = [], []
        for p, view in zip(self.parameters, self.views, strict=True):
            if p.grad is None:
                view.zero_()
            else:
                targets.append(view)
                sources.append(p.grad)
        copy(targets, sources)
        if self.flat.dtype == torch.float16:
            self.flat.div_(epoch.size)  # a sum of halves overflows where their mean doesn't
        if self.narrow:
            self.wire.copy_(self.flat)
        self.work = epoch.sum(self.wire, "gradients", passed)

    def land(self, epoch: Epoch, contributors: int) -> None:
        """Waits, and turns the sum into the mean over the members that contributed."""
        assert self.work is not None
        self.work.wait()
        self.work = None
        if self.narrow:
            self.flat.copy_(self.wire)
        divisor = contributors / epoch.size if self.flat.dtype == torch.float16 else contributors
        if divisor != 1:
            self.flat.div_(divisor)

    def fill(self, unused: int) -> None:
        """Gives every parameter its mean gradient, in a tensor of its own: the user may keep it."""
        targets, sources = [], []
        for i, p, view in zip(self.numbers, self.parameters, self.views, strict=True):
            if unused >> i & 1:
                p.grad = None
            elif p.grad is None:
                p.grad = view.clone()
            else:
                targets.append(p.grad)
                sources.append(view)
        copy(targets, sources)


def _dense(p: Tensor) -> bool:
    return p.is_contiguous() or (p.dim() == 4 and p.is_contiguous(memory_format=torch.channels_last))


class Reducer:
    """Reduces the gradients of `parameters` over an epoch's members in each backward that it is armed for.

    `arm(epoch, exchange)` before a backward; `finish()` when it has returned: then `.grad` holds the mean
    over the members. Parameters without a gradient on some members count as zero there; without one on
    any member they keep `grad=None`. A member that leaves with this exchange adds nothing.
    """

    def __init__(self, parameters: Sequence[Parameter], names: Sequence[str], wire: torch.dtype | None):
        self.parameters, self.names, self._wire = list(parameters), list(names), wire
        self._epoch: Epoch | None = None
        self._exchange: Callable[[int], Exchange] | None = None
        self.buckets: list[Bucket] = []
        self._bucket_of: dict[int, Bucket] = {}
        self._seen = bytearray(len(self.parameters))
        self.started = False
        self.reduced = False
        self._error: Exception | None = None
        self._next = 0
        self.hold = False
        self._hooks = [
            p.register_post_accumulate_grad_hook(lambda p, i=i: self._ready(i))
            for i, p in enumerate(parameters)
        ]

    @property
    def armed(self) -> bool:
        return self._epoch is not None

    def arm(self, epoch: Epoch, exchange: Callable[[int], Exchange]) -> None:
        """The coming backward reduces over `epoch`; `exchange(unused)` starts the words' exchange."""
        if not self.buckets:
            self._fill_buckets()
        self._epoch, self._exchange = epoch, exchange
        self._reset()
        self.reduced = False

    def rearm(self, epoch: Epoch) -> None:
        """The members have shrunk between two backwards of one step."""
        self._epoch = epoch

    def disarm(self) -> None:
        """Backward leaves each worker its own gradient; the buffers are given back."""
        self._epoch, self._exchange, self.buckets = None, None, []
        self._bucket_of = {}
        self._reset()

    def _fill_buckets(self) -> None:
        bytes_of = [p.numel() * p.element_size() for p in self.parameters]
        kinds = [(p.dtype, p.device) for p in self.parameters]
        self.buckets = [Bucket(one, self.parameters, self._wire) for one in buckets(bytes_of, kinds)]
        self._bucket_of = {i: bucket for bucket in self.buckets for i in bucket.numbers}

    def _reset(self) -> None:
        self.started, self._error, self._next = False, None, 0
        self._seen = bytearray(len(self.parameters))
        for bucket in self.buckets:
            bucket.missing, bucket.work = len(bucket.numbers), None

    def _ready(self, number: int) -> None:
        """A parameter's gradient has been accumulated. Errors wait for `finish`: autograd's own thread
        of control is no place to leave from."""
        if self._epoch is None or self._error is not None:
            return
        if self.hold:
            self.reduced = False  # `.grad` is more than the members' mean again
            return
        self.started = True
        bucket = self._bucket_of[number]
        if self._seen[number]:
            if bucket.work is not None:
                self._error = RuntimeError(
                    f"{self.names[number]} got a second gradient in one backward after its bucket had left: "
                    f"with activation checkpointing use checkpoint(..., use_reentrant=False)"
                )
            return
        self._seen[number] = 1
        bucket.missing -= 1
        if bucket.missing == 0:
            try:
                while self._next < len(self.buckets) and self.buckets[self._next].missing == 0:
                    self._launch()
            except Exception as error:
                self._error = error

    def _launch(self) -> None:
        assert self._epoch is not None
        bucket = self.buckets[self._next]
        for i, p in zip(bucket.numbers, bucket.parameters, strict=True):
            if p.grad is not None and p.grad.is_sparse:
                raise TypeError(
                    f"{self.names[i]} has a sparse gradient, which cannot be averaged with the others: "
                    f"use Embedding(sparse=False)"
                )
        bucket.launch(self._epoch, sum(self._seen) / len(self._seen))
        self._next += 1

    def abandon(self) -> bool:
        """Backward itself raised. Returns whether some of the gradient had left already: then the others
        count on the rest, and no later backward can make up for it."""
        left = self._next > 0
        self._reset()
        return left

    def finish(self) -> None:
        """Call when backward has returned. Sends what is left, waits, and fills `.grad`.

        Raises what went wrong inside backward's hooks, or `PeerLost`."""
        if not self.started or self._epoch is None or self._exchange is None:
            return
        if self._error is not None:
            error = self._error
            self._reset()
            raise error
        unused = 0
        for i, p in enumerate(self.parameters):
            if p.grad is None:
                unused |= 1 << i
        while self._next < len(self.buckets):
            self._launch()
        epoch, exchange = self._epoch, self._exchange(unused)
        words = exchange.staying()
        for word in words:
            unused &= word.unused
        for bucket in self.buckets:
            bucket.land(epoch, max(len(words), 1))
            bucket.fill(unused)
        self._reset()
        self.reduced = True

    def shadow(self, epoch: Epoch) -> None:
        """A leaving member's part in the others' reduction: nothing."""
        if not self.buckets:
            self._fill_buckets()
        for bucket in self.buckets:
            bucket.wire.zero_()
        works = [epoch.sum(bucket.wire, "gradients") for bucket in self.buckets]
        for work in works:
            work.wait()

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
