"""A look at the loss's curvature: a gradient more on the coming batch, at parameters a little way off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from offbeat import checkpoint
from offbeat.cluster.state import State

STEP = 1e-3
"""How far off, as a part of the parameters' norm."""


class Curvature:
    """The steepest curvature of the members' mean loss, by a power iteration that goes on from look to look:

        λ = |g(x + ε·v) − g(x)| / ε,   v ← (g(x + ε·v) − g(x)) / |…|

    Both gradients are of the same batch, with the same random numbers. `ask`: the loop's coming batch is
    first given for a look; `begin` and `end` enclose its backward; `compare`, once `.grad` holds the gradient
    of the same batch at x. Parameters, buffers and random numbers are afterwards what they were, to the bit.
    All members see the same means, so λ is the same on all."""

    def __init__(self, state: State):
        self._state = state
        self._direction: list[Tensor] | None = None
        self._kept: tuple[list[Tensor], list[Tensor]] | None = None
        self._random: dict[str, Any] | None = None
        self._ahead: list[Tensor] | None = None
        self.asked = False

    @property
    def under_way(self) -> bool:
        """Whether the parameters are those of the look."""
        return self._kept is not None

    @property
    def seen(self) -> bool:
        """Whether the gradient of the look is there, and that at x is not yet."""
        return self._ahead is not None

    def ask(self) -> None:
        self.drop()
        self.asked = True

    @torch.no_grad()
    def begin(self) -> None:
        self.asked, parameters = False, self._state.parameters
        buffers = self._buffers()
        self._kept = [p.detach().clone() for p in parameters], [b.clone() for b in buffers]
        self._random = checkpoint.random_state()
        self._blind = self._direction is None
        if self._direction is None:
            draw = torch.Generator().manual_seed(0)  # the same on all members
            drawn = [torch.randn(p.shape, generator=draw).to(p.device, p.dtype) for p in parameters]
            self._direction = [d / norm(drawn) for d in drawn]
        self._step = STEP * max(float(norm(parameters)), 1.0)
        torch._foreach_add_(list(parameters), self._direction, alpha=self._step)

    @torch.no_grad()
    def end(self) -> None:
        """`.grad` holds the members' mean at x + ε·v."""
        parameters = self._state.parameters
        self._ahead = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters]
        self._put_back()
        assert self._random is not None
        checkpoint.set_random_state(self._random)
        self._random = None

    @torch.no_grad()
    def compare(self, scale: float = 1.0) -> float | None:
        """λ, once `.grad` holds the members' mean at x. None where a gradient is not finite, and the first
        time, along a direction that was drawn: that only finds a better one. scale: of a GradScaler, by which
        both gradients are too large."""
        assert self._ahead is not None
        ahead, self._ahead = self._ahead, None
        for a, p in zip(ahead, self._state.parameters, strict=True):
            if p.grad is not None:
                a.sub_(p.grad)
        size = float(norm(ahead))
        if not 0 < size < float("inf"):
            return None
        self._direction = [a / size for a in ahead]
        return None if self._blind else size / scale / self._step

    def drop(self) -> None:
        """Whatever was begun is given up; the parameters are what they were."""
        if self._kept is not None:
            with torch.no_grad():
                self._put_back()
        self.asked, self._ahead, self._random = False, None, None

    def _put_back(self) -> None:
        assert self._kept is not None
        parameters, buffers = self._kept
        mine = [*self._state.parameters, *self._buffers()]
        for tensor, kept in zip(mine, [*parameters, *buffers], strict=True):
            tensor.copy_(kept)
        self._kept = None

    def _buffers(self) -> list[Tensor]:
        return [*self._state.buffers(floating=True), *self._state.buffers(floating=False)]


def norm(tensors: Sequence[Tensor]) -> Tensor:
    """Of all elements together."""
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(t.float()) for t in tensors]))
