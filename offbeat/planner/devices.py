"""Accelerators that need not be at hand: their peak rates, as their makers state them.

No net reaches a peak. What it does reach is its *efficiency*: t_p = B_l·FLOP / (efficiency·FLOPS). A profile
measures it on a device that is at hand, and `offbeat plan --device` takes it along to another one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from offbeat.virtual.keys import listed, nearest

ASSUMED = 0.5
"""Efficiency where nothing was measured."""


@dataclass(frozen=True)
class Device:
    """peaks: floating-point operations per second, by dtype; dense, a multiply-add counts as two. bandwidth:
    of its memory, in bytes per second."""

    name: str
    peaks: Mapping[str, float]
    bandwidth: float
    source: str

    def peak(self, dtype: str = "float32") -> float:
        """Raises ValueError for a dtype that it has no rate for."""
        if dtype not in self.peaks:
            raise ValueError(f"{self.name} has no rate for {dtype}; it has {listed(self.peaks)}")
        return self.peaks[dtype]


_T, _G = 1e12, 1e9

DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        Device(
            "TITAN X",
            {"float32": 6.144 * _T},
            336.5 * _G,
            "NVIDIA GeForce GTX TITAN X (Maxwell, 2015): 3072 cores, 1000 MHz; PALEO lists the same",
        ),
        Device(
            "K80",
            {"float32": 5.6 * _T, "float64": 1.87 * _T},
            480 * _G,
            "PALEO, for the board of two GPUs at base clock; memory: NVIDIA Tesla K80 board specification",
        ),
        Device(
            "V100",
            {"float64": 7.8 * _T, "float32": 15.7 * _T, "float16": 125 * _T},
            900 * _G,
            "NVIDIA Tesla V100 SXM2 data sheet",
        ),
        Device(
            "A100",
            {
                "float64": 9.7 * _T,
                "float32": 19.5 * _T,
                "tf32": 156 * _T,
                "float16": 312 * _T,
                "bfloat16": 312 * _T,
            },
            2039 * _G,
            "NVIDIA A100 80 GB SXM data sheet",
        ),
        Device(
            "H100",
            {
                "float64": 34 * _T,
                "float32": 67 * _T,
                "tf32": 494.7 * _T,
                "float16": 989.4 * _T,
                "bfloat16": 989.4 * _T,
                "float8": 1978.9 * _T,
            },
            3350 * _G,
            "NVIDIA H100 SXM data sheet, without sparsity",
        ),
        Device(
            "H200",
            {
                "float64": 34 * _T,
                "float32": 67 * _T,
                "tf32": 494.7 * _T,
                "float16": 989.4 * _T,
                "bfloat16": 989.4 * _T,
                "float8": 1978.9 * _T,
            },
            4800 * _G,
            "NVIDIA H200 SXM data sheet, without sparsity",
        ),
    )
}


def find(text: str) -> Device:
    """The device of that name, however it is written ("titan x", "TITANX"). Raises ValueError."""
    plain = {_plain(name): device for name, device in DEVICES.items()}
    if _plain(text) not in plain:
        raise ValueError(f"there is no device {text!r}; valid: {listed(DEVICES)}{nearest(text, DEVICES)}")
    return plain[_plain(text)]


def recognized(name: str) -> Device | None:
    """The device that a driver calls by `name`, such as "NVIDIA A100-SXM4-80GB"."""
    words = re.findall(r"[a-z]+[0-9]+[a-z]*|titan x", name.lower())
    return next((device for key, device in DEVICES.items() if key.lower() in words), None)


def _plain(text: str) -> str:
    return re.sub(r"[\s_-]", "", text).lower()
