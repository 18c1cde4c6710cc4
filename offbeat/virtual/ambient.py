"""What a script may leave set while it waits: the state of torch, numpy, random and Python that its own
process would keep for it, kept for each virtual worker and put in place when its turn comes."""

from __future__ import annotations

import os
import random
import sys
from types import ModuleType
from typing import Any

import numpy
import torch

DEVICES = ("cpu", "cuda")
_numpy: Any = numpy.random  # whose stubs lack what exchanges its generator


class Ambient:
    """One worker's. `leave` when another one's turn comes, `enter` when its own does."""

    def __init__(self, main: ModuleType | None, argv: list[str], environ: dict[str, str], out: Any, err: Any):
        self.private: set[str] = set()  # names of modules of its own
        self._modules: dict[str, ModuleType] = {} if main is None else {"__main__": main}
        if main is not None:
            self.private.add("__main__")
        self._argv, self.path, self._streams = argv, list(sys.path), (out, err)
        self._environ = environ
        # numpy's own is an object that each worker has to itself; torch's and random's are copied.
        self._generators = torch.get_rng_state(), numpy.random.MT19937(0), random.getstate()
        self._modes = _modes()
        self._neutral: Any = None  # holds inference mode off while others run

    @classmethod
    def of_process(cls) -> Ambient:
        """What is set now; to go back to with `enter`."""
        one = cls(None, sys.argv, {}, sys.stdout, sys.stderr)
        one.leave()
        return one

    def enter(self) -> None:
        for name, module in self._modules.items():
            sys.modules[name] = module
        self._modules = {}
        sys.argv, sys.path = self._argv, self.path
        sys.stdout, sys.stderr = self._streams
        for name, value in self._environ.items():
            if os.environ.get(name) != value:
                os.environ[name] = value
        cpu, own, other = self._generators
        torch.set_rng_state(cpu)
        _numpy.set_bit_generator(own)
        random.setstate(other)
        if self._neutral is not None:
            self._neutral.__exit__(None, None, None)
            self._neutral = None
        _set_modes(self._modes)

    def leave(self) -> None:
        for name in self.private:
            if (module := sys.modules.pop(name, None)) is not None:
                self._modules[name] = module
        self._argv, self.path = sys.argv, sys.path
        self._streams = sys.stdout, sys.stderr
        self._generators, self._modes = _generators(), _modes()
        if torch.is_inference_mode_enabled():
            self._neutral = torch._C._InferenceMode(False)
            self._neutral.__enter__()


def _generators() -> tuple[Any, ...]:
    return torch.get_rng_state(), _numpy.get_bit_generator(), random.getstate()


def _modes() -> tuple[Any, ...]:
    autocast = tuple((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in DEVICES)
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return (
        torch.is_grad_enabled(),
        autocast,
        nesting,
        torch.is_autocast_cache_enabled(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _set_modes(modes: tuple[Any, ...]) -> None:
    if modes == (now := _modes()):
        return
    grad, autocast, nesting, cache, dtype, deterministic, warn_only = modes
    torch.set_grad_enabled(grad)
    for device, (enabled, kind) in zip(DEVICES, autocast, strict=True):
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, kind)
    torch.set_autocast_cache_enabled(cache)
    for _ in range(nesting - now[2]):
        torch.autocast_increment_nesting()
    for _ in range(now[2] - nesting):
        torch.autocast_decrement_nesting()
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
