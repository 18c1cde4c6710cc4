"""Many tensors as a few contiguous buffers, one per dtype and device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from offbeat.cut import copy as copy


class Layout:
    """How a list of tensors lies in flat buffers.

    Tensors of one dtype and device share a buffer, in their order; complex ones lie as pairs of reals, in
    buffers of their own.
    `views(buffers)` gives tensors of the original shapes that alias the buffers.
    """

    def __init__(self, tensors: Sequence[Tensor]):
        self.shapes = [t.shape for t in tensors]
        self.complex = [t.is_complex() for t in tensors]
        self._place: list[tuple[int, int, int]] = []  # buffer, offset, length
        kinds: dict[tuple[torch.dtype, torch.device, bool], int] = {}
        self.sizes: list[int] = []
        for tensor in tensors:
            real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            buffer = kinds.setdefault((real.dtype, real.device, tensor.is_complex()), len(kinds))
            if buffer == len(self.sizes):
                self.sizes.append(0)
            if tensor.is_complex():
                self.sizes[buffer] += self.sizes[buffer] % 2  # torch sees pairs only at even places
            self._place.append((buffer, self.sizes[buffer], real.numel()))
            self.sizes[buffer] += real.numel()
        self.kinds = list(kinds)

    def empty(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        """New buffers; `dtype` replaces float32 (what goes over the wire in fewer bits)."""
        buffers = []
        for size, (kind, device, paired) in zip(self.sizes, self.kinds, strict=True):
            narrow = dtype is not None and kind == torch.float32 and not paired
            buffers.append(torch.empty(size, dtype=dtype if narrow else kind, device=device))
        return buffers

    def views(self, buffers: Sequence[Tensor]) -> list[Tensor]:
        found = []
        for (buffer, offset, length), shape, paired in zip(
            self._place, self.shapes, self.complex, strict=True
        ):
            piece = buffers[buffer][offset : offset + length]
            found.append(torch.view_as_complex(piece.view(*shape, 2)) if paired else piece.view(shape))
        return found
